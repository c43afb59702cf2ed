"""Installing a released folder: verified against its manifest, or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_toys import hidden, manifest_text, write_api_wheel, write_toy_wheel

from vox_host.discovery import discover_installed
from vox_host.errors import IntegrityError, PluginError
from vox_host.installation import InstallRequest, environments, install, store
from vox_host.receipt import describe_trust

MakeRequest = Callable[..., InstallRequest]


def a_release(folder: Path, wheel: Path, platform: str = "linux-x86_64", manifest: str | None = None) -> Path:
    """Write a released manifest beside a wheel."""
    data = wheel.read_bytes()
    text = manifest_text() if manifest is None else manifest
    text += f'[artifacts.{platform}]\nfile = "{wheel.name}"\n'
    text += f'sha256 = "{hashlib.sha256(data).hexdigest()}"\nsize = {len(data)}\n'
    (folder / "Plugin.toml").write_text(text)
    return folder


def test_a_released_folder_is_verified(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = tmp_path / "release"
    a_release(folder, write_toy_wheel(folder))
    installed = install(request_for(folder, require_verified=True))
    assert installed.receipt.trust == "verified"
    assert installed.warnings == ()


def test_verified_says_that_it_speaks_of_the_plugin_s_own_archive_alone(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    folder = tmp_path / "release"
    write_api_wheel(folder)
    wheel = write_toy_wheel(folder, requires=("vox-plugin-api==0.1.0",))
    receipt = install(request_for(a_release(folder, wheel), require_verified=True)).receipt
    assert describe_trust(receipt) == (
        f"{wheel.name} matched its released checksum; none vouches for its dependency, recorded as installed"
    )
    alone = receipt.model_copy(update={"distributions": receipt.distributions[1:]})
    assert describe_trust(alone) == f"{wheel.name} matched its released checksum"
    two = receipt.model_copy(
        update={"trust": "development", "distributions": receipt.distributions + alone.distributions}
    )
    assert describe_trust(two) == (
        f"no checksum vouches for {wheel.name}; none vouches for its 2 dependencies, recorded as installed"
    )


def test_the_manifest_file_itself_may_be_named(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = a_release(tmp_path, write_toy_wheel(tmp_path))
    assert install(request_for(folder / "Plugin.toml")).receipt.trust == "verified"


def test_artifacts_of_other_platforms_may_be_absent_or_wrong(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    folder = a_release(tmp_path, write_toy_wheel(tmp_path))
    with (folder / "Plugin.toml").open("a") as file:
        file.write(f'[artifacts.macos-aarch64]\nfile = "gone.whl"\nsha256 = "{"0" * 64}"\nsize = 1\n')
    assert install(request_for(folder)).receipt.trust == "verified"


def test_a_platform_that_is_not_declared_has_an_error_of_its_own(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    folder = a_release(tmp_path, write_toy_wheel(tmp_path), platform="macos-aarch64")
    with pytest.raises(PluginError) as caught:
        install(request_for(folder))
    assert caught.value.code == "no-artifact"
    assert (
        "plugin 'vox-toy' declares no artifact for 'linux-x86_64'; has: macos-aarch64" in caught.value.message
    )


@pytest.mark.parametrize("change", ["a byte", "the size"])
def test_an_artifact_that_is_not_the_released_one_is_refused(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path, change: str
) -> None:
    wheel = write_toy_wheel(tmp_path / "release")
    folder = a_release(wheel.parent, wheel)
    expected = hashlib.sha256(wheel.read_bytes()).hexdigest()
    data = wheel.read_bytes()
    wheel.write_bytes(bytes([data[0] ^ 1]) + data[1:] if change == "a byte" else data + b"\0")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(IntegrityError) as caught:
        install(request_for(folder))
    facts = dict(caught.value.facts)
    assert caught.value.code == "artifact-mismatch"
    assert "linux-x86_64" in caught.value.message
    assert expected in facts["expected"]
    assert found in facts["found"]
    assert hidden(plugins_dir) == []


def test_a_released_manifest_must_be_the_wheel_s_plus_artifacts(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    wheel = write_toy_wheel(tmp_path)
    folder = a_release(tmp_path, wheel, manifest=manifest_text(lane="cuda"))
    with pytest.raises(PluginError) as caught:
        install(request_for(folder))
    assert caught.value.code == "manifest-differs"
    assert [name for name, _ in caught.value.facts] == ["backend.lane"]


def test_a_link_out_of_the_release_is_refused(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = tmp_path / "release"
    wheel = write_toy_wheel(folder)
    a_release(folder, wheel)
    outside = wheel.rename(tmp_path / wheel.name)
    wheel.symlink_to(outside)
    with pytest.raises(PluginError) as caught:
        install(request_for(folder))
    assert caught.value.code == "artifact-outside"


def test_a_foreign_system_is_refused_in_one_sentence(tmp_path: Path, request_for: MakeRequest) -> None:
    wheel = write_toy_wheel(tmp_path)
    with pytest.raises(PluginError) as caught:
        install(request_for(wheel, os="windows"))
    assert caught.value.code == "platform-unsupported"
    assert "needs linux or macos; this is windows" in caught.value.message


def test_a_plain_native_library_is_stored_verified_and_says_that_nothing_starts_it(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    library = tmp_path / "libtoy.so"
    library.write_bytes(b"\x7fELF")
    installed = install(request_for(a_release(tmp_path, library)))
    assert installed.receipt.trust == "verified"
    tree = plugins_dir / installed.receipt.environment
    assert (tree / "libtoy.so").read_bytes() == b"\x7fELF"
    candidate = discover_installed(plugins_dir)[0]
    assert candidate.problem is not None
    assert (candidate.problem.stage, candidate.problem.code) == ("start", "no-worker")


@pytest.mark.parametrize("is_published", [False, True])
def test_a_stop_just_before_or_after_the_receipt_leaves_all_of_the_plugin_or_none(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path, monkeypatch, is_published: bool
) -> None:
    library = tmp_path / "libtoy.so"
    library.write_bytes(b"\x7fELF")
    publish = store.publish

    def stopped(*arguments):
        if is_published:
            publish(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "publish", stopped)
    with pytest.raises(KeyboardInterrupt):
        install(request_for(a_release(tmp_path, library)))
    found = environments(plugins_dir)
    assert list(found) == (["vox-toy"] if is_published else [])
    assert [name for name in hidden(plugins_dir) if not name.endswith((".tree", ".lock"))] == [
        Path(name).name for name in found.values()
    ]
