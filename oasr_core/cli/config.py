"""``oasr config``: what every setting is and where its value comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from oasr_core.cli.options import engine_flags, report, resolve_sources
from oasr_core.config import COMPONENTS, EngineConfig, Origin
from oasr_core.errors import OasrError

OASR_API = {"commands": "1.0"}

app = typer.Typer(help="Show and describe the settings of the engine.", add_completion=False, no_args_is_help=True)


class ShowFormat(StrEnum):
    """Value of ``--format``."""

    text = "text"
    json = "json"


@app.command()
def show(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML, TOML or JSON file of settings.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; repeatable.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="DIR|NAME|HUB_ID", help="Read what this checkpoint sets, too."),
    ] = None,
    output_format: Annotated[ShowFormat, typer.Option("--format", "-f", help="How it is printed.")] = ShowFormat.text,
) -> None:
    """Print every setting with its value and its origin: default, checkpoint, file or flag (later ones win)."""
    try:
        rows = effective_settings(config, engine_flags(settings=settings or (), model=model))
    except OasrError as error:
        report(error)
        raise typer.Exit(2) from error
    if output_format is ShowFormat.json:
        document = {name: {"value": value, "origin": origin} for name, value, origin in rows}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    name_width = max(len(name) for name, _, _ in rows)
    for name, value, origin in rows:
        typer.echo(f"{name:<{name_width}}  {origin:<10}  {json.dumps(value, ensure_ascii=False)}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the settings."""
    typer.echo(json.dumps(EngineConfig.model_json_schema(), indent=2, ensure_ascii=False))


def effective_settings(config_file: Path | None, flags: Mapping[str, Any]) -> list[tuple[str, Any, Origin]]:
    """Name, value (JSON types) and origin of each setting; where a model is named, what its checkpoint sets counts."""
    config, origins = resolve_sources(config_file, flags)
    if config.ckpt_dir:
        config = adopt(config, origins)
    values = config.model_dump(mode="json")
    names = [name for component in COMPONENTS for name in component.model_fields]
    return [(name, values[name], origins[name]) for name in names]


def adopt(config: EngineConfig, origins: dict[str, Origin]) -> EngineConfig:
    """What an engine makes of ``config`` once it has read the checkpoint; ``origins`` is brought up to date.

    Raises ``OasrError`` where there is no such checkpoint or it cannot be read.
    """
    from oasr_core.checkpoints.resolve import resolve_checkpoint
    from oasr_core.construction import adopted_values

    bundle = resolve_checkpoint(
        config.ckpt_dir, architecture=config.architecture, checkpoint_name=config.checkpoint_name
    )
    adopted = adopted_values(config, bundle)
    origins.update({name: "checkpoint" for name in adopted if origins[name] == "default"})
    return config.replace(**adopted)
