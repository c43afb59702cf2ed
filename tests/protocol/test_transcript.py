from pathlib import Path

import pytest

from vox_plugin_api import messages as m
from vox_plugin_api.transcript import Transcript

DIGEST = "ab" * 32


def load(model_dir: str, threads: int | None) -> m.LoadModelParams:
    return m.LoadModelParams(model_dir=model_dir, model_digest=DIGEST, threads=threads, memory_bytes=threads)


def generate(first: int) -> m.GenerateParams:
    return m.GenerateParams(token_ids=[first], max_tokens=2)


def test_the_lines_are_these(tmp_path: Path) -> None:
    with Transcript(tmp_path / "t") as transcript:
        exchange = transcript.begin("trace", m.TraceParams(token_ids=[1], slices=["logits"]))
        exchange.event(None)
        exchange.event({"b": 1, "a": "7fc00000"}, [b"\1\2"])
        exchange.end()
    assert (tmp_path / "t").read_text().splitlines() == [
        '{"protocol":1,"transcript":1}',
        '{"method":"trace","params":{"slices":["logits"],"token_ids":[1]},"request":1}',
        '{"request":1,"result":{"a":"7fc00000","b":1}}',
        '{"bytes":2,"request":1,"slice":"a12871fee210fb8619291eaea194581cbd2531e4b23759d225f6806923f63222"}',
    ]


def test_the_order_in_which_answers_come_does_not_show(tmp_path: Path) -> None:
    def record(path: Path, *, turns: str) -> bytes:
        with Transcript(path) as transcript:
            exchanges = {"a": transcript.begin("generate", generate(1))}
            exchanges["b"] = transcript.begin("generate", generate(2))
            for number, turn in enumerate(turns):
                exchanges[turn].event({"token": turns[:number].count(turn)})
                if turns[number + 1 :].count(turn) == 0:
                    exchanges[turn].end()
        return path.read_bytes()

    assert record(tmp_path / "1", turns="ababab") == record(tmp_path / "2", turns="bbbaaa")
    assert record(tmp_path / "3", turns="ababab") != record(tmp_path / "4", turns="ababaa")


def test_where_the_model_lies_and_what_the_machine_lends_is_not_written(tmp_path: Path) -> None:
    for name, params in (("1", load("/here", 2)), ("2", load("/there", None))):
        with Transcript(tmp_path / name) as transcript:
            transcript.begin("load_model", params).end()
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert DIGEST in (tmp_path / "1").read_text()


def test_an_adapter_is_named_by_its_digest_and_not_by_its_path(tmp_path: Path) -> None:
    config = m.AdapterConfig(rank=4, alpha=8.0, targets=["q_proj"])
    for name, file in (("1", "/here/a"), ("2", "/there/b")):
        adapter = m.AdapterParams(file=file, digest="cd" * 32, config=config, key_map={"a": "b"})
        params = m.LoadModelParams(model_dir="/", model_digest=DIGEST, adapter=adapter)
        with Transcript(tmp_path / name) as transcript:
            transcript.begin("load_model", params).end()
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert "cd" * 32 in (tmp_path / "1").read_text()


def test_a_failure_is_a_line_with_its_code_alone(tmp_path: Path) -> None:
    with Transcript(tmp_path / "t") as transcript:
        exchange = transcript.begin("unload", m.UnloadParams())
        exchange.end("no-model")
    assert (tmp_path / "t").read_text().splitlines()[-1] == '{"failed":"no-model","request":1}'


def test_the_file_appears_whole_and_under_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("an older one")
    transcript = Transcript(path)
    transcript.begin("generate", generate(1)).event({"token": 1})
    assert path.read_text() == "an older one"
    transcript.close()
    transcript.close()
    assert path.read_text().splitlines()[-1] == '{"request":1,"result":{"token":1}}'
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is /dev/full here")
def test_a_disk_that_fills_stops_the_recording_and_not_the_answers(tmp_path, caplog):
    path = tmp_path / "record"
    path.write_text("an older transcript")
    transcript = Transcript(path)
    transcript._file.close()
    transcript._file = Path("/dev/full").open("wb")  # noqa: SIM115 (the transcript closes it)
    for _ in range(3):
        exchange = transcript.begin("generate", m.GenerateParams(token_ids=[1], max_tokens=1))
        exchange.event({"tokens": ["x" * 100_000]})
        exchange.end()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(OSError, match="No space left") as caught:
        transcript.close()
    assert caught.value.filename == str(path)
    transcript.close()
    assert path.read_text() == "an older transcript"
    assert list(tmp_path.iterdir()) == [path]
