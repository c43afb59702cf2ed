import inspect
import re
from pathlib import Path

from protocol.render_protocol_doc import PATH, render
from vox_plugin_api import backend, child, installed, request_loop

ROOT = PATH.parents[1]


def test_the_generated_facts_are_those_of_the_code() -> None:
    document = PATH.read_text()
    assert render(document) == document, "run `python tests/protocol/render_protocol_doc.py`"


def test_every_exit_status_is_listed() -> None:
    table = PATH.read_text().split("| exit status of a worker |")[1].split("\n\n")[0]
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    stated = {
        value
        for module in (child, request_loop)
        for name, value in vars(module).items()
        if name.startswith("EXIT_")
    }
    assert listed == stated | {0}


def test_every_error_code_of_worker_and_supervision_is_listed() -> None:
    document = PATH.read_text()
    sources = [
        *(Path(inspect.getfile(module)) for module in (backend, child, installed, request_loop)),
        *(ROOT / "host/src/vox_host/workers").glob("*.py"),
    ]
    codes: set[str] = set()
    for source in sources:
        codes |= _codes(source)
    assert len(codes) > 20
    assert sorted(code for code in codes if f"`{code}`" not in document) == []


def _codes(source: Path) -> set[str]:
    """Error codes are the kebab-case words that stand first in a call or as `code=`."""
    call = r"(?:Error|_kill|_unavailable|worker_killed)"
    found = re.findall(call + r"\(\s*(?:code=)?\"([a-z]+(?:-[a-z]+)*)\"", source.read_text())
    return set(found) - {"bad-message"}
