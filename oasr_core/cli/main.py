"""``oasr``: a group whose subcommands come from the ``oasr.commands`` axis; only the one asked for is imported."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from oasr_core.cli.logs import ENV_DEBUG, debug_wanted, log_lines
from oasr_core.errors import CheckpointError, ConfigError, OasrError, PluginError
from oasr_core.registry import OasrPluginWarning, registry

#: One line for each first-party command, so that ``oasr --help`` imports none.
SUMMARIES = {
    ("oasr-core", "transcribe"): "Transcribe audio files.",
    ("oasr-core", "bench"): "Measure accuracy, speed, latency and memory on a manifest.",
    ("oasr-core", "convert"): "Convert a checkpoint to the native format.",
    ("oasr-core", "plugins"): "List, show and check the installed plugins.",
    ("oasr-core", "models"): "List the pretrained models and model architectures that are installed.",
    ("oasr-core", "config"): "Show the engine's settings and where each value comes from.",
}


class CommandGroup(TyperGroup):
    """The subcommands of the ``oasr.commands`` axis, listed without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the installed commands."""
        return registry("commands").names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command; raises ``PluginError`` for an unknown or broken one."""
        command = typer.main.get_command(registry("commands").get(cmd_name))
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands from what is known without importing them."""
        commands = registry("commands")
        owners: dict[str, list[str]] = {}
        for entry in commands.entries():
            if commands.refusal(entry) is None:
                summary = SUMMARIES.get((entry.distribution, entry.name))
                owners.setdefault(entry.name, []).append(summary or f"(provided by {entry.owner})")
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(lines)) for name, lines in sorted(owners.items())])


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="OASR: speech recognition, offline and streaming, from plugins.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib_metadata import version

        typer.echo(f"oasr-core {version('oasr-core')}")
        raise typer.Exit


def _set_debug(wanted: bool) -> None:
    if wanted:
        os.environ[ENV_DEBUG] = "1"


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
    debug: bool = typer.Option(
        False, "--debug", callback=_set_debug, is_eager=True, help="Show tracebacks (as OASR_DEBUG=1 does)."
    ),
) -> None:
    """OASR: speech recognition, offline and streaming, from plugins."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0, 1 for a failure, 2 for usage, configuration, checkpoints and plugins.
    """
    command = typer.main.get_command(app)
    debug = os.environ.get(ENV_DEBUG)
    with warnings.catch_warnings():
        _show_plugin_warnings_plainly()
        try:
            with log_lines():
                command.main(args=None if arguments is None else list(arguments), prog_name="oasr")
        except SystemExit as stop:
            return _exit_code(stop.code)
        except OasrError as error:
            if debug_wanted():
                traceback.print_exc()
            else:
                print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, (ConfigError, PluginError, CheckpointError)) else 1
        finally:  # what --debug has set ends with this call
            if debug is None:
                os.environ.pop(ENV_DEBUG, None)
            else:
                os.environ[ENV_DEBUG] = debug
    return 0


def _exit_code(code: str | int | None) -> int:
    if isinstance(code, str):
        print(code, file=sys.stderr)
        return 1
    return code or 0


def _show_plugin_warnings_plainly() -> None:
    """Plugin warnings are messages to the user of the command line, not to the author of the line that warned."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, OasrPluginWarning):
            print(f"warning: {message}", file=sys.stderr)
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
