"""``oasr bench``: accuracy, speed, latency and memory of a model on a manifest, in one JSON row.

Exit code: 0 all utterances transcribed, 1 one failed (it counts as an empty transcript), 2 wrong usage or settings.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oasr_core.cli.load_generator import LoadGenerator, Run, Utterance
from oasr_core.cli.logs import TRACEBACK_HINT, debug_wanted
from oasr_core.cli.options import engine_flags, report, resolve_sources
from oasr_core.errors import ConfigError, OasrError

if TYPE_CHECKING:
    from rich.console import Console

    from oasr_core.config import EngineConfig
    from oasr_core.engine import ASREngine

OASR_API = {"commands": "1.0"}

app = typer.Typer(help="Measure accuracy, speed, latency and memory on a manifest.", add_completion=False)


class BenchMode(StrEnum):
    """Value of ``--mode``."""

    offline = "offline"
    streaming = "streaming"


class BenchMetric(StrEnum):
    """Value of ``--metric``."""

    wer = "wer"
    cer = "cer"


@app.command()
def bench(
    manifest: Annotated[
        Path,
        typer.Argument(metavar="MANIFEST", help="JSON lines with audio (path relative to the manifest) and text."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="DIR|NAME|HUB_ID", help="Checkpoint; else ckpt_dir in --config."),
    ] = None,
    mode: Annotated[BenchMode, typer.Option(help="Which path of the engine is measured.")] = BenchMode.offline,
    batch_size: Annotated[int | None, typer.Option(help="Width of a batch; streaming: streams at a time.")] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests in the engine at a time; default the batch size.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    decode_method: Annotated[str | None, typer.Option(help="Decode strategy; else the checkpoint's.")] = None,
    decode_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the decode strategy; repeatable.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the engine; repeatable.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML, TOML or JSON file of settings.")] = None,
    metric: Annotated[BenchMetric, typer.Option(help="Word or character error rate.")] = BenchMetric.wer,
    normalise: Annotated[
        bool, typer.Option("--normalise/--no-normalise", help="Compare texts without case and punctuation.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N utterances.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Transcribe the first N utterances once, unmeasured.")] = 1,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON row here, instead of to standard output.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier JSON row to put beside this one, with ratios.")
    ] = None,
) -> None:
    """Measure accuracy, speed, latency and memory on a manifest.

    A closed loop keeps a fixed number of requests in the engine; decoding of audio files is not on the clock. Latency
    is the time from submission to the final (streaming: from the last piece to the final), first_partial the time from
    the first piece to the first output with text; streams are fed one stride a step, as fast as the engine takes it.
    The row goes to standard output, a table to standard error.
    """
    from rich.console import Console

    from oasr_core.engine import ASREngine

    console = Console(stderr=True, highlight=False)
    try:
        utterances = load_manifest(manifest, limit)
        other = load_row(compare, metric) if compare is not None else None
        if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
            raise ConfigError(f"--output {output}: expected a file in a directory that exists")
        flags = engine_flags(
            settings=settings or (),
            decode_options=decode_option or (),
            model=model,
            decode_method=decode_method,
            device=device,
            dtype=dtype,
            max_batch_size=batch_size,
        )
        engine_config = plan(config, flags, mode)
        streaming = mode is BenchMode.streaming
        with ASREngine(engine_config) as engine:
            places = in_flight or engine.config.max_batch_size
            LoadGenerator(engine, streaming=streaming, in_flight=places).run(utterances[:warmup])
            _reset_cuda_peak(engine)
            run = LoadGenerator(engine, streaming=streaming, in_flight=places, console=console).run(utterances)
            conditions = {
                **describe_engine(engine, engine_config, streaming),
                "manifest": manifest.name,
                "in_flight": places,
                "warmup": warmup,
                "metric": metric.value,
                "normalised": normalise,
            }
            results = {**summarise(run, metric, normalise), **_peak_memory(engine)}
    except OasrError as error:
        report(error)
        raise typer.Exit(2) from error
    row = {"conditions": conditions, "results": _rounded(results)}
    _write(json.dumps(row, ensure_ascii=False), output)
    for measured in run.measured:
        if measured.error is not None:
            line = f"error: {measured.utterance.audio}: {measured.error}"
            if "(stage " in measured.error and not debug_wanted():
                line += f" {TRACEBACK_HINT}"
            console.print(line, markup=False, soft_wrap=True)
    print_table(console, row, other, compare.name if compare is not None else "")
    raise typer.Exit(1 if results["failed"] else 0)


# --- what goes in ---------------------------------------------------------------------------------------------------


def plan(config_file: Path | None, flags: Mapping[str, Any], mode: BenchMode) -> EngineConfig:
    """Resolve the settings for an engine that serves ``mode`` alone.

    Raises ``ConfigError`` where there is no model, or another ``service_mode`` is set.
    """
    config, origins = resolve_sources(config_file, flags)
    if not config.ckpt_dir:
        raise ConfigError("no model is given: add --model DIR|NAME|HUB_ID; 'oasr models' shows the installed names")
    if config.service_mode not in ("mixed", mode.value):
        origin = origins["service_mode"]
        raise ConfigError(f"service_mode={config.service_mode!r} ({origin}) does not serve --mode {mode.value}")
    return config.replace(service_mode=mode.value)


def load_manifest(path: Path, limit: int | None = None) -> list[Utterance]:
    """Read JSON lines with ``audio`` and ``text`` (further keys are allowed), the first ``limit`` of them.

    Raises ``ConfigError`` for an unreadable or empty file, and for a line, by number, that is no object, lacks a key or
    names an audio file that does not exist.
    """
    utterances: list[Utterance] = []
    for number, line in enumerate(_read(path, "manifest").splitlines(), start=1):
        if not line.strip():
            continue
        if limit is not None and len(utterances) == limit:
            break
        where = f"manifest {path}, line {number}"
        row = _parse_object(line, where)
        for key in ("audio", "text"):
            if not isinstance(row.get(key), str):
                raise ConfigError(
                    f"{where}: expected a string under the key {key!r}, got {row.get(key)!r}; keys: {', '.join(row)}"
                )
        audio = path.parent / row["audio"]
        if not audio.is_file():
            raise ConfigError(f"{where}: no audio file {audio}; paths are relative to the manifest")
        utterances.append(Utterance(audio, row["text"]))
    if not utterances:
        raise ConfigError(f"manifest {path} has no utterances; expected JSON lines with audio and text")
    return utterances


def load_row(path: Path, metric: str) -> dict[str, Any]:
    """An earlier result of this command; raises ``ConfigError`` for another file or another metric."""
    row = _parse_object(_read(path, "--compare"), f"--compare {path}")
    if not all(isinstance(row.get(part), dict) for part in ("conditions", "results")):
        raise ConfigError(f"--compare {path}: expected a row of oasr bench with conditions and results")
    if (theirs := row["conditions"].get("metric")) != metric:
        raise ConfigError(f"--compare {path}: its metric is {theirs!r}, this one {metric!r}; give the same --metric")
    return row


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error})"
        raise ConfigError(f"{what} {path}: cannot read it: {reason}") from error


def _parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


# --- what comes out -------------------------------------------------------------------------------------------------


def summarise(run: Run, metric: BenchMetric, normalise: bool) -> dict[str, Any]:
    """Results of a run: accuracy in percent, speed as audio over wall seconds, latencies in milliseconds.

    A failed utterance counts as an empty transcript and has no audio and no latency.
    """
    from oasr_core.metrics import ErrorCounts, bootstrap_interval, count_errors, normalise_text, percentiles, text_units

    def units(text: str) -> list[str]:
        return text_units(normalise_text(text) if normalise else text, metric.value)

    done = [job for job in run.measured if job.final is not None]
    counts = [count_errors(units(job.utterance.text), units(job.text)) for job in run.measured]
    total = sum(counts, ErrorCounts())
    interval = bootstrap_interval([count.errors for count in counts], [count.reference for count in counts])
    audio_seconds = sum(job.duration for job in done)
    latencies = [1e3 * (job.final - job.ended) for job in done if job.final is not None]
    firsts = [1e3 * (job.first_text - job.begun) for job in done if job.first_text is not None]
    lags = [lag for job in done for lag in job.stable_prefix_lags()]
    return {
        "utterances": len(run.measured),
        "failed": len(run.measured) - len(done),
        "audio_seconds": audio_seconds,
        "wall_seconds": run.wall_seconds,
        "rtfx": audio_seconds / run.wall_seconds,
        "error_rate_percent": None if total.rate is None else 100 * total.rate,
        "error_rate_ci95_percent": None if interval is None else [100 * bound for bound in interval],
        "substitutions": total.substitutions,
        "deletions": total.deletions,
        "insertions": total.insertions,
        "reference_units": total.reference,
        "latency_ms": percentiles(latencies),
        "first_partial_ms": percentiles(firsts) if run.streaming else None,
        "stable_prefix_lag_s": percentiles(lags) if run.streaming else None,
    }


def describe_engine(engine: ASREngine, config: EngineConfig, streaming: bool) -> dict[str, Any]:
    """The conditions of a run that lie in the engine and the machine."""
    import numpy
    import torch

    from oasr_core.registry import active_plugins

    facts = engine.describe()
    cuda = facts["device"].startswith("cuda")
    distributions = [line.split(" ", 1)[1].rsplit(" ", 1) for line in active_plugins()]
    return {
        "model": facts["model"],
        "architecture": facts["architecture"],
        "parameters": facts["parameters"],
        "mode": "streaming" if streaming else "offline",
        "device": facts["device"],
        "device_name": torch.cuda.get_device_name(facts["device"]) if cuda else _processor(),
        "dtype": facts["dtype"],
        "threads": torch.get_num_threads(),
        "batch_size": facts["max_batch_size"],
        "chunk_ms": facts["chunk_ms"] if streaming else None,
        "num_left_chunks": facts["num_left_chunks"] if streaming else None,
        "decode_method": facts["decode_method"],
        "decode_options": engine.config.decode_options,
        "settings": config.model_dump(mode="json", exclude_unset=True),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            **dict(distributions),
        },
    }


def _processor() -> str:
    """The processor's name; what :mod:`platform` knows where the kernel lists none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _reset_cuda_peak(engine: ASREngine) -> None:
    import torch

    if engine.describe()["device"].startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(engine.describe()["device"])


def _peak_memory(engine: ASREngine) -> dict[str, float | None]:
    """The process' largest resident set (model loading and warm-up included) and what CUDA held at most, in MiB."""
    import torch

    device = engine.describe()["device"]
    cuda = torch.cuda.max_memory_allocated(device) / 2**20 if device.startswith("cuda") else None
    try:
        import resource
    except ImportError:  # Windows
        return {"peak_rss_mib": None, "peak_cuda_mib": cuda}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_rss_mib": peak / (2**20 if sys.platform == "darwin" else 2**10), "peak_cuda_mib": cuda}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _write(row: str, output: Path | None) -> None:
    if output is None:
        typer.echo(row)
    else:
        output.write_text(row + "\n", encoding="utf-8")


def print_table(console: Console, row: Mapping[str, Any], other: Mapping[str, Any] | None, other_name: str) -> None:
    """Results, one a line; beside those of ``other`` and the ratio, with the conditions in which the two differ."""
    from rich.table import Table

    table = Table("", "this run", *([other_name, "ratio"] if other is not None else []))
    mine = _flat(row["results"])
    theirs = _flat(other["results"]) if other is not None else {}
    for name, value in mine.items():
        cells = [name, _cell(value)]
        if other is not None:
            cells += [_cell(theirs.get(name)), _ratio(value, theirs.get(name))]
        table.add_row(*cells)
    table.add_section()
    conditions = _flat(row["conditions"])
    earlier = _flat(other["conditions"]) if other is not None else {}
    for name in dict.fromkeys([*conditions, *earlier]):
        if other is None:
            table.add_row(name, _cell(conditions[name]))
        elif conditions.get(name) != earlier.get(name):
            table.add_row(name, _cell(conditions.get(name)), _cell(earlier.get(name)))
    console.print(table, markup=False)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, keys joined by blanks."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{name} {key}": item for key, item in _flat(value).items()})
        else:
            flat[name] = value
    return flat


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(_cell(item) for item in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _ratio(mine: Any, theirs: Any) -> str:
    """``mine / theirs`` where both are numbers and there is such a ratio."""
    numbers = all(isinstance(value, (int, float)) for value in (mine, theirs))
    return f"{mine / theirs:.3f}" if numbers and theirs else "-"
