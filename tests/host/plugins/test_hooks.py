"""Extensions that judge an archive's origin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pluggy
import pytest
from plugin_toys import manifest_text, write_toy_wheel, write_wheel

from vox_host.errors import IntegrityError, PluginError
from vox_host.hooks import SignatureVerdict, hookimpl, load_hooks, verify_signature
from vox_host.installation import InstallRequest, install
from vox_host.manifest import Manifest, parse_manifest

MANIFEST = parse_manifest(manifest_text().encode(), source="x")


class Extension:
    def __init__(self, verdict: SignatureVerdict | None) -> None:
        self.verdict = verdict
        self.asked: list[tuple[str, bytes]] = []

    @hookimpl
    def vox_host_verify_signature(self, manifest: Manifest, archive_path: Path) -> SignatureVerdict | None:
        self.asked.append((manifest.plugin.id, archive_path.read_bytes()))
        return self.verdict


def hooks_with(*extensions: Extension) -> pluggy.PluginManager:
    manager = load_hooks()
    for extension in extensions:
        manager.register(extension)
    return manager


def test_without_extensions_nobody_vouches(tmp_path: Path) -> None:
    assert verify_signature(hooks_with(), MANIFEST, tmp_path) == ()


def test_an_opinion_is_passed_on_and_none_is_no_opinion(tmp_path: Path) -> None:
    archive = tmp_path / "a.whl"
    archive.write_bytes(b"x")
    hooks = hooks_with(Extension(None), Extension(SignatureVerdict(True, "Ada")))
    assert verify_signature(hooks, MANIFEST, archive) == ("Ada",)


def test_one_refusal_stops_the_installation_with_nothing_placed(
    tmp_path: Path, request_for: Callable[..., InstallRequest], plugins_dir: Path
) -> None:
    wheel = write_toy_wheel(tmp_path / "wheels")
    extension = Extension(SignatureVerdict(False, "no known signer"))
    hooks = hooks_with(Extension(SignatureVerdict(True, "Ada")), extension)
    request = request_for(wheel, verify_signature=lambda m, p: verify_signature(hooks, m, p))
    with pytest.raises(IntegrityError) as caught:
        install(request)
    assert caught.value.code == "signature-refused"
    assert "no known signer" in str(caught.value.facts)
    assert extension.asked == [("vox-toy", wheel.read_bytes())]
    assert not list(plugins_dir.glob("*.json"))
    assert not list(plugins_dir.glob(".environments/*"))


def test_a_broken_extension_is_an_error_and_not_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipfile import ZipFile

    wheel = write_wheel(
        tmp_path,
        "vox-signer",
        "1.0",
        {"vox_signer.py": "raise ImportError('no key store')\n"},
        entry_points="[vox_host.hooks]\nsigner = vox_signer\n",
    )
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(PluginError) as caught:
        load_hooks()
    assert caught.value.code == "hook-broken"
    assert "no key store" in str(caught.value.facts)
    sys.modules.pop("vox_signer", None)
