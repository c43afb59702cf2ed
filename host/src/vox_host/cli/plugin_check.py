"""vox-host plugin check: run the conformance suite on an installed plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from vox_host.cli.lane_options import parse_lane_options
from vox_host.cli.output import print_line, print_progress, print_table, print_warning
from vox_host.cli.plugin_named import find_plugin
from vox_host.cli.report_file import refuse_bad_target, show_and_write
from vox_host.cli.stopping import BEGINS_AGAIN, is_another_file_since, stoppable, told_when_stopped
from vox_host.counted import counted
from vox_host.errors import UsageError
from vox_host.settings import load_settings
from vox_plugin_api.messages import Numerics

if TYPE_CHECKING:
    from vox_host.conformance.verdict import CaseResult, Report

__all__ = ["EXIT_GATE_FAILED", "check", "is_report"]

EXIT_GATE_FAILED = 6
_NOT_STORED = "the plugin was not judged: no verdict was stored, an earlier one stands"


@stoppable(f"{_NOT_STORED}, {BEGINS_AGAIN}")
def check(
    plugin: Annotated[str, typer.Argument(metavar="ID", help="The plugin's id.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Run this group alone; may be given several times; nothing is stored."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the report, as JSON, to this file.")
    ] = None,
    lane_option: Annotated[
        list[str] | None,
        typer.Option("--lane-option", help="How the lane shall compute, like isa=avx2; nothing is stored."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")
    ] = None,
    numerics: Annotated[
        str | None,
        typer.Option(
            "--numerics",
            help="canonical or fast, of a plugin that has both; nothing is stored. Default: canonical if "
            "it has that.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove a plugin: its operators, whole models, answers, life and bytes. Exits with 6 if it fails."""
    from vox_host.conformance.record import store_verdict, verdict_path
    from vox_host.conformance.session import Target
    from vox_host.conformance.suite import check as run_check

    settings = load_settings()
    if out is not None:
        refuse_bad_target(out, "report of `vox-host plugin check`", is_report)
    options = parse_lane_options(lane_option or [])
    if numerics is not None and numerics not in get_args(Numerics):
        words = ", ".join(get_args(Numerics))
        raise UsageError("usage", f"--numerics is one of {words}; found {numerics!r}; nothing was started")
    target = Target(
        settings=settings,
        candidate=find_plugin(settings, plugin),
        lane_options=options,
        threads=threads,
        numerics=cast(Numerics | None, numerics),
    )
    is_stored = is_another_file_since(verdict_path(settings.plugins_dir, plugin))
    told = "the verdict is stored, and only the rest was not shown"
    with told_when_stopped(lambda: told if is_stored() else f"{_NOT_STORED}, {BEGINS_AGAIN}"):
        report = asyncio.run(run_check(target, only=only or [], say=print_progress))
        stored = store_verdict(settings.plugins_dir, report)
        show_and_write(out, report.as_dict(), lambda: _print(report), as_json=as_json)
        if stored is None and report.is_complete:
            print_warning(
                f"{plugin} has no receipt, so the verdict was not stored: it would be about no known bytes"
            )
        # What was not compared has passed no gate.
        if report.verdict in ("failed", "not comparable"):
            raise typer.Exit(EXIT_GATE_FAILED)


def is_report(facts: Mapping[str, Any]) -> bool:
    """Say whether a JSON object is a report of this command."""
    return {"verdict", "suite_digest", "groups"} <= facts.keys()


def _print(report: Report) -> None:
    rows = [
        (
            group.name,
            group.verdict or ("skipped" if group.skipped else "passed"),
            str(group.run),
            str(group.failed),
            str(group.not_comparable),
            group.skipped or _first_failure(group.cases),
        )
        for group in report.groups
    ]
    print_table(("group", "verdict", "cases", "failed", "not comparable", ""), rows)
    for group in report.groups:
        for case in group.cases:
            if case.is_skipped:
                print_line(f"skipped: {group.name}, {case.name}: {case.detail}")
    if report.tolerance:
        print_line(f"tolerance: {report.tolerance}")
    digest = f"tree sha256:{report.plugin_tree_digest}" if report.plugin_tree_digest else "no receipt"
    if report.execution:
        print_line(f"lane {report.lane}: {report.execution}")
    where = f", {report.execution}" if report.execution else ""
    print_line(
        f"{report.plugin} {report.plugin_version}{where}, "
        f"{'/'.join(report.numerics)} numerics {report.numerics_version}: "
        f"{report.verdict} ({counted(report.cases, 'case')}, {report.failed} failed, "
        f"{report.not_comparable} not comparable; {digest})"
    )
    # The first row of the table that shows one.
    failed = [(group.name, case) for group in report.groups for case in group.cases if case.is_failed]
    if failed:
        name, case = failed[0]
        print_line(f"first difference: {name} {case.name}: {case.detail}")
    for _, case in failed[1:]:
        if case.name == "self-test":
            print_line(f"self-test: {case.detail}")


def _first_failure(cases: tuple[CaseResult, ...]) -> str:
    worst_first = sorted(cases, key=lambda case: not case.is_failed)
    bad = (case for case in worst_first if case.is_failed or case.is_not_comparable)
    return next((f"{case.name}: {case.detail}" for case in bad), "")
