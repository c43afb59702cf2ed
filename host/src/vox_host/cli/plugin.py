"""vox-host plugin: install, list, show, explain, verify, check, remove.

Here is what reads; `plugin_changes` and `plugin_check` have the others. All but `install` work with
every plugin broken, and none imports a plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vox_host.cli.output import print_json, print_line, print_progress, print_table, print_warning
from vox_host.cli.plugin_changes import install, pack, remove
from vox_host.cli.plugin_check import check
from vox_host.cli.plugin_facts import (
    details_of,
    last_check,
    show_verdict,
    state_of,
    summary_of,
    trust_of,
    verdict_of,
)
from vox_host.cli.plugin_named import Json, PluginId, find_in, find_plugin
from vox_host.cli.stopping import COMPARED_IN_PART, SHOWN_IN_PART, stoppable
from vox_host.counted import agreeing, counted
from vox_host.discovery import discover
from vox_host.errors import UsageError, VoxError
from vox_host.resolution import AUTO, Request, StageRecord
from vox_host.settings import load_settings

if TYPE_CHECKING:
    from vox_host.hardware.record import Machine

__all__ = ["register"]

plugin_app = typer.Typer(
    help="Install, list, show, explain, verify, check and remove plugins.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add the group to the root command."""
    for command in (install, pack, remove, check):
        plugin_app.command()(command)
    app.add_typer(plugin_app, name="plugin")


@plugin_app.command("list")
@stoppable(SHOWN_IN_PART)
def list_plugins(json: Json = False) -> None:
    """List every plugin that was found, the broken ones too."""
    from vox_host.installation import remove_remains

    settings = load_settings()
    remove_remains(settings.plugins_dir, print_progress)
    candidates = discover(settings.plugins_dir)
    if json:
        print_json({"plugins": [summary_of(c, settings) for c in candidates]})
        return
    if not candidates:
        print_line(f"No plugin is installed in {settings.plugins_dir}.")
        print_line("Install one: vox-host plugin install --path SOURCE")
        return
    checks = {c.plugin_id: last_check(c, settings) for c in candidates}
    rows = [
        (
            c.plugin_id,
            c.version or "-",
            c.described_lane,
            trust_of(c, checks[c.plugin_id]),
            show_verdict(verdict_of(c, settings)),
            state_of(c, checks[c.plugin_id]),
        )
        for c in candidates
    ]
    print_table(("plugin", "version", "lane", "integrity", "conformance", "state"), rows)


@plugin_app.command()
@stoppable(SHOWN_IN_PART)
def show(plugin: PluginId, json: Json = False) -> None:
    """Show one plugin: where it is, what it can do, what its receipt records."""
    settings = load_settings()
    candidate = find_plugin(settings, plugin)
    facts = details_of(candidate, settings)
    if json:
        print_json(facts)
        return
    for name, value in {**facts, "conformance": show_verdict(facts["conformance"])}.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if not isinstance(shown, dict) and shown not in (None, ""):
            print_line(f"{name:<16} {shown}")


@plugin_app.command()
@stoppable(SHOWN_IN_PART)
def explain(
    plugin: Annotated[str, typer.Argument(metavar="[ID]", help="Only this plugin.")] = AUTO,
    capability: Annotated[str, typer.Option(help="What the request needs.")] = "generate",
    numerics: Annotated[str, typer.Option(help="canonical, fast, or any.")] = "any",
    require_verified: Annotated[
        bool, typer.Option("--require-verified", help="Judge as if only verified plugins were allowed.")
    ] = False,
    json: Json = False,
) -> None:
    """Say for each plugin and stage why it would or would not run here. Starts nothing."""
    from vox_host.launch import with_verified_bytes
    from vox_host.resolution import explain as explain_candidates
    from vox_host.resolution import resolve

    settings = load_settings()
    request = _request(plugin, capability, numerics, require_verified)
    candidates = with_verified_bytes(discover(settings.plugins_dir), settings.plugins_dir)
    if plugin != AUTO:
        find_in(candidates, plugin)
    machine = _probe()
    records = explain_candidates(request, machine, candidates)
    chosen: dict[str, Any] = {"plugin": None, "reason": None, "degraded_reason": None}
    described = ""
    try:
        resolution = resolve(request, machine, candidates)
        chosen = {
            "plugin": resolution.chosen.plugin_id,
            "reason": None,
            "degraded_reason": resolution.degraded_reason,
        }
        described = resolution.chosen.described_lane
    except VoxError as error:
        chosen["reason"] = error.message
    shown = [r for r in records if plugin in (AUTO, r.plugin_id)]
    played = [c for c in candidates if c.execution and plugin in (AUTO, c.plugin_id)]
    if json:
        print_json(
            {
                "chosen": chosen,
                "executions": {c.plugin_id: c.execution for c in played},
                "records": [record.as_dict() for record in shown],
            }
        )
        return
    _print_records(shown)
    for candidate in played:
        print_line(f"{candidate.plugin_id}: lane {candidate.described_lane}")
    if chosen["plugin"]:
        print_line(f"Would run: {chosen['plugin']} (lane {described})")
    else:
        print_line(f"Nothing would run: {chosen['reason'] or 'no plugin'}")
    if chosen["degraded_reason"]:
        print_warning(str(chosen["degraded_reason"]))


@plugin_app.command()
@stoppable(COMPARED_IN_PART)
def verify(
    plugin: Annotated[str, typer.Argument(metavar="[ID]", help="Only this plugin.")] = AUTO,
    json: Json = False,
) -> None:
    """Read every byte of installed plugins again and compare it with their receipts."""
    from vox_host.integrity import verify_installation

    settings = load_settings()
    candidates = discover(settings.plugins_dir)
    if plugin != AUTO:
        candidates = [find_in(candidates, plugin)]
    report: list[dict[str, Any]] = []
    for candidate in candidates:
        if candidate.receipt is None:
            detail = candidate.problem.detail if candidate.problem else "no receipt covers it"
            report.append({"plugin": candidate.plugin_id, "verified": False, "detail": detail})
            continue
        checked = verify_installation(candidate.receipt, settings.plugins_dir, full=True)
        report.append(
            {
                "plugin": candidate.plugin_id,
                "verified": True,
                "files": checked.files,
                "tree_digest": candidate.receipt.tree_digest,
                "trust": candidate.receipt.trust,
            }
        )
    if json:
        print_json({"plugins": report})
    else:
        for row in report:
            if row["verified"]:
                files = f"{counted(row['files'], 'file')} {agreeing(row['files'], 'matches', 'match')}"
                print_line(f"{row['plugin']}: {files} sha256:{row['tree_digest']}")
            else:
                print_warning(f"{row['plugin']}: not verified: {row['detail']}")
    # A plugin found beside the host has no receipt to compare with; named, it was to be verified.
    owed = {c.plugin_id for c in candidates if plugin != AUTO or c.origin != "environment"}
    if any(not row["verified"] and row["plugin"] in owed for row in report):
        raise typer.Exit(4)


def _request(plugin: str, capability: str, numerics: str, require_verified: bool) -> Request:
    from typing import get_args

    from vox_plugin_api.messages import Capability, Numerics

    for value, kind, name in (
        (capability, get_args(Capability), "--capability"),
        (numerics, (*get_args(Numerics), "any"), "--numerics"),
    ):
        if value not in kind:
            raise UsageError("usage", f"{name} is one of {', '.join(kind)}; found {value!r}")
    return Request(
        plugin=plugin,
        capability=capability,  # type: ignore[arg-type]
        numerics=None if numerics == "any" else numerics,  # type: ignore[arg-type]
        require_verified=require_verified,
    )


def _probe() -> Machine:
    from vox_host.hardware.probe import probe_machine  # type: ignore[import-not-found,unused-ignore]

    machine: Machine = probe_machine()
    return machine


_MARKS = {"passed": "ok", "warned": "warning", "failed": "no", "not-reached": "-", "not-tried": "-"}


def _print_records(records: list[StageRecord]) -> None:
    rows = [(r.plugin_id, r.stage, _MARKS[r.status], r.code, r.detail) for r in records]
    print_table(("plugin", "stage", "", "code", "detail"), rows)
    for record in records:
        if record.status == "failed" and record.remedy:
            print_line(f"{record.plugin_id}: {record.remedy}")
