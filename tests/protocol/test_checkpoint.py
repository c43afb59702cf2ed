"""checkpoint, safetensors_file and strict_json: what is accepted, and how each fault is named."""

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_plugin_api.checkpoint import (
    GGML_BLOCKS,
    Checkpoint,
    CheckpointError,
    read_json_object,
    read_safetensors_header,
)

CASES = Path(__file__).parents[1] / "cases"
INDEX = [
    case
    for case in json.loads((CASES / "INDEX.json").read_text())
    if case["id"] in ("C1", "C2", "C5") and case["kind"] == "checkpoint"
]
REFUSED = [case for case in INDEX if case["expect"]["kind"] == "error"]


def write_safetensors(path, tensors, *, data=b"", tail=b""):
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data + tail)
    return path


def u8(begin, end):
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def a_model(directory, tensors, data, quant=None):
    directory.mkdir(exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors, data=data)
    if quant is not None:
        (directory / "quant-metadata.json").write_text(json.dumps(quant))
    return directory


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return caught.value


def everything(error):
    return f"{error.message} {error.facts} {error.remedy}"


# --- the cases -------------------------------------------------------------------------------


def test_the_cases_of_this_part_are_all_here():
    assert len([c for c in INDEX if c["id"] == "C1"]) == 13
    assert len([c for c in INDEX if c["id"] == "C2"]) == 11
    assert len([c for c in INDEX if c["id"] == "C5"]) == 5


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: Path(c["file"]).stem)
def test_a_malformed_checkpoint_is_refused_by_name(case):
    path = CASES / case["file"]
    if case["file"].endswith("C5_escape"):
        path = path / "m"
    tracemalloc.start()
    started = time.monotonic()
    error = refusal(path)
    took = time.monotonic() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for text in case["expect"]["must_mention"]:
        assert text in error.message
    assert took < case["expect"].get("max_seconds", 1)
    assert peak < 2 * 1024 * 1024


def test_a_missing_shard_is_told_as_an_incomplete_download():
    error = refusal(CASES / "hand/ckpt/C5_shard_absent")
    assert error.code == "checkpoint-incomplete"
    assert "incomplete download" in error.remedy


def test_an_unknown_dtype_is_its_own_error_and_lists_its_text():
    error = refusal(CASES / "hand/safetensors/C2_dtype_unknown.safetensors")
    assert error.code == "safetensors-dtype"
    assert "F4_X" in error.message


def test_two_shards_hold_the_same_tensors_as_one_file():
    one = Checkpoint.open(CASES / "hand/ckpt/C7_head_dim_ok")
    two = Checkpoint.open(CASES / "hand/ckpt/C5_two_shards_ok")
    assert set(one) == set(two)
    assert len(two.files) == 2
    for name in one:
        assert (one[name].dtype, one[name].shape) == (two[name].dtype, two[name].shape)
        assert one.data(name) == two.data(name)


# --- headers ---------------------------------------------------------------------------------


def test_offsets_count_from_the_end_of_the_header(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"b": u8(2, 5), "a": u8(0, 2)}, data=b"abcde")
    checkpoint = Checkpoint.open(path)
    assert bytes(checkpoint.data("a")) == b"ab"
    assert bytes(checkpoint.data("b")) == b"cde"


def test_the_view_of_a_tensor_cannot_be_written(tmp_path):
    checkpoint = Checkpoint.open(write_safetensors(tmp_path / "m.safetensors", {"a": u8(0, 2)}, data=b"ab"))
    assert checkpoint.data("a").readonly


@pytest.mark.parametrize(
    ("tensors", "blamed"),
    [
        ({"a": u8(0, 3), "b": u8(2, 5)}, "'b' begins at byte 2 of the data and overlaps 'a'"),
        ({"a": u8(0, 2), "b": u8(3, 5)}, "'b' begins at byte 3 of the data and leaves a hole after 'a'"),
        ({"a": u8(1, 5)}, "leaves a hole after the header"),
        ({"a": u8(0, 4)}, "1 bytes after 'a'"),
        ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 5]}}, "U8 [3], 3 bytes, but has 5"),
        ({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 5]}}, "16 bytes, but has 5"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [2**63], "data_offsets": [0, 5]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [1] * 33, "data_offsets": [0, 1]}}, "shape"),
        ({"a": [0, 5]}, "'a' is described by"),
        ({"a": u8(0, 5), "__metadata__": {"format": 1}}, "__metadata__"),
    ],
)
def test_tensors_that_do_not_cover_the_data_exactly_are_refused(tmp_path, tensors, blamed):
    path = write_safetensors(tmp_path / "m.safetensors", tensors, data=b"abcde")
    assert blamed in refusal(path).message


def test_a_repeated_tensor_name_is_refused(tmp_path):
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}'
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    assert "'a' occurs twice" in refusal(path).message


def test_empty_tensors_and_metadata_are_fine(tmp_path):
    tensors = {"a": u8(0, 0), "b": u8(0, 1), "c": u8(1, 1), "__metadata__": {"format": "pt"}}
    path = write_safetensors(tmp_path / "m.safetensors", tensors, data=b"x")
    file = read_safetensors_header(path)
    assert file.metadata == {"format": "pt"}
    assert [file.entries[n].nbytes for n in "abc"] == [0, 1, 0]
    assert bytes(Checkpoint.open(path).data("a")) == b""


def test_a_header_that_begins_with_a_brace_is_never_taken_for_a_web_page(tmp_path):
    # 0x6d74683c: a declared length whose bytes read "<htm"; the brace says it is safetensors all the same.
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"<htm\0\0\0\0{}")
    assert "declares a header of 1836345404 bytes" in refusal(path).message


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refusal(tmp_path).message


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_but_never_crashes(tmp_path_factory, data):
    good = (CASES / "hand/ckpt/C8_tied_ok/model.safetensors").read_bytes()[:2000]
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    with pytest.raises(CheckpointError):  # it was cut, so it can't be right
        read_safetensors_header(path)


# --- directories -----------------------------------------------------------------------------


def test_a_folder_of_pickles_says_why_they_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    error = refusal(tmp_path)
    assert "pytorch_model.bin" in everything(error)
    assert "run code" in error.remedy


def test_shards_without_their_index_name_the_index(tmp_path):
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {})
    assert "model.safetensors.index.json" in refusal(tmp_path).remedy


@pytest.mark.parametrize("shard", ["../x", "/etc/passwd", "a/b", "a\\b", "", "..", "c:x", 7, None])
def test_a_shard_is_a_plain_file_name(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": shard}}))
    error = refusal(tmp_path)
    assert error.code == "checkpoint-index-invalid"
    assert repr(shard) in error.message


def test_a_tensor_the_index_forgot_is_still_accounted_for(tmp_path):
    write_safetensors(tmp_path / "one.safetensors", {"a": u8(0, 1), "b": u8(1, 2)}, data=b"xy")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors"}})
    )
    assert set(Checkpoint.open(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize(("names", "said"), [("b", "1 tensor that is not"), ("bc", "2 tensors that are not")])
def test_a_tensor_that_only_the_index_has_is_refused(tmp_path, names, said):
    write_safetensors(tmp_path / "one.safetensors", {"a": u8(0, 1)}, data=b"x")
    weight_map = dict.fromkeys(["a", *names], "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    error = refusal(tmp_path)
    assert error.code == "checkpoint-index-mismatch"
    assert f"names {said} in the files it names: b in one.safetensors" in error.message


def test_a_file_that_changed_after_opening_is_not_mapped(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": u8(0, 9000)}, data=bytes(9000))
    checkpoint = Checkpoint.open(path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match="changed after its header was read"):
        checkpoint.data("a")


def resident_bytes_of(path):
    total = 0
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            mine = line.endswith(str(path))
        elif mine and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps (Linux)")
def test_only_the_tensors_asked_for_take_memory_and_release_gives_it_back(tmp_path):
    size = 8 * 1024 * 1024
    path = write_safetensors(
        tmp_path / "m.safetensors", {"a": u8(0, size), "b": u8(size, 2 * size)}, data=os.urandom(2 * size)
    )
    checkpoint = Checkpoint.open(path)
    assert resident_bytes_of(path) == 0
    first = bytes(checkpoint.data("a"))
    held = resident_bytes_of(path)
    assert size <= held < size * 1.5
    checkpoint.release("a")
    assert resident_bytes_of(path) < size / 4
    assert bytes(checkpoint.data("a")) == first


# --- quant-metadata.json ---------------------------------------------------------------------


def a_quantised_model(tmp_path, *, quant_format="q8_0", shape=(2, 64), nbytes=2 * 2 * 34, **changes):
    quant = {
        "version": 1,
        "tensors": {"w": {"format": quant_format, "shape": list(shape)}},
        "norms_include_one": True,
        **changes,
    }
    return a_model(tmp_path / "m", {"w": u8(0, nbytes)}, bytes(nbytes), quant)


@pytest.mark.parametrize("quant_format", sorted(GGML_BLOCKS))
def test_quant_metadata_names_format_and_logical_shape(tmp_path, quant_format):
    weights, block_bytes = GGML_BLOCKS[quant_format]
    directory = a_quantised_model(
        tmp_path, quant_format=quant_format, shape=(3, 2 * weights), nbytes=6 * block_bytes
    )
    metadata = Checkpoint.open(directory).quant_metadata
    assert metadata.norms_include_one
    assert (metadata.tensors["w"].format, metadata.tensors["w"].shape) == (quant_format, (3, 2 * weights))


def test_without_quant_metadata_nothing_is_quantised(tmp_path):
    metadata = Checkpoint.open(a_model(tmp_path / "m", {"w": u8(0, 1)}, b"x")).quant_metadata
    assert (dict(metadata.tensors), metadata.norms_include_one) == ({}, False)


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"version": 2}, "unknown version"),
        ({"tensors": []}, "tensors"),
        ({"norms_include_one": 1}, "norms_include_one"),
        ({"norm_include_one": True}, "norms_include_one"),
        ({"tensors": {"w": {"format": "q9_9", "shape": [2, 64]}}}, "q9_9"),
        ({"tensors": {"w": {"format": "q8_0", "shape": [64]}}}, "[rows, columns]"),
        ({"tensors": {"w": {"format": "q8_0", "shape": [2, 40]}}}, "no multiple"),
        ({"tensors": {"w": {"format": "q8_0", "shape": [3, 64]}}}, "needs a tensor U8 [204]; found U8 [136]"),
        ({"tensors": {"v": {"format": "q8_0", "shape": [2, 64]}}}, "no such tensor"),
        ({"tensors": {"w": {"format": "q8_0", "shape": [2, 64], "bits": 8}}}, "no more"),
    ],
)
def test_quant_metadata_that_does_not_fit_the_tensors_is_refused(tmp_path, changes, blamed):
    error = refusal(a_quantised_model(tmp_path, **changes))
    assert error.code == "quant-metadata-invalid"
    assert blamed in error.message


# --- JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "blamed"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[]", "object"),
    ],
)
def test_json_from_strangers_is_read_strictly(tmp_path, text, blamed):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path)
    assert blamed in caught.value.message
    assert "config.json" in caught.value.message
