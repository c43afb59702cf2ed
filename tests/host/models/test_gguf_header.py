"""gguf_header: what a hostile file costs, and how each fault is named."""

import json
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_host.errors import ModelError
from vox_host.models.gguf_header import read_gguf_header

CASES = Path(__file__).parents[2] / "cases"
HOSTILE = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] == "Q8"]


def refusal(path):
    with pytest.raises(ModelError) as caught:
        read_gguf_header(path)
    return caught.value


def string(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    return string(key) + struct.pack("<I", kind) + value


def tensor(name, extents, kind, offset):
    return (
        string(name)
        + struct.pack("<I", len(extents))
        + struct.pack(f"<{len(extents)}Q", *extents)
        + struct.pack("<IQ", kind, offset)
    )


def write(path, *, pairs=(), tensors=(), data=b"", alignment=32, version=3):
    body = (
        b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    )
    body += bytes(-len(body) % alignment)
    path.write_bytes(body + data)
    return path


def test_the_cases_of_this_part_are_all_here():
    assert len(HOSTILE) == 19


@pytest.mark.parametrize("case", HOSTILE, ids=lambda c: Path(c["file"]).stem)
def test_a_hostile_file_is_refused_by_name_at_once_and_in_little_memory(case):
    path = CASES / case["file"]
    tracemalloc.start()
    started = time.monotonic()
    error = refusal(path)
    took = time.monotonic() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for text in case["expect"].get("must_mention", case["expect"].get("error")):
        assert text in error.message
    assert {"file", "field", "byte"} <= set(dict(error.facts))
    assert took < case["expect"]["max_seconds"]
    assert peak < 1024 * 1024


TENSOR_DATA = bytes(64)


def array(kind, count, content=b""):
    return pair("k", 9, struct.pack("<IQ", kind, count) + content)


def number_pair(key, value):
    return pair(key, 4, struct.pack("<I", value))


FAULTS = {
    "many dimensions": ({"tensors": [tensor("t", [1] * 5, 0, 0)]}, "has 5 dimensions"),
    "no dimension": ({"tensors": [tensor("t", [], 0, 0)]}, "has 0 dimensions"),
    "long string": ({"pairs": [pair("k", 8, struct.pack("<Q", 2**60))]}, "'k' at byte 37 is declared with"),
    "many strings": ({"pairs": [array(8, 2**60)]}, f"'k' at byte 41 has {2**60} strings"),
    "long string in an array": (
        {"pairs": [array(8, 1, struct.pack("<Q", 2**60))]},
        "'k'[0] at byte 49 is declared with",
    ),
    "many numbers": ({"pairs": [array(12, 2**60)]}, f"'k' at byte 41 has {2**60} elements"),
    "array in an array": ({"pairs": [array(9, 1)]}, "array in an array"),
    "unknown element type": ({"pairs": [array(77, 1)]}, "type 77"),
    "key that is not text": ({"pairs": [number_pair(b"\xff", 0)]}, "is not UTF-8"),
    "empty key": ({"pairs": [number_pair("", 0)]}, "has 0 characters"),
    "alignment of another type": (
        {"pairs": [pair("general.alignment", 8, string("32"))]},
        "'general.alignment' at byte 24 is '32'",
    ),
    "alignment not a power of two": ({"pairs": [number_pair("general.alignment", 48)]}, "is 48"),
    "overlap": (
        {"tensors": [tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)]},
        "tensor 'b' at byte 128 overlaps 'a'",
    ),
    "cut data": ({"tensors": [tensor("a", [17], 0, 0)]}, "truncated"),
    "version 1": ({"version": 1}, "version at byte 4 is 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_field(tmp_path, fault):
    content, blamed = FAULTS[fault]
    error = refusal(write(tmp_path / "f.gguf", data=TENSOR_DATA, **content))
    assert blamed in error.message
    assert "nothing was imported" in error.message


def test_a_type_that_exists_but_is_not_imported_is_named(tmp_path):
    path = write(tmp_path / "f.gguf", tensors=[tensor("t", [256], 23, 0)], data=bytes(256))
    error = refusal(path)
    assert error.code == "gguf-type-unsupported"
    assert "iq4_xs" in error.message
    assert "q4_k" in dict(error.facts)["supported"]


def test_every_type_has_the_sizes_that_ggml_gives_it():
    from vox_host.models.ggml_types import GGML_TYPES, OTHER_GGML_TYPES

    for number, ours in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert ours.name == theirs.name.lower()
        assert (ours.block, ours.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]
    for number, name in OTHER_GGML_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name.lower() == name


def test_a_good_file_reads_as_the_gguf_library_reads_it(tmp_path, write_gguf):
    path = tmp_path / "good.gguf"
    write_gguf(path)
    ours = read_gguf_header(path)
    theirs = gguf.GGUFReader(path)
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.shape == tuple(reversed(other.shape.tolist()))
        assert (mine.offset, mine.nbytes) == (other.data_offset, other.n_bytes)
        assert mine.type.name == other.tensor_type.name.lower()
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value if isinstance(value, str | int | float) else list(value)) == field.contents()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_or_refused_but_never_crash(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    good = (CASES / "hand/quant/Q6_gemma_norm.gguf").read_bytes()
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(0, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        read_gguf_header(path)
    except ModelError as error:
        assert str(path) in error.message


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status (Linux)")
def test_a_hostile_count_costs_the_process_no_memory(tmp_path, run_python):
    path = write(tmp_path / "f.gguf", pairs=[array(8, 2**40)], data=bytes(4096))
    script = (
        "import sys; from pathlib import Path\n"
        "from vox_host.models.gguf_header import read_gguf_header\n"
        "def peak(): return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "try: read_gguf_header(Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(peak() - before)\n"
    )
    name, grown = run_python(script, path).stdout.split()
    assert name == "ModelError"
    assert int(grown) < 4096  # KiB
