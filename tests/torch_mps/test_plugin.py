"""The Metal plugin as the host sees it: where it would run, and that a stand-in's label can't be lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.stated_backend import assert_manifest_is_what_is_stated
from mens_torch_mps import plugin
from metal_shim.installed import install_on_cpu, manifest_on_cpu
from metal_shim.stand_in import LABEL
from vox_host import cli
from vox_host.cli.plugin_check import _print as print_report
from vox_host.conformance.expected import suite_digest
from vox_host.conformance.record import store_verdict
from vox_host.conformance.session import Session, Target
from vox_host.conformance.tiny_models import TINY_MODELS
from vox_host.conformance.verdict import Report
from vox_host.hardware.record import Cpu, Device, Machine, Memory
from vox_host.manifest import load_manifest, parse_manifest
from vox_host.receipt import load_receipt
from vox_host.resolution import Candidate, Request, explain, resolve
from vox_plugin_api.backend import BackendInfo
from vox_plugin_api.installed import InstalledPlugin
from vox_plugin_api.messages import ProtocolRange

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins/mens-torch-mps/src/mens_torch_mps"
LONG = "VOX_LONG_CHECKS"


def a_machine(os_name="macos", version="15.5", devices=()):
    return Machine(
        os=os_name,
        os_version=version,
        arch="aarch64",
        python="3.12.7",
        cpu=Cpu(name="Apple M2", isa=("neon", "dotprod"), usable_threads=8),
        memory=Memory(total_bytes=32 << 30, available_bytes=20 << 30, source="test"),
        devices=devices,
    )


GPU = Device(
    kind="apple", index=0, name="Apple M2", total_bytes=24 << 30, free_bytes=20 << 30, is_unified=True
)


def a_candidate(plugin_id="mens-torch-mps", manifest=None):
    return Candidate(
        plugin_id=plugin_id,
        version="0.1.0",
        origin="environment",
        location=str(PACKAGE / "Plugin.toml"),
        manifest=manifest or load_manifest(PACKAGE / "Plugin.toml")[0],
        python=Path(sys.executable),
    )


def failed(machine):
    records = explain(Request(), machine, [a_candidate()])
    return next(((r.stage, r.detail) for r in records if r.status == "failed"), None)


def test_the_manifest_asks_for_a_mac_that_the_lane_will_take():
    assert failed(a_machine(devices=(GPU,))) is None
    stage, detail = failed(a_machine(version="14.7", devices=(GPU,)))
    assert (stage, "macos 14.7" in detail) == ("hardware", True)
    assert failed(a_machine()) == ("hardware", "needs an Apple device; this machine has none")
    assert failed(a_machine("linux")) == ("platform", "needs macos; this is linux")
    stage, detail = failed(a_machine(devices=(GPU.model_copy(update={"refusal": "it is virtual"}),)))
    assert (stage, "Apple M2 (apple 0): it is virtual" in detail) == ("hardware", True)


def test_the_manifest_is_what_the_backend_states():
    manifest = assert_manifest_is_what_is_stated(PACKAGE, "metal")
    assert manifest.backend.execution is None


def test_importing_the_entry_point_imports_no_torch():
    code = "import sys, mens_torch_mps.plugin; print('torch' in sys.modules)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


# --- the label ---------------------------------------------------------------------------------------


def test_what_only_plays_a_gpu_is_chosen_last_and_with_a_warning():
    stand_in = parse_manifest(manifest_on_cpu().encode(), source="test")
    cpu = load_manifest(ROOT / "plugins/mens-cpu-ref/src/mens_cpu_ref/Plugin.toml")[0]
    candidates = [a_candidate(manifest=stand_in), a_candidate("mens-cpu-ref", cpu)]
    assert resolve(Request(), a_machine("linux"), candidates).chosen.plugin_id == "mens-cpu-ref"
    named = resolve(Request(plugin="mens-torch-mps"), a_machine("linux"), candidates)
    assert f"lane metal ({LABEL})" in named.warnings


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return install_on_cpu(tmp_path_factory.mktemp("mps") / "home")


def test_list_and_doctor_show_the_label(installed, monkeypatch, capsys):
    assert f"mens-torch-mps: lane metal ({LABEL})" in installed.run("doctor").stdout
    monkeypatch.setenv("VOX_HOME", str(installed.home))
    cli.run(["plugin", "list"])
    assert f"metal ({LABEL})" in capsys.readouterr().out
    cli.run(["plugin", "list", "--json"])
    listed = json.loads(capsys.readouterr().out)["plugins"][0]
    assert (listed["lane"], listed["execution"]) == ("metal", LABEL)
    cli.run(["plugin", "explain"])
    shown = capsys.readouterr().out
    assert f"mens-torch-mps: lane metal ({LABEL})" in shown
    if sys.platform == "linux":
        assert f"Would run: mens-torch-mps (lane metal ({LABEL}))" in shown
    cli.run(["plugin", "explain", "--json"])
    assert json.loads(capsys.readouterr().out)["executions"] == {"mens-torch-mps": LABEL}


def test_a_manifest_that_leaves_the_label_out_does_not_start():
    """The handshake compares it with what the lane says of itself, either way."""
    info = BackendInfo("mens-torch-mps", "1.0.0", "metal", ("canonical",), ("generate",), execution=LABEL)
    stated = InstalledPlugin(
        plugin_id="mens-torch-mps",
        distribution="mens-torch-mps",
        version="1.0.0",
        entry_point=EntryPoint("mens-torch-mps", "x:y", "vox_host.backends"),
        manifest_path=Path("Plugin.toml"),
        manifest_digest="0" * 64,
        protocol=ProtocolRange(min=1, max=1),
        lane="metal",
        numerics=("canonical",),
        capabilities=("generate",),
        execution="",
    )
    said = f"backend.execution: the manifest says '', the backend '{LABEL}'"
    assert stated.differences(info) == [said]
    assert dataclasses.replace(stated, execution=LABEL).differences(info) == []
    assert dataclasses.replace(stated, execution=LABEL).differences(dataclasses.replace(info, execution=""))


def test_a_report_says_where_it_ran(capsys):
    report = Report(
        plugin="mens-torch-mps",
        plugin_version="1.0.0",
        lane="metal",
        execution=LABEL,
        plugin_tree_digest=None,
        numerics=("canonical",),
        numerics_version=1,
        suite_digest="0" * 64,
        groups=(),
        is_complete=True,
    )
    print_report(report)
    shown = capsys.readouterr().out
    assert f"lane metal: {LABEL}" in shown
    assert f"mens-torch-mps 1.0.0, {LABEL}, canonical numerics 1: failed" in shown
    assert report.as_dict()["execution"] == LABEL


def test_the_doctor_shows_what_the_lane_used_when_it_was_checked(installed, started, monkeypatch, tmp_path):
    """The load report says whether matrices are used; a check keeps that while it is about this tree."""
    monkeypatch.setattr(plugin, "version", lambda name: "1.0.0")
    backend = plugin.backend_on(started())

    async def call(name, params):
        (reply,) = [r for r in backend.load_model(params) if r is not None and r.result]
        return SimpleNamespace(result=reply.result.model_dump(), observation=reply.observation)

    candidate = a_candidate(manifest=parse_manifest(manifest_on_cpu().encode(), source="test"))
    session = Session(Target(settings=None, candidate=candidate), tmp_path, print)
    asyncio.run(session.load(SimpleNamespace(call=call), TINY_MODELS[0].name))
    facts = session.lane_facts
    assert facts["simdgroup_matrices"] == "used: fma, ascending"
    receipt = load_receipt(installed.home / "plugins" / "mens-torch-mps.json")
    report = Report(
        plugin="mens-torch-mps",
        plugin_version="1.0.0",
        lane="metal",
        execution=LABEL,
        plugin_tree_digest=receipt.tree_digest,
        numerics=("canonical",),
        numerics_version=1,
        suite_digest=suite_digest(),
        groups=(),
        is_complete=True,
        observation={"lane": facts},
    )
    store_verdict(installed.home / "plugins", report)
    shown = installed.run("doctor").stdout
    assert "mens-torch-mps: when it was checked its lane said: " in shown
    assert "simdgroup_matrices used: fma, ascending" in shown
    store_verdict(installed.home / "plugins", dataclasses.replace(report, plugin_tree_digest="0" * 64))
    assert "when it was checked" not in installed.run("doctor").stdout, "that is about another tree"


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get(LONG), reason=f"minutes: set {LONG}=1 to check every group on the CPU")
def test_the_whole_check_is_bitwise_and_listed_so(installed):
    done = installed.run("plugin", "check", "mens-torch-mps", "--json", timeout=3000)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["verdict"], facts["lane"], facts["execution"]) == ("bitwise", "metal", LABEL)
    assert facts["observation"]["lane"]["simdgroup_matrices"] == "used: fma, ascending"
    assert f"bitwise ({LABEL})" in installed.run("plugin", "list").stdout
