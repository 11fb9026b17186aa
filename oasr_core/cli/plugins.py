"""``oasr plugins``: what is installed, what one plugin offers, and whether everything works."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from oasr_core._plugins.registry import report_unmatched
from oasr_core.errors import PluginConflictError, UnknownPluginError, did_you_mean
from oasr_core.registry import AXES, Entry, Registry, registry

OASR_API = {"commands": "1.0"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, show and check the installed plugins.",
)

_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command("list")
def list_plugins(
    axis: str | None = typer.Option(None, "--axis", help="Only this axis, such as models."),
    as_json: bool = _JSON,
) -> None:
    """List every plugin of every axis; imports none of them."""
    axes = [registry(axis)] if axis else [registry(name) for name in AXES]
    report_unmatched()
    rows = [_row(one, entry) for one in axes for entry in one.entries()]
    if as_json:
        _print_json(rows)
        return
    _print_table(
        ("AXIS", "NAME", "DISTRIBUTION", "VERSION", "STATUS"),
        [(r["axis"], r["name"], r["distribution"], r["version"], r["status"]) for r in rows],
    )


@app.command("show")
def show_plugin(
    plugin: str = typer.Argument(..., metavar="AXIS/NAME|NAME", help="Such as decode_strategies/ctc, or ctc."),
    as_json: bool = _JSON,
) -> None:
    """Show one plugin: owner, versions, source and options."""
    axis, name = _locate(plugin)
    facts = axis.describe(name)
    if as_json:
        _print_json(facts)
        return
    for key in ("axis", "name", "distribution", "version", "api", "entry_point", "source", "summary"):
        typer.echo(f"{key.replace('_', ' '):<13} {facts[key] if facts[key] is not None else '-'}")
    for key in ("options", "request_options"):
        if facts[key]:
            typer.echo(f"\n{key.replace('_', ' ')}:")
            _print_table(
                ("NAME", "TYPE", "DEFAULT", "MEANING"),
                [
                    (o["name"], o["type"], "(required)" if o["required"] else repr(o["default"]), o["description"])
                    for o in facts[key]
                ],
            )


@app.command("check")
def check_plugins(as_json: bool = _JSON) -> None:
    """Import and check every plugin.

    Exit code 1 if one is broken, in conflict, or written for another core.
    """
    from oasr_core._plugins.diagnose import check_all, requirement_findings

    report_unmatched()
    results, findings = check_all(), requirement_findings()
    if as_json:
        _print_json({"plugins": [result.as_dict() for result in results], "findings": [f.as_dict() for f in findings]})
    else:
        for result in results:
            detail = f": {result.message}" if result.message else ""
            typer.echo(f"{result.status:<9} {result.entry.path} ({result.entry.owner}){detail}")
        for finding in findings:
            typer.echo(f"{finding.kind:<9} {finding.subject}: {finding.message}")
    if findings or any(result.status in ("broken", "conflict") for result in results):
        raise typer.Exit(1)


@app.command("doctor")
def examine_installation(as_json: bool = _JSON) -> None:
    """Find what is wrong with the installation.

    Stale metadata, missing modules, version mismatches, conflicts and names that match nothing. Imports no plugin. Exit
    code 1 if anything was found.
    """
    from oasr_core._plugins.diagnose import diagnose

    findings = diagnose()
    if as_json:
        _print_json([finding.as_dict() for finding in findings])
    elif not findings:
        typer.echo("Nothing found: the installed plugins fit together.")
    else:
        for finding in findings:
            typer.echo(f"{finding.kind}  {finding.subject}\n    {finding.message}")
    if findings:
        raise typer.Exit(1)


def _row(axis: Registry[Any], entry: Entry) -> dict[str, Any]:
    """One line of the listing; the error of a broken plugin is known once this process has tried it."""
    rivals = [e for e in axis.entries() if e.name == entry.name and axis.refusal(e) is None]
    refusal, failure = axis.refusal(entry), axis.failure(entry)
    if refusal is not None:
        status = refusal
    elif failure is not None:
        status = f"broken: {failure}"
    elif len(rivals) > 1 and axis.axis.name != "observers":
        status = _rivalry(axis, entry)
    else:
        status = "available"
    return {
        "axis": entry.axis,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "entry_point": entry.value,
        "status": status,
    }


def _rivalry(axis: Registry[Any], entry: Entry) -> str:
    try:
        chosen = axis.find(entry.name)
    except PluginConflictError:
        return "conflict"
    return "preferred" if chosen == entry else "not preferred"


def _locate(plugin: str) -> tuple[Registry[Any], str]:
    axis, separator, name = plugin.partition("/")
    if separator:
        return registry(axis), name
    key = plugin.rpartition(":")[2]
    homes = [one for one in map(registry, AXES) if any(entry.name == key for entry in one.entries())]
    if len(homes) == 1:
        return homes[0], plugin
    if homes:
        paths = ", ".join(f"{home.axis.name}/{plugin}" for home in homes)
        raise UnknownPluginError(f"{plugin!r} is the name of several plugins; ask for one of {paths}.")
    known = sorted({entry.name for one in map(registry, AXES) for entry in one.entries()})
    raise UnknownPluginError(
        f"No plugin named {plugin!r} on any axis. Installed: {', '.join(known)}.{did_you_mean(key, known)}"
    )


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
