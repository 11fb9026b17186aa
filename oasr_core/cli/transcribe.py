"""``oasr transcribe``: files in, transcripts out, offline or through the streaming path.

Exit code: 0 all files transcribed, 1 a file failed (the others are printed all the same), 2 wrong usage or settings.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oasr_core.cli.display import Display, say, terminal
from oasr_core.cli.formats import OutputFormat, ResultWriter
from oasr_core.cli.hotwords import collect_hotwords
from oasr_core.cli.long_form import LongForm, long_form_flags, with_long_form
from oasr_core.cli.options import engine_flags, report, resolve_sources
from oasr_core.cli.request_options import requested, with_times
from oasr_core.cli.transcriber import Transcriber
from oasr_core.errors import ConfigError, OasrError, RequestRefusedError

if TYPE_CHECKING:
    from oasr_core.config import EngineConfig, ServiceMode
    from oasr_core.engine import ASREngine

OASR_API = {"commands": "1.0"}

app = typer.Typer(help="Transcribe audio files.", add_completion=False, rich_markup_mode="markdown")


class Mode(StrEnum):
    """Value of ``--mode``."""

    auto = "auto"
    offline = "offline"
    streaming = "streaming"


_DECODING, _LONG, _STREAMING = "Decoding", "Long recordings and silence", "Streaming"
_OUTPUT, _ENGINE = "Output", "Engine"


@app.command()
def transcribe(
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Audio files; - reads standard input.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="DIR|NAME|HUB_ID", help="Checkpoint; else ckpt_dir in --config."),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="auto is offline, unless --chunk-size, --feed-ms or --partials ask for streaming, "
            "or the model can do nothing else."
        ),
    ] = Mode.auto,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", "-f", help="What is printed.", rich_help_panel=_OUTPUT)
    ] = OutputFormat.text,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Write one file per input here, instead of to standard output.", rich_help_panel=_OUTPUT),
    ] = None,
    word_timestamps: Annotated[
        bool,
        typer.Option(
            "--word-timestamps",
            help="Times of words (json, jsonl). srt and vtt ask for them where the model writes no times of segments.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    language: Annotated[
        str | None,
        typer.Option(
            metavar="CODE", help="Language spoken, as in en; else the model's guess.", rich_help_panel=_DECODING
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="transcribe, or translate into English.", rich_help_panel=_DECODING),
    ] = None,
    initial_prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text that comes before: names, spelling, style.", rich_help_panel=_DECODING),
    ] = None,
    beam_size: Annotated[
        int | None, typer.Option(help="Hypotheses searched together.", rich_help_panel=_DECODING)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Above 0 tokens are drawn, not chosen.", rich_help_panel=_DECODING)
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Cap of generated tokens, of each window.", rich_help_panel=_DECODING)
    ] = None,
    hotword: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHRASE[=BOOST]",
            help="Phrase to prefer (boost below 0: to avoid); repeatable.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    hotwords_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A PHRASE[=BOOST] on each line; # begins a comment line.", rich_help_panel=_DECODING
        ),
    ] = None,
    decode_method: Annotated[
        str | None, typer.Option(help="Decode strategy; else the checkpoint's.", rich_help_panel=_DECODING)
    ] = None,
    decode_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the decode strategy; repeatable.", rich_help_panel=_DECODING),
    ] = None,
    long_form: Annotated[
        LongForm | None,
        typer.Option(
            metavar="MODE",
            help="Audio beyond the model's window: parallel cuts it and decodes the windows together, sequential "
            "follows the model's timestamps, off refuses it. auto, the default, is sequential where the model writes "
            "timestamps and no --segmenter is named, else parallel.",
            rich_help_panel=_LONG,
        ),
    ] = None,
    segmenter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What cuts long audio: overlap, or one of a plugin, as vad.", rich_help_panel=_LONG
        ),
    ] = None,
    silence_gate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What keeps audio without speech from the decoder: auto, off, signal, or a segmenter.",
            rich_help_panel=_LONG,
        ),
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Encoder frames per chunk.", rich_help_panel=_STREAMING)
    ] = None,
    feed_ms: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds of audio per piece fed; default one chunk's stride.", rich_help_panel=_STREAMING
        ),
    ] = None,
    partials: Annotated[
        bool,
        typer.Option(
            "--partials",
            help="A line on standard error for every partial transcript.",
            rich_help_panel=_STREAMING,
        ),
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N.", rich_help_panel=_ENGINE)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16, float16.", rich_help_panel=_ENGINE)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Files transcribed together.", rich_help_panel=_ENGINE)] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML, TOML or JSON file of settings.", rich_help_panel=_ENGINE),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any setting of the engine; repeatable.", rich_help_panel=_ENGINE
        ),
    ] = None,
) -> None:
    """Transcribe audio files.

    Several files are transcribed together and printed in the order given. A file that fails hurts no other: its
    error goes to standard error, and the exit code is 1. What the model's decoder cannot do is refused by name.
    """
    try:
        flags = engine_flags(
            settings=settings or (),
            decode_options=decode_option or (),
            model=model,
            beam_size=beam_size,
            chunk_size=chunk_size,
            decode_method=decode_method,
            device=device,
            dtype=dtype,
            max_batch_size=batch_size,
            segmenter=segmenter,
            silence_gate=silence_gate,
            **long_form_flags(long_form),
        )
        engine_config = plan(config, flags, mode, feed_ms, partials)
        check_files(files, output_format, output_dir)
        asked = requested(
            word_timestamps=word_timestamps,
            hotwords=collect_hotwords(hotwords_file, hotword or ()),
            language=language,
            task=task,
            prompt=initial_prompt,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )
        if isinstance(sys.stdout, io.TextIOWrapper):  # a transcript that the terminal cannot show must not end the run
            sys.stdout.reconfigure(errors="backslashreplace")
        writer = ResultWriter(files, output_format, sys.stdout, sys.stderr, output_dir)
        if word_timestamps and output_format is OutputFormat.text:
            say("note: --format text does not show word timestamps; json, jsonl, srt and vtt do")
        engine = start_engine(engine_config)
    except OasrError as error:
        report(error)
        raise typer.Exit(2) from error
    decoding = with_times(asked, output_format, engine.describe()["honours"])
    streaming = engine_config.service_mode == "streaming" or not engine.can_offline
    feed_samples = _feed_samples(engine, feed_ms) if streaming else 0
    with engine, Display(len(files), terminal(), partial_lines=partials) as display:
        display.headline(_headline(engine, streaming))
        transcriber = Transcriber(
            engine, files, writer, display, decoding, limit=engine.config.max_batch_size, feed_samples=feed_samples
        )
        try:
            transcriber.run()
        except OasrError as error:
            with display.hidden():
                report(error)
            # All requests of one call ask for the same, so a refusal is about the options and not about a file.
            raise typer.Exit(2 if isinstance(error, RequestRefusedError) else 1) from error
    raise typer.Exit(1 if writer.failed else 0)


def plan(
    config_file: Path | None, flags: Mapping[str, Any], mode: Mode, feed_ms: float | None, partials: bool
) -> EngineConfig:
    """Resolve the settings; a mode that is asked for, by name or by an option that only streams use, is pinned.

    Raises ``ConfigError`` where there is no model, or the mode contradicts another setting.
    """
    config, origins = resolve_sources(config_file, flags)
    if not config.ckpt_dir:
        raise ConfigError("no model is given: add --model DIR|NAME|HUB_ID; 'oasr models' shows the installed names")
    if feed_ms is not None and not 0 < feed_ms < math.inf:
        raise ConfigError(f"--feed-ms {feed_ms}: expected a positive number of milliseconds")
    asks_to_stream = feed_ms is not None or partials or flags.get("chunk_size") is not None
    if asks_to_stream and mode is Mode.offline:
        raise ConfigError("--chunk-size, --feed-ms and --partials have no effect with --mode offline; drop them or it")
    if mode is not Mode.auto or asks_to_stream:
        wanted: ServiceMode = "offline" if mode is Mode.offline else "streaming"
        if config.service_mode not in ("mixed", wanted):
            origin = origins["service_mode"]
            raise ConfigError(f"service_mode={config.service_mode!r} ({origin}) does not serve {wanted} transcription")
        config = config.replace(service_mode=wanted)
    if config.service_mode == "streaming":
        _refuse_for_streams(flags)
    return with_long_form(config, origins)


def _refuse_for_streams(flags: Mapping[str, Any]) -> None:
    """What acts on whole recordings."""
    given = [f"--{name.replace('_', '-')}" for name in ("long_form", "silence_gate") if flags.get(name)]
    if given:
        raise ConfigError(f"{' and '.join(given)}: no effect on streams; drop it, or use --mode offline")


def check_files(files: Sequence[str], output_format: OutputFormat, output_dir: Path | None) -> None:
    """Refuse (``ConfigError``) what cannot be written; creates the output directory."""
    if files.count("-") > 1:
        raise ConfigError("- (standard input) can be read once only")
    if output_dir is None:
        if output_format.is_subtitle and len(files) > 1:
            raise ConfigError(f"--format {output_format.value} with {len(files)} files needs --output-dir DIR")
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {output_dir}: cannot create it: {error.strerror}") from error


def start_engine(config: EngineConfig) -> ASREngine:
    """Load the model; raises ``OasrError`` where it cannot be loaded or cannot serve the mode."""
    from oasr_core.engine import ASREngine

    return ASREngine(config)


def _feed_samples(engine: ASREngine, feed_ms: float | None) -> int:
    if feed_ms is None:
        return engine.stride_samples
    return max(1, round(feed_ms * engine.sample_rate / 1000))


def _headline(engine: ASREngine, streaming: bool) -> str:
    """What transcribes, for whoever watches."""
    facts = engine.describe()
    how = f"streaming in chunks of {facts['chunk_ms']} ms" if streaming else "offline"
    return f"{facts['model']} ({facts['architecture']}, {facts['decode_method']}) on {facts['device']}, " + (
        f"{facts['dtype']}, {how}"
    )
