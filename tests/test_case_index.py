"""Every case of tests/cases is run by a named test module, or is visibly not yet due."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
INDEX = json.loads((TESTS / "cases" / "INDEX.json").read_text())

IMPORT = "host/models/test_import_checks.py"

DUE: dict[str, str | tuple[str, ...]] = {
    "A1": "host/server/test_chat_completion.py",
    "A2": "host/server/test_completion.py",
    "A5": "host/server/test_chat_completion.py",
    "A6": "host/server/test_completion.py",
    "A7": "host/server/test_http_app.py",
    "A9": "host/server/test_http_app.py",
    "C1": ("protocol/test_checkpoint.py", IMPORT),
    "C2": ("protocol/test_checkpoint.py", IMPORT),
    "C5": ("protocol/test_checkpoint.py", IMPORT),
    "C7": ("core/test_weights.py", IMPORT),
    "C8": ("core/test_weights.py", IMPORT),
    "C10": ("families/test_config.py", IMPORT),
    "C12": ("families/test_config.py", IMPORT),
    "C14": ("families/test_config.py", IMPORT),
    "D1": "core/test_engine.py",
    "D4": "core/test_engine.py",
    "D5": "core/test_engine.py",
    "L1": ("host/runs/test_peft_folder.py", "core/test_served_adapters.py"),
    "L2": ("host/runs/test_peft_folder.py", "core/test_served_adapters.py"),
    "L5": "host/runs/test_peft_folder.py",
    "L6": "core/test_merging.py",
    "L8": "core/test_served_adapters.py",
    "M1": "host/hardware/test_cases_memory.py",
    "M4": "host/hardware/test_cases_memory.py",
    "M5": "host/hardware/test_cases_memory.py",
    "M6": "host/hardware/test_cases_memory.py",
    "M9": "host/hardware/test_cases_memory.py",
    "M10": "host/hardware/test_cases_memory.py",
    "P1": "host/plugins/test_cases_plugin.py",
    "P2": "host/plugins/test_cases_plugin.py",
    "P3": "host/plugins/test_cases_plugin.py",
    "P6": "host/cli/test_doctor.py",
    "Q4": "conformance/test_quant_rows.py",
    "Q6": "host/models/test_gguf_import.py",
    "Q8": ("host/models/test_gguf_header.py", IMPORT),
    "R1": ("host/training/test_pace.py", "host/training/test_cases_training.py"),
    "R3": "host/training/data/test_encoding.py",
    "R4": "host/training/test_cases_training.py",
    "R5": "host/training/test_cases_training.py",
    "R8": "host/training/test_cases_training.py",
    "T1": "host/models/test_tokenizer.py",
    "T2": "host/chat/test_text_stream.py",
    "T3": "host/chat/test_text_stream.py",
    "T5": "host/chat/test_template.py",
    "T6": "host/models/test_tokenizer.py",
    "T8": "host/server/test_completion.py",
}
"""Case id to the module that runs it, or to all that do."""

NOT_YET_DUE = {
    **dict.fromkeys(
        ("X1", "X2", "X4", "X6", "X8"),
        "the server does not parse tool calls yet; what the grader reads of them is in test_tool_calls",
    ),
    **dict.fromkeys(("Q1", "Q2"), "nothing is quantised here yet"),
}
"""Case id to the capability it waits for."""


@pytest.mark.parametrize("case", INDEX, ids=lambda case: f"{case['id']}-{Path(case['file']).name}")
def test_every_case_has_a_test_or_waits_for_a_named_capability(case):
    assert (TESTS / "cases" / case["file"]).exists()
    if case["id"] in NOT_YET_DUE:
        pytest.skip(f"not yet due: {NOT_YET_DUE[case['id']]}")
    due = DUE[case["id"]]
    for module in [due] if isinstance(due, str) else due:
        text = (TESTS / module).read_text()
        assert re.search(rf"\b{case['id']}(?:_\w+)?\b", text), f"{module} does not name {case['id']}"


def test_there_are_cases_and_no_id_is_in_both_lists():
    assert len(INDEX) > 150
    assert not DUE.keys() & NOT_YET_DUE.keys()
    assert {case["id"] for case in INDEX} == DUE.keys() | NOT_YET_DUE.keys()
