"""Choosing a plugin, and the reasons that are kept."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from plugin_toys import a_machine, an_nvidia, manifest_text

from vox_host.errors import IntegrityError, NoCandidateError, UsageError
from vox_host.hardware.record import Problem as ProbeProblem
from vox_host.manifest import parse_manifest
from vox_host.receipt import Receipt
from vox_host.resolution import (
    STAGES,
    Candidate,
    Problem,
    Request,
    StageRecord,
    explain,
    platform_refusal,
    resolve,
)


def a_receipt(plugin_id: str, trust: str = "verified") -> Receipt:
    return Receipt.model_validate(
        {
            "schema": 1,
            "plugin": plugin_id,
            "version": "1.0.0",
            "trust": trust,
            "source": "/somewhere",
            "archive": "a.whl",
            "archive_sha256": "0" * 64,
            "source_digest": "0" * 64,
            "environment": f".environments/{plugin_id}-0",
            "manifest": "Plugin.toml",
            "manifest_digest": "0" * 64,
            "packages": "lib",
            "python": "bin/python",
            "interpreter": None,
            "tree_digest": "0" * 64,
            "platform": "linux-x86_64",
            "host_version": "0.1.0",
            "created": "2026-01-01T00:00:00Z",
        }
    )


def a_candidate(
    plugin_id: str,
    *,
    lane: str = "cpu",
    devices: tuple[str, ...] = (),
    protocol: str = ">=1,<2",
    trust: str = "verified",
    extra: str = "",
    **changes: object,
) -> Candidate:
    text = manifest_text(plugin_id, lane=lane, devices=devices, protocol=protocol) + extra
    candidate = Candidate(
        plugin_id=plugin_id,
        version="1.0.0",
        origin="installed",
        location=f"/plugins/{plugin_id}/Plugin.toml",
        manifest=parse_manifest(text.encode(), source="x"),
        manifest_digest="0" * 64,
        receipt=a_receipt(plugin_id, trust),
        python=Path("/plugins/python"),
    )
    return replace(candidate, **changes)  # type: ignore[arg-type]


CPU = a_candidate("mens-cpu-ref")
CUDA = a_candidate(
    "mens-torch-cuda",
    lane="cuda",
    devices=("nvidia :: compute_capability >= 8.0", "nvidia :: driver >= 550"),
)
BROKEN = Candidate(
    plugin_id="vox-broken",
    version="1.0.0",
    origin="environment",
    location="/plugins/vox-broken/Plugin.toml",
    problem=Problem(stage="manifest", code="manifest-invalid", detail="plugin.protocol is missing"),
)
ALL = (CPU, CUDA, BROKEN)


def record_of(records: tuple[StageRecord, ...], plugin_id: str, stage: str) -> StageRecord:
    return next(r for r in records if (r.plugin_id, r.stage) == (plugin_id, stage))


@pytest.mark.parametrize("order", list(itertools.permutations(ALL)))
def test_choice_and_records_do_not_depend_on_discovery_order(order: tuple[Candidate, ...]) -> None:
    resolution = resolve(Request(), a_machine(an_nvidia()), order)
    assert resolution.chosen is CUDA
    assert resolution.records == resolve(Request(), a_machine(an_nvidia()), ALL).records


@pytest.mark.parametrize("order", list(itertools.permutations(["vox-a", "vox-b", "vox-c"])))
def test_equally_good_plugins_are_taken_by_name(order: tuple[str, ...]) -> None:
    resolution = resolve(Request(), a_machine(), [a_candidate(name) for name in order])
    assert resolution.chosen.plugin_id == "vox-a"


def test_a_declared_priority_decides() -> None:
    low = a_candidate("vox-a")
    text = manifest_text("vox-z").replace('lane = "cpu"', 'lane = "cpu"\npriority = 5')
    high = replace(low, plugin_id="vox-z", manifest=parse_manifest(text.encode(), source="x"))
    assert resolve(Request(), a_machine(), [low, high]).chosen is high


def test_every_candidate_has_one_record_per_stage() -> None:
    records = explain(Request(), a_machine(), ALL)
    for candidate in ALL:
        assert [r.stage for r in records if r.plugin_id == candidate.plugin_id] == list(STAGES)


def test_stages_after_a_failure_are_not_reached() -> None:
    records = explain(Request(), a_machine(), [CUDA])
    assert record_of(records, "mens-torch-cuda", "platform").status == "passed"
    assert record_of(records, "mens-torch-cuda", "hardware").code == "device-missing"
    assert record_of(records, "mens-torch-cuda", "start").status == "not-reached"


def test_a_plugin_that_fits_is_not_yet_started() -> None:
    records = explain(Request(), a_machine(), [CPU])
    assert [r.status for r in records] == ["passed"] * 6 + ["not-tried"] * 3


# --- named plugins --------------------------------------------------------------------------------


def test_a_named_plugin_is_used_even_if_another_is_preferred() -> None:
    resolution = resolve(Request(plugin="mens-cpu-ref"), a_machine(an_nvidia()), ALL)
    assert resolution.chosen is CPU
    assert resolution.degraded_reason is None


def test_a_named_plugin_is_never_replaced() -> None:
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="mens-torch-cuda"), a_machine(), ALL)
    assert caught.value.code == "device-missing"
    assert "nothing was started" in caught.value.message
    assert dict(caught.value.facts)["reason"] == "needs an NVIDIA device; this machine has none"


def test_an_unknown_name_lists_what_is_installed() -> None:
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="vox-nope"), a_machine(), ALL)
    assert caught.value.code == "plugin-not-found"
    assert {name for name, _ in caught.value.facts} == {c.plugin_id for c in ALL}


def test_a_name_with_options_is_the_form_of_parity() -> None:
    with pytest.raises(UsageError) as caught:
        resolve(Request(plugin="mens-cpu-ref:isa=reference"), a_machine(), ALL)
    assert caught.value.code == "plugin-with-options"
    assert "vox-host parity" in caught.value.message
    assert caught.value.remedy == "Name the plugin alone: mens-cpu-ref"


def test_a_refusal_explains_every_candidate() -> None:
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(), a_machine(), [CUDA, BROKEN])
    assert caught.value.exit_code == 3
    assert caught.value.facts == (
        ("request", "generate"),
        ("mens-torch-cuda", "needs an NVIDIA device; this machine has none"),
        ("vox-broken", "plugin.protocol is missing"),
    )


def test_no_plugin_at_all_says_how_to_install_one() -> None:
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(), a_machine(), [])
    assert "install" in str(caught.value.remedy)


# --- integrity ------------------------------------------------------------------------------------


def test_a_development_install_is_used_with_a_warning_and_refused_where_verified_is_required() -> None:
    development = a_candidate("vox-dev", trust="development")
    resolution = resolve(Request(), a_machine(), [development])
    assert any("no checksum" in warning for warning in resolution.warnings)
    with pytest.raises(IntegrityError) as caught:
        resolve(Request(plugin="vox-dev", require_verified=True), a_machine(), [development])
    assert (caught.value.code, caught.value.exit_code) == ("not-verified", 4)


def test_a_plugin_without_receipt_counts_as_unverified() -> None:
    beside = replace(CPU, receipt=None, origin="environment")
    assert resolve(Request(), a_machine(), [beside]).warnings
    with pytest.raises(NoCandidateError):
        resolve(Request(require_verified=True), a_machine(), [beside])


def test_a_verified_plugin_gives_no_warning() -> None:
    assert resolve(Request(require_verified=True), a_machine(), [CPU]).warnings == ()


@pytest.mark.parametrize("plugin", ["auto", "mens-torch-cuda"])
def test_a_changed_plugin_stops_the_choice_instead_of_giving_way(plugin: str) -> None:
    problem = Problem(stage="integrity", code="integrity-mismatch", detail="expected a, found b")
    changed = replace(CUDA, manifest=None, problem=problem)
    with pytest.raises(IntegrityError) as caught:
        resolve(Request(plugin=plugin), a_machine(an_nvidia()), [CPU, changed])
    assert caught.value.exit_code == 4


# --- what the manifest offers ---------------------------------------------------------------------


def test_a_missing_capability_is_known_before_start() -> None:
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="mens-cpu-ref", capability="train"), a_machine(), [CPU])
    assert caught.value.code == "capability-missing"
    assert "generate" in dict(caught.value.facts)["reason"]


def test_numerics_that_are_not_offered_are_refused() -> None:
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="mens-cpu-ref", numerics="canonical"), a_machine(), [CPU])
    assert caught.value.code == "numerics-missing"


def test_another_protocol_names_both_ranges_the_plugin_and_its_manifest() -> None:
    future = a_candidate("vox-future", protocol=">=99,<100")
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="vox-future"), a_machine(), [future])
    text = f"{caught.value.message} {caught.value.facts}"
    for part in ("vox-future", ">=99,<100", "protocol 1", "/plugins/vox-future/Plugin.toml"):
        assert part in text


@pytest.mark.parametrize(
    ("os", "arch", "reason"),
    [
        ("linux", "aarch64", None),
        ("windows", "x86_64", "needs linux or macos; this is windows"),
        ("freebsd", "x86_64", "needs linux or macos; this is freebsd"),
    ],
)
def test_a_foreign_system_is_refused_in_one_sentence(os: str, arch: str, reason: str | None) -> None:
    assert CPU.manifest is not None
    assert platform_refusal(CPU.manifest, os, arch) == reason


def test_a_foreign_architecture_is_refused_in_one_sentence() -> None:
    text = manifest_text().replace("devices", 'arch = ["x86_64"]\ndevices')
    manifest = parse_manifest(text.encode(), source="x")
    assert platform_refusal(manifest, "linux", "aarch64") == "needs x86_64; this machine is aarch64"


# --- hardware -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (an_nvidia(compute_capability="7.5"), ["a GPU", "compute_capability 7.5"]),
        (an_nvidia(driver="470.1"), ["driver 470.1"]),
        (an_nvidia(driver=None), ["driver not reported"]),
        (an_nvidia(driver="new"), ["driver new"]),
        (an_nvidia(is_visible=False), ["hidden by CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_a_device_that_does_not_do_is_named_with_what_it_has(device: object, words: list[str]) -> None:
    records = explain(Request(), a_machine(device), [CUDA])  # type: ignore[arg-type]
    record = record_of(records, "mens-torch-cuda", "hardware")
    assert record.status == "failed"
    for word in words:
        assert word in record.detail


def test_one_device_must_meet_all_requirements_together() -> None:
    old_driver = an_nvidia(index=0, driver="470.1")
    old_card = an_nvidia(index=1, compute_capability="7.5")
    with pytest.raises(NoCandidateError):
        resolve(Request(plugin="mens-torch-cuda"), a_machine(old_driver, old_card), [CUDA])
    good = an_nvidia(index=2)
    records = resolve(Request(), a_machine(old_driver, old_card, good), [CUDA]).records
    assert record_of(records, "mens-torch-cuda", "hardware").detail == "a GPU (nvidia 2)"


def test_compute_capability_10_is_more_than_8() -> None:
    assert resolve(Request(), a_machine(an_nvidia(compute_capability="10.0")), [CUDA]).chosen is CUDA


def test_the_probe_s_own_sentence_is_the_reason() -> None:
    sentence = "Failed to initialize NVML: Driver/library version mismatch"
    problem = ProbeProblem(source="nvidia-smi", detail=sentence, remedy="Reboot.")
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="mens-torch-cuda"), a_machine(problems=(problem,)), [CUDA])
    assert sentence in dict(caught.value.facts)["reason"]
    assert caught.value.remedy == "Reboot."


def test_an_instruction_set_the_processor_lacks_is_refused() -> None:
    needy = a_candidate("vox-avx", devices=("cpu :: isa :: avx512-vnni",))
    record = record_of(explain(Request(), a_machine(), [needy]), "vox-avx", "hardware")
    assert "needs avx512-vnni" in record.detail
    fine = a_candidate("vox-v3", devices=("cpu :: isa :: x86-64-v3",))
    assert resolve(Request(), a_machine(), [fine]).chosen is fine


# --- auto on the CPU ------------------------------------------------------------------------------


def test_auto_on_the_cpu_says_why_an_accelerator_plugin_was_not_used() -> None:
    resolution = resolve(Request(), a_machine(), [CPU, CUDA])
    assert resolution.chosen is CPU
    assert resolution.failed == ("mens-torch-cuda",)
    assert resolution.degraded_reason is not None
    assert "mens-torch-cuda" in resolution.degraded_reason
    assert "NVIDIA" in resolution.degraded_reason


def test_a_broken_plugin_may_have_been_the_accelerator_so_auto_says_so() -> None:
    resolution = resolve(Request(), a_machine(), [CPU, BROKEN])
    assert resolution.failed == ("vox-broken",)
    assert "plugin.protocol is missing" in str(resolution.degraded_reason)


def test_auto_on_the_cpu_says_that_a_device_has_no_plugin() -> None:
    reason = resolve(Request(), a_machine(an_nvidia()), [CPU]).degraded_reason
    assert reason is not None
    assert "a GPU" in reason


def test_auto_on_a_machine_without_accelerator_is_not_degraded() -> None:
    assert resolve(Request(), a_machine(), [CPU]).degraded_reason is None
    assert resolve(Request(), a_machine(an_nvidia(is_visible=False)), [CPU]).degraded_reason is None


def test_a_driver_that_does_not_answer_is_a_reason_to_be_degraded() -> None:
    problem = ProbeProblem(source="nvml", detail="Driver/library version mismatch")
    reason = resolve(Request(), a_machine(problems=(problem,)), [CPU]).degraded_reason
    assert reason is not None
    assert "Driver/library version mismatch" in reason


def a_failed_start(plugin_id: str, detail: str) -> StageRecord:
    return StageRecord(
        plugin_id=plugin_id, version=None, stage="start", status="failed", code="worker-died", detail=detail
    )


def test_a_start_that_failed_makes_auto_go_on_and_say_so() -> None:
    outcome = a_failed_start("mens-torch-cuda", "ModuleNotFoundError: No module named 'x_native'")
    resolution = resolve(Request(), a_machine(an_nvidia()), [CPU, CUDA], [outcome])
    assert resolution.chosen is CPU
    assert resolution.failed == ("mens-torch-cuda",)
    assert "x_native" in str(resolution.degraded_reason)
    record = record_of(resolution.records, "mens-torch-cuda", "start")
    assert (record.status, record.version) == ("failed", "1.0.0")
    assert record_of(resolution.records, "mens-torch-cuda", "health").status == "not-reached"


def test_a_start_that_failed_is_the_answer_to_a_named_request() -> None:
    outcome = a_failed_start("mens-torch-cuda", "No module named 'x_native'")
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="mens-torch-cuda"), a_machine(an_nvidia()), ALL, [outcome])
    assert "x_native" in dict(caught.value.facts)["reason"]
    assert "1.0.0" in caught.value.message


def with_numerics(candidate: Candidate, *numerics: str) -> Candidate:
    assert candidate.manifest is not None
    backend = candidate.manifest.backend.model_copy(update={"numerics": list(numerics)})
    return replace(candidate, manifest=candidate.manifest.model_copy(update={"backend": backend}))


CANONICAL = with_numerics(CPU, "canonical")
ECHO = with_numerics(a_candidate("a-echo"), "fast")


@pytest.mark.parametrize("outcomes", [[], [a_failed_start("mens-cpu-ref", "exited")]])
def test_auto_never_takes_fast_numerics_where_another_plugin_has_canonical_ones(
    outcomes: list[StageRecord],
) -> None:
    found = [ECHO, CANONICAL]
    if outcomes:
        with pytest.raises(NoCandidateError) as caught:
            resolve(Request(), a_machine(), found, outcomes)
        assert dict(caught.value.facts)["a-echo"] == 'has no "canonical" numerics; it has fast'
        assert "--numerics fast" in str(caught.value.remedy)
    else:
        resolution = resolve(Request(), a_machine(), found)
        assert (resolution.chosen, resolution.degraded_reason) == (CANONICAL, None)
    # Who asks gets it, and so does who has nothing else.
    assert resolve(Request(numerics="fast"), a_machine(), found, outcomes).chosen is ECHO
    assert resolve(Request(plugin="a-echo"), a_machine(), found, outcomes).chosen is ECHO
    assert resolve(Request(), a_machine(), [ECHO]).chosen is ECHO


def test_a_start_that_failed_is_told_on_whatever_lane_auto_goes_on() -> None:
    other = with_numerics(a_candidate("vox-other"), "canonical")
    outcome = a_failed_start("mens-cpu-ref", "exited")
    resolution = resolve(Request(), a_machine(), [CANONICAL, other], [outcome])
    assert (resolution.chosen, resolution.failed) == (other, ("mens-cpu-ref",))
    reason = 'running on the CPU, by vox-other; plugin "mens-cpu-ref" was not used: exited'
    assert resolution.degraded_reason == reason


def test_fast_numerics_beside_a_plugin_that_cannot_be_read_are_degraded() -> None:
    on_gpu = with_numerics(a_candidate("vox-echo", lane="cuda"), "fast")
    assert "vox-broken" in str(resolve(Request(), a_machine(), [on_gpu, BROKEN]).degraded_reason)
    canonical = with_numerics(on_gpu, "canonical")
    assert resolve(Request(), a_machine(), [canonical, BROKEN]).degraded_reason is None
