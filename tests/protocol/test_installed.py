import hashlib
import sys
from pathlib import Path

import pytest

from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendError, BackendInfo
from vox_plugin_api.installed import describe_range, find_plugin, parse_protocol_range

MANIFEST = """
[plugin]
id = "vox-two"
version = "1.2.0"
protocol = ">=1,<2"
[backend]
lane = "cpu"
numerics = ["canonical", "fast"]
capabilities = ["generate"]
"""


def install(directory: Path, *, name: str = "vox_two", manifest: str | bytes | None = MANIFEST) -> Path:
    """Lay out a distribution whose package cannot be imported without an error."""
    package = directory / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('plugin code was imported')")
    files = [f"{name}/__init__.py"]
    if manifest is not None:
        data = manifest if isinstance(manifest, bytes) else manifest.encode()
        (package / "Plugin.toml").write_bytes(data)
        files.append(f"{name}/Plugin.toml")
    info = directory / f"{name}-1.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.0\n")
    (info / "entry_points.txt").write_text(f"[vox_host.backends]\nvox-two = {name}:Backend\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return package / "Plugin.toml"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return tmp_path / "site"


def test_a_plugin_is_described_without_being_imported(site: Path) -> None:
    path = install(site)
    plugin = find_plugin("vox-two")
    assert plugin.manifest_path == path
    assert plugin.manifest_digest == hashlib.sha256(MANIFEST.encode()).hexdigest()
    assert (plugin.distribution, plugin.version, plugin.lane) == ("vox_two", "1.2.0", "cpu")
    assert plugin.protocol == m.ProtocolRange(min=1, max=1)
    assert (plugin.numerics, plugin.capabilities) == (("canonical", "fast"), ("generate",))


@pytest.mark.parametrize(
    ("manifest", "mentions"),
    [
        (None, "0 files Plugin.toml"),
        (b"\xff", "is no TOML"),
        ("[plugin", "is no TOML"),
        ("[backend]\n", "has no plugin.version"),
        (MANIFEST.replace('">=1,<2"', "1"), "plugin.protocol must be text, found 1"),
        (MANIFEST.replace('protocol = ">=1,<2"', ""), "has no plugin.protocol"),
        (MANIFEST.replace('">=1,<2"', '"one"'), "plugin.protocol: expected bounds"),
        (
            MANIFEST.replace('"1.2.0"', '"1.3.0"'),
            "must be '1.2.0', the distribution's version",
        ),
        (MANIFEST.replace('["generate"]', '"generate"'), "backend.capabilities must be a list of words"),
        (MANIFEST.replace('["generate"]', "[1]"), "backend.capabilities must be a list of words"),
    ],
)
def test_a_malformed_manifest_is_an_error_that_names_its_place(
    site: Path, manifest: str | bytes | None, mentions: str
) -> None:
    install(site, manifest=manifest)
    with pytest.raises(BackendError) as caught:
        find_plugin("vox-two")
    assert caught.value.error.code == "invalid-manifest"
    assert mentions in caught.value.error.message
    assert "vox-two" in caught.value.error.message


def test_a_plugin_that_is_not_there_is_an_error_that_names_those_that_are(site: Path) -> None:
    install(site)
    with pytest.raises(BackendError) as caught:
        find_plugin("vox-three")
    assert caught.value.error.code == "plugin-not-found"
    assert "vox-two" in caught.value.error.facts["plugins"]


def test_two_distributions_with_one_plugin_id_are_an_error_that_names_both(site: Path) -> None:
    install(site)
    install(site, name="vox_too")
    with pytest.raises(BackendError) as caught:
        find_plugin("vox-two")
    assert caught.value.error.facts["distributions"] == ["vox_too", "vox_two"]


@pytest.mark.parametrize(
    ("specifier", "expected"),
    [
        (">=1,<2", "1"),
        (">=1", "1 or newer"),
        ("==3", "3"),
        (" >= 2 , <= 4 ", "2 to 4"),
        (">1,<5", "2 to 4"),
        ("<3", "0 to 2"),
        (">=0,<1", "0"),
        (">=2,>=4,<9,<7", "4 to 6"),
    ],
)
def test_a_protocol_range_reads_as_its_bounds(specifier: str, expected: str) -> None:
    assert describe_range(parse_protocol_range(specifier)) == expected


@pytest.mark.parametrize("specifier", ["", "1", ">=1.5", "~=1", ">=2,<2", ">=1;<2", ">=-1"])
def test_what_is_no_range_or_an_empty_one_is_refused(specifier: str) -> None:
    with pytest.raises(ValueError, match=r"bounds|allows no version"):
        parse_protocol_range(specifier)


def test_each_difference_between_backend_and_manifest_is_named(site: Path) -> None:
    install(site)
    info = BackendInfo(
        plugin_id="vox-two",
        plugin_version="1.2.1",
        lane="cuda",
        numerics=("fast", "canonical"),
        capabilities=("generate", "train"),
    )
    differences = find_plugin("vox-two").differences(info)
    assert [line.split(":")[0] for line in differences] == [
        "plugin.version",
        "backend.lane",
        "backend.capabilities",
    ]
    assert "'1.2.0'" in differences[0]
    assert "'1.2.1'" in differences[0]
