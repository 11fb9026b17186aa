"""Transcripts as text, JSON, JSON lines, SubRip (srt) and WebVTT (vtt), written in the order of the input files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from oasr_core.errors import ConfigError, OasrError
from oasr_core.request import RequestOutput, Segment, WordTiming

#: Limits of one subtitle cue: characters a line, lines, seconds, and the silence in seconds that ends a cue. A shorter
#: cue than the least number of seconds stays until then where no other follows: words of a few frames would only flash.
MAX_LINE_CHARS = 42
MAX_LINES = 2
MIN_CUE_SECONDS, MAX_CUE_SECONDS = 0.8, 7.0
MAX_GAP_SECONDS = 0.8


_CUT_SHORT = "the cap of tokens (--max-new-tokens, max_seq_len) was reached, or a stream's history is full"

_OPTIONAL_FIELDS = ("language", "language_prob", "no_speech_prob", "temperature", "reached_final")


class OutputFormat(StrEnum):
    """Value of ``--format``."""

    text = "text"
    json = "json"
    jsonl = "jsonl"
    srt = "srt"
    vtt = "vtt"

    @property
    def suffix(self) -> str:
        """File name suffix under ``--output-dir``."""
        return ".txt" if self is OutputFormat.text else f".{self.value}"

    @property
    def is_subtitle(self) -> bool:
        """Whether the format consists of timed cues."""
        return self in (OutputFormat.srt, OutputFormat.vtt)


@dataclass(frozen=True, slots=True)
class FileResult:
    """What became of one input file: an output, or the error that stands in its place. ``duration`` in seconds.

    ``hint`` is for whoever reads the error on a terminal.
    """

    file: str
    duration: float | None = None
    output: RequestOutput | None = None
    error: str | None = None
    hint: str = ""

    def transcript(self) -> RequestOutput:
        """The output; raises ``OasrError`` with the file's error where there is none."""
        if self.output is None:
            raise OasrError(self.error or f"{self.file}: no output")
        return self.output

    def record(self) -> dict[str, Any]:
        """The JSON object of this file: ``{"file", "error"}``, or the transcript with its best ids and score.

        What only some decode families find out (``_OPTIONAL_FIELDS``) is there where they did.
        """
        output = self.output
        if output is None:
            return {"file": self.file, "error": self.error}
        optional = {name: getattr(output, name) for name in _OPTIONAL_FIELDS}
        return {
            "file": self.file,
            "text": output.text,
            "tokens": output.tokens[0] if output.tokens else [],
            "score": _finite(output.scores[0] if output.scores else None),
            "words": _word_records(output.words),
            "segments": [
                {"text": each.text, **_times(each), "words": _word_records(each.words)} for each in output.segments
            ],
            **{name: value for name, value in optional.items() if value is not None},
            "finish_reason": output.finish_reason,
            "duration": self.duration,
        }


def _finite(value: float | None) -> float | None:
    """JSON has no infinities."""
    return value if value is not None and math.isfinite(value) else None


def _word_records(words: Iterable[WordTiming] | None) -> list[dict[str, Any]] | None:
    if words is None:
        return None
    return [{"word": word.word, **_times(word), "confidence": _finite(word.confidence)} for word in words]


def _times(timed: Segment | WordTiming) -> dict[str, Any]:
    """Seconds to the microsecond: sums of frames end in digits that mean nothing."""
    times = {"start": _finite(timed.start), "end": _finite(timed.end)}
    return {name: None if value is None else round(value, 6) for name, value in times.items()}


def render(result: FileResult, output_format: OutputFormat) -> str:
    """The content of one file's own document; subtitles raise ``OasrError`` for text without any times."""
    if output_format is OutputFormat.text:
        return result.transcript().text + "\n"
    if output_format is OutputFormat.json:
        return json.dumps(result.record(), ensure_ascii=False, indent=2) + "\n"
    if output_format is OutputFormat.jsonl:
        return json.dumps(result.record(), ensure_ascii=False) + "\n"
    cues = subtitle_cues(result.transcript(), result.duration)
    return render_srt(cues) if output_format is OutputFormat.srt else render_vtt(cues)


# --- subtitles ------------------------------------------------------------------------------------------------------


class Cue(NamedTuple):
    """One subtitle: times in milliseconds, text lines."""

    start_ms: int
    end_ms: int
    lines: tuple[str, ...]


class _Piece(NamedTuple):
    """A word with its punctuation, and the space before it or none (``glue``); times in seconds."""

    glue: str
    word: str
    start: float
    end: float


def subtitle_cues(output: RequestOutput, duration: float | None = None) -> list[Cue]:
    """Cut a transcript into cues at its segments, and at its words where it is one segment or one is too long.

    Where there are no word times, those of a segment are shared among its words.

    ``duration`` of the audio in seconds: no short cue is prolonged beyond it.
    Raises ``OasrError`` where there is text but neither words nor segments carry times.
    """
    cues: list[Cue] = []
    for pieces in _timed_pieces(output):
        for start, end, lines in _cut(pieces):
            start_ms = max(_milliseconds(start), cues[-1].start_ms + 1 if cues else 0)
            if cues and cues[-1].end_ms > start_ms:
                cues[-1] = cues[-1]._replace(end_ms=start_ms)
            long_enough = min(start + MIN_CUE_SECONDS, math.inf if duration is None else duration)
            end_ms = _milliseconds(min(max(end, long_enough), start + MAX_CUE_SECONDS))
            cues.append(Cue(start_ms, max(end_ms, start_ms + 1), lines))
    return cues


def render_srt(cues: Iterable[Cue]) -> str:
    """SubRip: numbered cues, comma before the milliseconds; an empty string for no cue."""
    return "".join(
        f"{number}\n{_clock(cue.start_ms, ',')} --> {_clock(cue.end_ms, ',')}\n" + "\n".join(cue.lines) + "\n\n"
        for number, cue in enumerate(cues, 1)
    )


def render_vtt(cues: Iterable[Cue]) -> str:
    """WebVTT: header, then cues with ``&``, ``<`` and ``>`` escaped; the header alone for no cue."""
    parts = ["WEBVTT\n"]
    for cue in cues:
        text = "\n".join(cue.lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        parts.append(f"{_clock(cue.start_ms, '.')} --> {_clock(cue.end_ms, '.')}\n{text}\n")
    return "\n".join(parts)


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _clock(milliseconds: int, separator: str) -> str:
    seconds, millis = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{separator}{millis:03d}"


def _timed_pieces(output: RequestOutput) -> list[list[_Piece]]:
    """Runs of words that no cue joins: those of each segment, or all where there are not several segments."""
    if output.words and len(output.segments) < 2:
        return [_glued(output.text, [(word.word, word.start, word.end) for word in output.words])]
    runs: list[list[_Piece]] = []
    for segment in output.segments:
        if segment.words:
            words = [(word.word, word.start, word.end) for word in segment.words]
        else:
            words = _spread(segment.text.split(), segment.start, segment.end)
        runs.append(_glued(segment.text, words))
    if not runs and output.text.strip():
        raise OasrError(
            "subtitles need times, but the transcript has neither words nor segments with times; "
            "use another --format, or a decode method that supports word timestamps"
        )
    return runs


def _spread(words: Sequence[str], start: float, end: float) -> list[tuple[str, float, float]]:
    """Share a stretch of time among words in proportion to their length."""
    total = sum(map(len, words))
    timed, done = [], 0
    for word in words:
        begin, done = done, done + len(word)
        timed.append((word, start + (end - start) * begin / total, start + (end - start) * done / total))
    return timed


def _glued(text: str, words: Iterable[tuple[str, float, float]]) -> list[_Piece]:
    """Find the words in the text, so that scripts without spaces stay without and punctuation is kept."""
    pieces: list[_Piece] = []
    cursor = 0
    in_text = True  # whether the word before was found, so that what follows the cursor belongs to it
    for word, start, end in words:
        word = " ".join(word.split())
        if not word:
            continue
        found = text.find(word, cursor)
        glue, opening = " ", ""
        if found >= 0 and in_text:
            closing, glue, opening = _between(text[cursor:found])
            if pieces:
                pieces[-1] = pieces[-1]._replace(word=pieces[-1].word + closing)
            else:
                opening = closing + opening
        in_text = found >= 0
        cursor = found + len(word) if in_text else cursor
        pieces.append(_Piece(glue, opening + word, start, end))
    if pieces and in_text:
        pieces[-1] = pieces[-1]._replace(word=pieces[-1].word + _between(text[cursor:])[0])
    return [part for piece in pieces for part in _fit(piece)]


def _between(text: str) -> tuple[str, str, str]:
    """Split what stands between two words: what closes the first, a space or none, what opens the second."""
    closing, *rest = re.split(r"\s+", text, maxsplit=1)
    return closing, " " if rest else "", " ".join(rest[0].split()) if rest else ""


def _fit(piece: _Piece) -> list[_Piece]:
    """A piece longer than a line is cut, since the limit of a line is hard."""
    chunks = [piece.word[at : at + MAX_LINE_CHARS] for at in range(0, len(piece.word), MAX_LINE_CHARS)]
    timed = _spread(chunks, piece.start, piece.end)
    return [_Piece("" if index else piece.glue, *part) for index, part in enumerate(timed)]


def _cut(pieces: Sequence[_Piece]) -> list[tuple[float, float, tuple[str, ...]]]:
    """Group pieces into cues within the limits; returns start, end (seconds) and lines of each."""
    groups = [group for stretch in _stretches(pieces) for group in _filled(stretch)]
    return [(group[0].start, group[-1].end, tuple(_lines(group))) for group in groups]


def _stretches(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Cut where a silence ends a cue."""
    stretches: list[list[_Piece]] = []
    for piece in pieces:
        if stretches and piece.start - stretches[-1][-1].end <= MAX_GAP_SECONDS:
            stretches[-1].append(piece)
        else:
            stretches.append([piece])
    return stretches


def _filled(stretch: Sequence[_Piece]) -> list[list[_Piece]]:
    """Cues as full as the limits let them be; the last two share evenly, so that no lone word is left to flash."""
    groups: list[list[_Piece]] = []
    for piece in stretch:
        if groups and _fits([*groups[-1], piece]):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    if len(groups) > 1:
        rest = [*groups[-2], *groups[-1]]
        halves = [(rest[:at], rest[at:]) for at in range(1, len(rest))]
        groups[-2:] = min((pair for pair in halves if all(map(_fits, pair))), key=_unevenness, default=groups[-2:])
    return groups


def _unevenness(halves: tuple[list[_Piece], list[_Piece]]) -> int:
    first, second = (sum(len(piece.glue + piece.word) for piece in half) for half in halves)
    return abs(first - second)


def _fits(group: Sequence[_Piece]) -> bool:
    """Whether pieces make one cue; a single piece always does."""
    if len(group) == 1:
        return True
    return group[-1].end - group[0].start <= MAX_CUE_SECONDS and len(_lines(group)) <= MAX_LINES


def _lines(group: Sequence[_Piece]) -> list[str]:
    lines = [group[0].word]
    for piece in group[1:]:
        joined = lines[-1] + piece.glue + piece.word
        if len(joined) <= MAX_LINE_CHARS:
            lines[-1] = joined
        else:
            lines.append(piece.word)
    return lines


# --- writing --------------------------------------------------------------------------------------------------------


class ResultWriter:
    """Takes results as they come and writes them in input order, to one stream or a file each in ``output_dir``.

    ``screen()`` gives a context in which ``out`` and ``err`` may be written (a display hides itself meanwhile).
    :attr:`failed` counts the files without a written transcript.
    """

    def __init__(
        self,
        files: Sequence[str],
        output_format: OutputFormat,
        out: TextIO,
        err: TextIO,
        output_dir: Path | None = None,
    ) -> None:
        self.failed = 0
        self._files = files
        self._format = output_format
        self._out = out
        self._err = err
        self._paths = output_paths(files, output_format, output_dir) if output_dir else None
        self._waiting: dict[int, FileResult] = {}
        self._next = 0
        self._document: list[FileResult] = []

    def put(self, index: int, result: FileResult, screen: AbstractContextManager[object] | None = None) -> None:
        """Accept the result of input file ``index``; writes it, and those that waited for it, when its turn comes."""
        self._waiting[index] = result
        if self._next not in self._waiting:
            return
        with screen or nullcontext():
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._write(self._next, ready)
                self._next += 1

    def close(self) -> None:
        """Write the JSON document, which has to wait for the last file."""
        if self._format is OutputFormat.json and self._paths is None:
            records = [result.record() for result in self._document]
            document = records if len(self._files) > 1 else records[0]
            self._out.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
            self._out.flush()

    def _write(self, index: int, result: FileResult) -> None:
        if result.error is not None:
            self._fail(result.file, f"{result.error} {result.hint}".rstrip())
        elif result.transcript().finish_reason == "length":
            self._err.write(f"warning: {result.file}: the transcript is cut short: {_CUT_SHORT}\n")
        try:
            if self._paths is not None:
                self._write_file(self._paths[index], result)
            elif self._format is OutputFormat.json:
                self._document.append(result)
            else:
                self._out.write(self._line(result))
                self._out.flush()
        except OasrError as error:
            self._fail(result.file, str(error))

    def _write_file(self, path: Path, result: FileResult) -> None:
        if result.error is not None and self._format not in (OutputFormat.json, OutputFormat.jsonl):
            return
        content = render(result, self._format)
        try:
            path.write_text(content, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise OasrError(f"cannot write {path}: {error.strerror}") from error

    def _line(self, result: FileResult) -> str:
        if result.error is not None and self._format is not OutputFormat.jsonl:
            return ""
        if self._format is OutputFormat.text and len(self._files) > 1:
            return f"{result.file}\t{' '.join(result.transcript().text.splitlines())}\n"
        return render(result, self._format)

    def _fail(self, file: str, error: str) -> None:
        self.failed += 1
        # The errors of files that cannot be read begin with the file, for those who see nothing else.
        reason = error.removeprefix("audio file ").removeprefix(f"{file!r} ")
        self._err.write(f"error: {file}: {reason}\n")
        self._err.flush()


def output_paths(files: Sequence[str], output_format: OutputFormat, output_dir: Path) -> list[Path]:
    """One path a file, named by its stem (``-`` is ``stdin``); raises ``ConfigError`` where two files share a name."""
    taken: dict[str, str] = {}
    for file in files:
        name = ("stdin" if file == "-" else Path(file).stem) + output_format.suffix
        if name in taken:
            raise ConfigError(
                f"--output-dir: {taken[name]} and {file} would both be written to {output_dir / name}; "
                "transcribe them in two calls with different directories"
            )
        taken[name] = file
    return [output_dir / name for name in taken]
