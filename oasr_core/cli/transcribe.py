"""``oasr transcribe``: files in, transcripts out, offline or through the streaming path.

Exit code: 0 all files transcribed, 1 a file failed (the others are printed all the same), 2 wrong usage or settings.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oasr_core.cli.formats import FileResult, OutputFormat, ResultWriter
from oasr_core.cli.logs import TRACEBACK_HINT, debug_wanted
from oasr_core.cli.options import engine_flags, report, resolve_sources
from oasr_core.errors import ConfigError, OasrError, RequestRefusedError, UnknownRequestError
from oasr_core.request import DecodingOptions, Hotword, RequestOutput

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

    from oasr_core.audio import Audio
    from oasr_core.config import EngineConfig, ServiceMode
    from oasr_core.engine import ASREngine

OASR_API = {"commands": "1.0"}

app = typer.Typer(help="Transcribe audio files.", add_completion=False)


_SECONDS_BETWEEN_DRAWINGS = 0.05


class Mode(StrEnum):
    """Value of ``--mode``."""

    auto = "auto"
    offline = "offline"
    streaming = "streaming"


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
    chunk_size: Annotated[int | None, typer.Option(help="Streaming: encoder frames per chunk.")] = None,
    feed_ms: Annotated[
        float | None, typer.Option(help="Streaming: milliseconds of audio per piece fed; default one chunk's stride.")
    ] = None,
    partials: Annotated[
        bool, typer.Option("--partials", help="Streaming: a line on standard error for every partial transcript.")
    ] = False,
    decode_method: Annotated[str | None, typer.Option(help="Decode strategy; else the checkpoint's.")] = None,
    decode_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the decode strategy; repeatable.")
    ] = None,
    hotword: Annotated[
        list[str] | None,
        typer.Option(metavar="PHRASE[=BOOST]", help="Phrase to prefer (boost below 0: to avoid); repeatable."),
    ] = None,
    hotwords_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PHRASE[=BOOST] on each line; # begins a comment line.")
    ] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", "-f", help="What is printed.")] = OutputFormat.text,
    output_dir: Annotated[
        Path | None, typer.Option(help="Write one file per input here, instead of to standard output.")
    ] = None,
    word_timestamps: Annotated[
        bool, typer.Option("--word-timestamps", help="Fill words (json, jsonl); srt and vtt always ask for them.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Files transcribed together.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML, TOML or JSON file of settings.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the engine; repeatable.")
    ] = None,
) -> None:
    """Transcribe audio files.

    Several files are transcribed together and printed in the order given. A file that fails hurts no other: its
    error goes to standard error, and the exit code is 1.
    """
    try:
        flags = engine_flags(
            settings=settings or (),
            decode_options=decode_option or (),
            model=model,
            chunk_size=chunk_size,
            decode_method=decode_method,
            device=device,
            dtype=dtype,
            max_batch_size=batch_size,
        )
        engine_config = plan(config, flags, mode, feed_ms, partials)
        check_files(files, output_format, output_dir)
        decoding = DecodingOptions(
            word_timestamps=word_timestamps or output_format.is_subtitle,
            hotwords=collect_hotwords(hotwords_file, hotword or ()),
        )
        if isinstance(sys.stdout, io.TextIOWrapper):  # a transcript that the terminal cannot show must not end the run
            sys.stdout.reconfigure(errors="backslashreplace")
        writer = ResultWriter(files, output_format, sys.stdout, sys.stderr, output_dir)
        if word_timestamps and output_format is OutputFormat.text:
            _say("note: --format text does not show word timestamps; json, jsonl, srt and vtt do")
        engine = start_engine(engine_config)
    except OasrError as error:
        report(error)
        raise typer.Exit(2) from error
    streaming = engine_config.service_mode == "streaming" or not engine.can_offline
    feed_samples = _feed_samples(engine, feed_ms) if streaming else 0
    with engine, Display(len(files), _terminal(), partial_lines=partials) as display:
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
    if mode is Mode.auto and not asks_to_stream:
        return config
    wanted: ServiceMode = "offline" if mode is Mode.offline else "streaming"
    if config.service_mode not in ("mixed", wanted):
        origin = origins["service_mode"]
        raise ConfigError(f"service_mode={config.service_mode!r} ({origin}) does not serve {wanted} transcription")
    return config.replace(service_mode=wanted)


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


def collect_hotwords(file: Path | None, flags: Sequence[str]) -> tuple[Hotword, ...]:
    """The phrases of ``--hotwords-file``, then those of ``--hotword``, whose boost counts where both name a phrase.

    Raises ``ConfigError`` for a file that cannot be read and for what is no ``PHRASE[=BOOST]``.
    """
    hotwords = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error})"
            raise ConfigError(f"--hotwords-file {file}: cannot read it: {reason}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                hotwords.append(parse_hotword(line, f"--hotwords-file {file}, line {number}"))
    return (*hotwords, *(parse_hotword(flag, "--hotword") for flag in flags))


def parse_hotword(text: str, where: str) -> Hotword:
    """``PHRASE`` or ``PHRASE=BOOST``; the last ``=`` counts. Raises ``ConfigError`` naming ``where``."""
    phrase, equals, number = text.rpartition("=") if "=" in text else (text, "", "")
    try:
        boost = float(number) if equals else None
    except ValueError:
        boost = math.nan
    if not phrase.strip() or (boost is not None and not math.isfinite(boost)):
        raise ConfigError(
            f"{where}: {text.strip()!r} is no PHRASE[=BOOST] with a finite number as boost, for example 'NEW YORK=2'; "
            "for a phrase that holds '=' name its boost too"
        )
    return Hotword(phrase=phrase.strip(), boost=boost)


def start_engine(config: EngineConfig) -> ASREngine:
    """Load the model; raises ``OasrError`` where it cannot be loaded or cannot serve the mode."""
    from oasr_core.engine import ASREngine

    return ASREngine(config)


def _feed_samples(engine: ASREngine, feed_ms: float | None) -> int:
    if feed_ms is None:
        return engine.stride_samples
    return max(1, round(feed_ms * engine.sample_rate / 1000))


@dataclass(slots=True)
class _Job:
    """A file whose request is under way; ``audio`` is kept while pieces of it are still to be fed."""

    index: int
    file: str
    duration: float
    audio: Audio | None = None
    fed: int = 0


class Transcriber:
    """Keeps up to ``limit`` files in the engine until all are written; ``feed_samples`` 0 means offline."""

    def __init__(
        self,
        engine: ASREngine,
        files: Sequence[str],
        writer: ResultWriter,
        display: Display,
        decoding: DecodingOptions,
        *,
        limit: int,
        feed_samples: int = 0,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._display = display
        self._decoding = decoding
        self._feed_samples = feed_samples
        # Offline batches are chosen among more requests than one batch holds.
        self._limit = limit if feed_samples else limit * 4
        # A piece longer than a chunk is worked off before the next one, so that partials keep up with what was fed.
        self._steps = math.ceil(feed_samples / engine.stride_samples) if feed_samples else 1
        self._waiting = iter(enumerate(files))
        self._jobs: dict[str, _Job] = {}
        self._unencoded: set[str] = set()

    def run(self) -> None:
        """Transcribe all files; a file's own failure goes to the writer, an engine's is raised."""
        while self._admit():
            self._feed()
            for _ in range(self._steps):
                outputs = self._engine.step()
                for output in outputs:
                    self._receive(output)
            all_fed = all(job.audio is None for job in self._jobs.values())
            if self._jobs and all_fed and not outputs and not self._engine.has_work:
                raise OasrError(f"the engine has no work left, but {len(self._jobs)} files have no final output")
        with self._display.hidden():
            self._writer.close()

    def _admit(self) -> bool:
        """Fill the free places; returns whether any request is under way."""
        while len(self._jobs) < self._limit:
            index, file = next(self._waiting, (-1, ""))
            if index < 0:
                break
            try:
                audio = _load(file, self._engine.sample_rate)
                request_id = self._submit(audio)
            except RequestRefusedError:
                raise
            except OasrError as error:
                self._finish(index, FileResult(file, error=str(error)))
                continue
            self._jobs[request_id] = _Job(index, file, audio.duration, audio if self._feed_samples else None)
        return bool(self._jobs)

    def _submit(self, audio: Audio) -> str:
        if self._feed_samples:
            return self._engine.add_streaming_request(decoding=self._decoding)
        return self._engine.add_request(audio.samples, streaming=False, decoding=self._decoding)

    def _feed(self) -> None:
        """Give every stream its next piece."""
        for request_id, job in list(self._jobs.items()):
            if job.audio is None:
                continue
            piece = job.audio.samples[job.fed : job.fed + self._feed_samples]
            job.fed += len(piece)
            last = job.fed >= len(job.audio.samples)
            try:
                self._engine.feed_chunk(request_id, piece, is_last=last)
            except OasrError as error:
                with suppress(UnknownRequestError):  # the engine may have given it up itself
                    self._engine.abort_request(request_id)
                del self._jobs[request_id]
                self._finish(job.index, FileResult(job.file, job.duration, error=str(error)))
            if last:
                job.audio = None

    def _receive(self, output: RequestOutput) -> None:
        job = self._jobs.get(output.request_id)
        if job is None:  # the terminal output of a request that was aborted above
            return
        self._warn_of_hotwords(output.unencoded_hotwords)
        if not output.finished:
            self._display.partial(job.index, job.file, output.text, job.fed / self._engine.sample_rate)
            return
        del self._jobs[output.request_id]
        if output.finish_reason in ("stop", "length"):
            self._finish(job.index, FileResult(job.file, job.duration, output))
        else:
            stage = f" (stage {output.error_stage})" if output.error_stage else ""
            error = f"{output.error or output.finish_reason}{stage}"
            hint = TRACEBACK_HINT if stage and not debug_wanted() else ""
            self._finish(job.index, FileResult(job.file, job.duration, error=error, hint=hint))

    def _warn_of_hotwords(self, unencoded: Sequence[str]) -> None:
        """Say once of each phrase that the model cannot encode it."""
        new = [phrase for phrase in unencoded if phrase not in self._unencoded]
        self._unencoded.update(new)
        if new:
            with self._display.hidden():
                for phrase in new:
                    _say(f"warning: the hotword {phrase!r} has no effect: the model's tokenizer cannot encode it")

    def _finish(self, index: int, result: FileResult) -> None:
        self._display.done(index)
        self._writer.put(index, result, self._display.hidden())


def _load(file: str, sample_rate: int) -> Audio:
    """Decode a file, or standard input for ``-``, to the model's sampling rate."""
    from oasr_core.audio import load_audio

    return load_audio(sys.stdin.buffer if file == "-" else file, sample_rate=sample_rate)


def _headline(engine: ASREngine, streaming: bool) -> str:
    """What transcribes, for whoever watches."""
    facts = engine.describe()
    how = f"streaming in chunks of {facts['chunk_ms']} ms" if streaming else "offline"
    return f"{facts['model']} ({facts['architecture']}, {facts['decode_method']}) on {facts['device']}, " + (
        f"{facts['dtype']}, {how}"
    )


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _terminal() -> Console | None:
    """Standard error as a terminal, or ``None`` where it is none."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


class Display:
    """Progress bar and live partial transcripts at the bottom of the terminal; nothing where there is no terminal.

    With ``partial_lines`` a partial is a line that stays, on a terminal or not.
    """

    def __init__(self, total: int, console: Console | None = None, *, partial_lines: bool = False) -> None:
        self._total = total
        self._partial_lines = partial_lines
        self._partials: dict[int, tuple[str, str]] = {}
        self._drawn = -math.inf
        self._live: Live | None = None
        if console is not None:
            self._live = self._build(total, console)

    def _build(self, total: int, console: Console) -> Live:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(TextColumn("transcribing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._progress.add_task("", total=total)
        return Live(
            get_renderable=self._picture,
            console=console,
            refresh_per_second=5,
            transient=True,
            redirect_stdout=False,  # results go to a standard output that may be a pipe
            redirect_stderr=False,
        )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def headline(self, text: str) -> None:
        """One line above everything else."""
        if self._live is not None:
            with self.hidden():
                _say(text)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the display away while something else is written."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def partial(self, index: int, file: str, text: str, fed_seconds: float) -> None:
        """Show what has been recognised of a file after ``fed_seconds`` of its audio."""
        changed = self._partials.get(index, (file, ""))[1] != text
        self._partials[index] = (file, text)
        if self._partial_lines:
            if changed:
                with self.hidden():
                    _say(f"{fed_seconds:7.2f} s  {f'{file}: ' if self._total > 1 else ''}{text}")
        elif self._live is not None and time.monotonic() - self._drawn > _SECONDS_BETWEEN_DRAWINGS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def done(self, index: int) -> None:
        """A file is finished: its line goes, the bar advances."""
        self._partials.pop(index, None)
        if self._live is not None:
            self._progress.advance(self._task)

    def _picture(self) -> RenderableType:
        from rich.console import Group

        if self._partial_lines:
            return self._progress
        # Copied, because Live draws on a thread of its own too.
        lines = [_Partial(file, text) for _, (file, text) in sorted(self._partials.copy().items())]
        return Group(self._progress, *lines)


@dataclass(frozen=True, slots=True)
class _Partial:
    """The end of a partial transcript, as much of it as one terminal line holds."""

    file: str
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        name = Path(self.file).name
        name = set_cell_size(name, min(cell_len(name), options.max_width // 3))
        room = options.max_width - cell_len(name) - 2
        tail = self.text[-room:]
        while cell_len(tail) > room:
            tail = tail[1:]
        yield Text(f"{name}: {tail}", no_wrap=True)
