"""tokenizer_file: loads, refuses by name, and keeps little memory."""

import sys

import pytest

from vox_host.errors import ModelError
from vox_host.models.tokenizer_file import load_tokenizer

MIB = 1024 * 1024

# VmHWM and not getrusage: what a child inherits of its parent's peak there hides its own.
MEASURE = """
import sys
from pathlib import Path
from vox_host.models.tokenizer_file import load_tokenizer

def field(file, name):
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])

before = field("smaps_rollup", "Pss:")
tokenizer = load_tokenizer(Path(sys.argv[1]))
print(field("smaps_rollup", "Pss:") - before, field("status", "VmHWM:") - before)
"""


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"model":{"type":"Spiral"}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(path)
    assert caught.value.code == "tokenizer-invalid"
    assert str(path) in caught.value.message


@pytest.mark.real_model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup (Linux)")
def test_the_demo_tokenizer_takes_little_memory(demo_model, run_python):
    kept, peak = map(int, run_python(MEASURE, demo_model / "tokenizer.json").stdout.split())
    # Seen: 78 MiB kept, 116 MiB at the peak; with all of the original's merges 100 and 359 MiB.
    assert kept * 1024 < 90 * MIB
    assert peak * 1024 < 140 * MIB
