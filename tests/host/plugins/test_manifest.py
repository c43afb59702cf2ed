"""Plugin.toml: what is accepted, and which field is blamed for what is not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_toys import REPOSITORY, manifest_text

from vox_host.errors import PluginError
from vox_host.manifest import (
    Manifest,
    differences_from_embedded,
    find_source_manifest,
    load_manifest,
    parse_manifest,
)

ARTIFACT = """
[artifacts.linux-x86_64]
file = "{file}"
sha256 = "{sha256}"
size = {size}
"""


def parse(text: str, **expected: object) -> Manifest:
    return parse_manifest(text.encode(), source="x/Plugin.toml", **expected)  # type: ignore[arg-type]


def problems_of(text: str, **expected: object) -> dict[str, str]:
    with pytest.raises(PluginError) as caught:
        parse(text, **expected)
    assert caught.value.code == "manifest-invalid"
    assert "x/Plugin.toml" in caught.value.message
    return dict(caught.value.facts)


def with_artifact(file: str = "a.whl", sha256: str = "ab" * 32, size: str = "1") -> str:
    return manifest_text() + ARTIFACT.format(file=file, sha256=sha256, size=size)


def test_a_whole_manifest_is_read() -> None:
    manifest = parse(manifest_text(lane="cuda", devices=("nvidia :: driver >= 550",)))
    assert manifest.plugin.id == "vox-toy"
    assert manifest.backend.lane == "cuda"
    assert manifest.requires.devices == ["nvidia :: driver >= 550"]
    assert manifest.artifacts == {}


def test_the_manifest_of_the_cpu_lane_is_valid() -> None:
    path = REPOSITORY / "plugins/mens-cpu-ref/src/mens_cpu_ref/Plugin.toml"
    manifest, digest = load_manifest(path, expected_id="mens-cpu-ref", expected_version="0.1.0")
    assert manifest.backend.numerics == ["canonical"]
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_problem_is_reported_at_once_with_its_dotted_path() -> None:
    text = """
schema = 2
colour = "red"
[plugin]
id = "Vox_Toy"
version = "one"
protocol = 1
summary = ""
[backend]
lane = "CPU"
priority = true
numerics = ["canonical", "slow"]
capabilities = []
speed = 3
[requires]
os = ["linux", "beos"]
arch = ["sparc"]
devices = ["nvidia :: driver >= 550", "nvidia : driver"]
[artifacts.linux-x86_64]
file = "../outside.so"
sha256 = "abc"
size = "1"
"""
    assert sorted(problems_of(text)) == [
        "artifacts.linux-x86_64.file",
        "artifacts.linux-x86_64.sha256",
        "artifacts.linux-x86_64.size",
        "backend.capabilities",
        "backend.lane",
        "backend.numerics[1]",
        "backend.priority",
        "backend.speed",
        "colour",
        "plugin.id",
        "plugin.protocol",
        "plugin.summary",
        "plugin.version",
        "requires.arch[0]",
        "requires.devices[1]",
        "requires.os[1]",
        "schema",
    ]


def test_missing_sections_and_keys_are_named() -> None:
    assert problems_of("schema = 1\n") == {
        "plugin": "is missing",
        "backend": "is missing",
        "requires": "is missing",
    }
    assert problems_of(manifest_text().replace('protocol = ">=1,<2"\n', "")) == {
        "plugin.protocol": "is missing"
    }


@pytest.mark.parametrize("value", ["1", "1.0", "true", '""', '"one"', '">=1,<"', "[1, 2]"])
def test_a_protocol_is_a_version_specifier_in_quotes(value: str) -> None:
    text = manifest_text().replace('protocol = ">=1,<2"', f"protocol = {value}")
    problems = problems_of(text)
    assert list(problems) == ["plugin.protocol"]
    assert '">=1,<2"' in problems["plugin.protocol"]


def test_names_that_differ_from_the_distribution_are_problems_of_the_manifest() -> None:
    problems = problems_of(
        manifest_text(), expected_id="vox-other", expected_version="2.0", entry_points=("vox-third",)
    )
    assert set(problems) == {"plugin.id", "plugin.version"}
    assert "'2.0'" in problems["plugin.version"]


def test_a_name_missing_from_the_entry_points_is_a_problem() -> None:
    problems = problems_of(manifest_text(), expected_id="vox-toy", entry_points=("vox-third",))
    assert "'vox-third'" in problems["plugin.id"]


def test_a_name_problem_is_reported_beside_the_others() -> None:
    text = manifest_text().replace("summary", "sumary")
    assert set(problems_of(text, expected_id="vox-other")) == {
        "plugin.summary",
        "plugin.sumary",
        "plugin.id",
    }


def test_an_upper_case_checksum_is_the_same_checksum() -> None:
    manifest = parse(with_artifact(sha256="AB" * 32))
    assert manifest.artifacts["linux-x86_64"].sha256 == "ab" * 32


@pytest.mark.parametrize("sha256", ["ab" * 31 + "a", "ab" * 33, "zz" * 32, ""])
def test_a_checksum_has_64_hex_digits(sha256: str) -> None:
    problems = problems_of(with_artifact(sha256=sha256))
    assert "64" in problems["artifacts.linux-x86_64.sha256"]


@pytest.mark.parametrize(
    "file", ["../outside.so", "lib/../../outside.so", "/etc/passwd", "C:/x.dll", "lib/.."]
)
def test_an_artifact_outside_its_folder_is_refused_with_its_path(file: str) -> None:
    problem = problems_of(with_artifact(file=file))["artifacts.linux-x86_64.file"]
    assert file in problem
    assert "outside" in problem


@pytest.mark.parametrize("file", ["", "lib/", "a\\\\b"])
def test_an_artifact_is_a_file_with_plain_slashes(file: str) -> None:
    assert "artifacts.linux-x86_64.file" in problems_of(with_artifact(file=file))


@pytest.mark.parametrize(
    ("data", "word"), [(b"\xff\xfe", "UTF-8"), (b"schema = ", "TOML"), (b"x" * 300_000, "too long")]
)
def test_what_is_no_toml_text_is_said_to_be_none(data: bytes, word: str) -> None:
    with pytest.raises(PluginError) as caught:
        parse_manifest(data, source="x/Plugin.toml")
    assert word in dict(caught.value.facts)["(file)"]


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_a_plugin_error(data: bytes) -> None:
    with pytest.raises(PluginError):
        parse_manifest(data, source="x")


def test_repeated_words_are_refused() -> None:
    text = manifest_text().replace('os = ["linux", "macos"]', 'os = ["linux", "linux"]')
    assert "linux" in problems_of(text)["requires.os"]


def test_an_accelerator_that_declares_no_priority_goes_before_the_cpu() -> None:
    assert parse(manifest_text(lane="cuda")).priority > parse(manifest_text(lane="cpu")).priority


@pytest.mark.parametrize(("protocol", "speaks"), [(">=1,<2", True), (">=99,<100", False), (">=0,<1", False)])
def test_a_protocol_is_accepted_by_its_specifier(protocol: str, speaks: bool) -> None:
    assert parse(manifest_text(protocol=protocol)).accepts_protocol(1) is speaks


def test_a_released_manifest_equals_the_embedded_one_plus_artifacts() -> None:
    embedded = parse(manifest_text())
    assert differences_from_embedded(parse(with_artifact()), embedded) == []
    other = parse(with_artifact().replace('lane = "cpu"', 'lane = "cuda"'))
    assert differences_from_embedded(other, embedded) == [
        ("backend.lane", "released 'cuda', in the wheel 'cpu'")
    ]


def test_the_sources_hold_exactly_one_manifest(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        find_source_manifest(tmp_path)
    assert caught.value.code == "manifest-missing"
    package = tmp_path / "src" / "toy"
    package.mkdir(parents=True)
    (package / "Plugin.toml").write_text("")
    for ignored in ("build/lib/toy", ".venv/toy", "tests/toy"):
        (tmp_path / ignored).mkdir(parents=True)
        (tmp_path / ignored / "Plugin.toml").write_text("")
    assert find_source_manifest(tmp_path) == package / "Plugin.toml"
    (tmp_path / "Plugin.toml").write_text("")
    with pytest.raises(PluginError) as caught:
        find_source_manifest(tmp_path)
    assert caught.value.code == "manifest-twice"


def test_a_file_that_can_t_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        load_manifest(tmp_path / "Plugin.toml")
    assert str(tmp_path / "Plugin.toml") in caught.value.message
