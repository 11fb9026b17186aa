"""``oasr models``: the pretrained models, architectures and checkpoint formats that are installed."""

from __future__ import annotations

import json
from typing import Any

import typer

from oasr_core.errors import OasrError
from oasr_core.registry import Entry, registry

OASR_API = {"commands": "1.0"}

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help="List the pretrained models and model architectures that are installed.")
def models(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List what ``--model`` takes by name, which architectures can be built, and which formats are recognised."""
    facts = {
        "pretrained": [_pretrained(entry) for entry in _usable("pretrained")],
        "architectures": [_owned(entry) for entry in _usable("models")],
        "converters": [_converter(entry) for entry in _usable("converters")],
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(_lines(facts)))


def _lines(facts: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = ["Pretrained models (--model NAME):"]
    for row in facts["pretrained"] or [{}]:
        lines.append(f"  {row.get('name', '(none)')}{_origin(row)}")
        if "description" in row:
            languages = ", ".join(row["languages"])
            lines.append(f"      {row['description']} {languages}, {row['sample_rate']} Hz, {row['licence']}")
        lines += _error_line(row)
    lines.append("Architectures:")
    lines += [f"  {row.get('name', '(none)')}{_origin(row)}" for row in facts["architectures"] or [{}]]
    lines.append("Checkpoint formats (--model DIRECTORY, FILE or HUB_ID):")
    for row in facts["converters"] or [{}]:
        lines.append(f"  {row.get('name', '(none)')}{_origin(row)}")
        lines += [f"      {marker}" for marker in row.get("looks_for", ())]
        lines += _error_line(row)
    return lines


def _origin(row: dict[str, Any]) -> str:
    return f"  ({row['distribution']} {row['version']})".replace(" )", ")") if row else ""


def _error_line(row: dict[str, Any]) -> list[str]:
    return [f"      broken: {row['error']}"] if "error" in row else []


def _usable(axis: str) -> list[Entry]:
    return [entry for entry in registry(axis).entries() if registry(axis).refusal(entry) is None]


def _owned(entry: Entry) -> dict[str, Any]:
    return {"name": entry.name, "distribution": entry.distribution, "version": entry.version}


def _pretrained(entry: Entry) -> dict[str, Any]:
    try:
        model = registry("pretrained").get(f"{entry.distribution}:{entry.name}")
    except OasrError as error:
        return {**_owned(entry), "error": str(error)}
    return {
        **_owned(entry),
        "description": model.description,
        "licence": model.licence,
        "languages": list(model.languages),
        "sample_rate": model.sample_rate,
    }


def _converter(entry: Entry) -> dict[str, Any]:
    try:
        converter = registry("converters").get(f"{entry.distribution}:{entry.name}")
    except OasrError as error:
        return {**_owned(entry), "error": str(error)}
    return {
        **_owned(entry),
        "architectures": list(converter.architectures),
        "looks_for": list(converter.looks_for),
    }
