from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from oasr_core.cli import transcribe as module
from oasr_core.cli.formats import OutputFormat, ResultWriter
from oasr_core.cli.transcribe import Display, Mode, Transcriber, app, check_files, plan
from oasr_core.errors import ConfigError, InvalidAudioError, OasrError, RequestRefusedError, UnknownRequestError
from oasr_core.request import DecodingOptions, RequestOutput


class ScriptedEngine:
    """Answers every request with its samples joined; ``script`` overrides the terminal output by file name."""

    sample_rate = 1000
    stride_samples = 4

    def __init__(self, script: dict[str, dict[str, object]] | None = None) -> None:
        self.script = script or {}
        self.open: dict[str, list[str]] = {}
        self.ended: list[str] = []
        self.pieces: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.most_open = 0
        self.refuses = False
        self.forgets = False
        self.number = 0

    def _add(self, samples: list[str]) -> str:
        if self.refuses:
            raise RequestRefusedError("word_timestamps is not honoured by this strategy")
        self.number += 1
        request_id = f"r{self.number}"
        self.open[request_id] = list(samples)
        self.most_open = max(self.most_open, len(self.open))
        return request_id

    def add_request(self, samples: list[str], *, streaming: bool, decoding: DecodingOptions) -> str:
        assert streaming is False
        request_id = self._add(samples)
        self.ended.append(request_id)
        return request_id

    def add_streaming_request(self, *, decoding: DecodingOptions) -> str:
        return self._add([])

    def feed_chunk(self, request_id: str, piece: list[str], is_last: bool = False) -> None:
        if "poison" in piece:
            raise InvalidAudioError("NaN at sample 0")
        self.pieces.setdefault(request_id, []).append(len(piece))
        self.open[request_id] += piece
        if is_last:
            self.ended.append(request_id)

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self.open.pop(request_id, None) is None:
            raise UnknownRequestError(request_id)

    def step(self) -> list[RequestOutput]:
        partials = [RequestOutput(rid, "".join(text)) for rid, text in self.open.items() if rid not in self.ended]
        if self.forgets or not self.ended:
            return partials
        request_id = self.ended.pop()  # the last comes first: order must be made by the caller
        text = "".join(self.open.pop(request_id))
        terminal = {"text": text, "finished": True, "finish_reason": "stop", **self.script.get(text, {})}
        return [*partials, RequestOutput(request_id, **terminal)]

    @property
    def has_work(self) -> bool:
        return not self.forgets and bool(self.ended)


@pytest.fixture(autouse=True)
def _files_are_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tests with a scripted engine a file's samples are the characters of its name."""

    def load(file: str, sample_rate: int) -> SimpleNamespace:
        if file.startswith("missing"):
            raise InvalidAudioError(f"{file}: no such file")
        samples = ["poison"] if file == "poison" else list(file)
        return SimpleNamespace(samples=samples, sample_rate=sample_rate, duration=len(file) / sample_rate)

    monkeypatch.setattr(module, "_load", load)


def transcribe(
    engine: ScriptedEngine, files: list[str], *, limit: int = 2, feed: int = 0, display: Display | None = None
):
    out, err = io.StringIO(), io.StringIO()
    writer = ResultWriter(files, OutputFormat.jsonl, out, err)
    display = display or Display(len(files))
    Transcriber(engine, files, writer, display, DecodingOptions(), limit=limit, feed_samples=feed).run()  # type: ignore[arg-type]
    return [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue(), writer.failed


FILES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.mark.parametrize("feed", [0, 1, 4, 9])
def test_order_of_the_input(feed: int):
    rows, err, failed = transcribe(ScriptedEngine(), FILES, feed=feed)
    assert [(row["file"], row["text"]) for row in rows] == [(file, file) for file in FILES]
    assert rows[2]["duration"] == 0.005
    assert (err, failed) == ("", 0)


def test_streams_are_fed_in_pieces_and_run_together():
    engine = ScriptedEngine()
    transcribe(engine, ["abcdefgh", "abc", ""], limit=3, feed=3)
    assert engine.pieces == {"r1": [3, 3, 2], "r2": [3], "r3": [0]}
    assert engine.most_open == 3


@pytest.mark.parametrize(("feed", "most"), [(2, 2), (0, 8)])
def test_requests_in_the_engine_are_bounded(feed: int, most: int):
    engine = ScriptedEngine()
    transcribe(engine, FILES, limit=2, feed=feed)
    assert engine.most_open == most


@pytest.mark.parametrize("feed", [0, 2])
def test_a_bad_file_hurts_nobody(feed: int):
    broken = {"text": "", "finish_reason": "error", "error": "out of memory", "error_stage": "offline_oom"}
    engine = ScriptedEngine({"two": broken})
    rows, err, failed = transcribe(engine, ["one", "missing", "two", "three"], feed=feed)
    assert [row.get("text") for row in rows] == ["one", None, None, "three"]
    assert rows[1] == {"file": "missing", "error": "missing: no such file"}
    assert rows[2] == {"file": "two", "error": "out of memory (stage offline_oom)"}
    assert err.splitlines() == [
        "error: missing: missing: no such file",
        "error: two: out of memory (stage offline_oom)",
    ]
    assert failed == 2


@pytest.mark.parametrize("gone", [False, True])
def test_a_refused_piece_ends_its_file_only(gone: bool):
    engine = ScriptedEngine()
    if gone:
        engine.abort_request = lambda request_id: (_ for _ in ()).throw(UnknownRequestError(request_id))
    rows, _, failed = transcribe(engine, ["one", "poison", "two"], feed=2)
    assert [row.get("text") for row in rows] == ["one", None, "two"]
    assert rows[1]["error"] == "NaN at sample 0"
    assert failed == 1
    assert gone or engine.aborted == ["r2"]


def test_an_abort_from_outside_is_a_failure():
    rows, _, failed = transcribe(ScriptedEngine({"one": {"finish_reason": "abort"}}), ["one"])
    assert (rows, failed) == ([{"file": "one", "error": "abort"}], 1)


def test_a_refused_option_ends_the_run():
    engine = ScriptedEngine()
    engine.refuses = True
    with pytest.raises(RequestRefusedError):
        transcribe(engine, FILES)


@pytest.mark.parametrize("feed", [0, 4])
def test_a_lost_request_does_not_hang(feed: int):
    engine = ScriptedEngine()
    engine.forgets = True
    with pytest.raises(OasrError, match="2 files have no final output"):
        transcribe(engine, ["one", "two"], feed=feed)


def test_partials_reach_the_display():
    class Recording(Display):
        seen: list[tuple[int, str, str]]

        def partial(self, index: int, file: str, text: str) -> None:
            self.seen.append((index, file, text))

    display = Recording(1)
    display.seen = []
    transcribe(ScriptedEngine(), ["abcdef"], feed=2, display=display)
    assert display.seen == [(0, "abcdef", "ab"), (0, "abcdef", "abcd")]


def test_a_terminal_shows_bar_and_partials_and_is_left_clean():
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=40, height=5, color_system=None)
    text = "the end of a long partial transcript stays in sight: two seven"
    with Display(2, console) as display:
        display.partial(0, "some/folder/a-name-that-is-rather-long.wav", text)
        display.partial(1, "[b].wav", "你好世界" * 20)
        with display.hidden():
            terminal.write("RESULT\n")
        display.done(0)
    drawn = terminal.getvalue()
    assert "0/2" in drawn
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9?]*[A-Za-z]", drawn) if line]
    assert any(line.startswith("a-name-that-i: ") and line.rstrip().endswith("two seven") for line in lines)
    assert any(line.startswith("[b].wav: ") for line in lines)
    assert all(cell_len(line) <= 40 for line in lines)
    assert "RESULT" in lines
    assert drawn.rstrip().endswith("\x1b[2K")  # what was drawn last is erased


# --- plan and checks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "flags", "feed_ms", "streaming"),
    [
        (Mode.auto, {}, None, False),
        (Mode.offline, {}, None, False),
        (Mode.streaming, {}, None, True),
        (Mode.auto, {"chunk_size": 8}, None, True),
        (Mode.auto, {}, 20.0, True),
        (Mode.auto, {"service_mode": "streaming"}, None, True),
        (Mode.auto, {"service_mode": "mixed"}, None, False),
    ],
)
def test_mode(mode: Mode, flags: dict[str, object], feed_ms: float | None, streaming: bool):
    config, streams = plan(None, {"ckpt_dir": "m", **flags}, mode, feed_ms)
    assert streams is streaming
    assert config.service_mode == ("streaming" if streaming else "offline")


@pytest.mark.parametrize(
    ("mode", "flags", "feed_ms", "message"),
    [
        (Mode.offline, {"chunk_size": 8}, None, "have no effect with --mode offline"),
        (Mode.offline, {}, 20.0, "have no effect with --mode offline"),
        (Mode.streaming, {"service_mode": "offline"}, None, "does not serve streaming"),
        (Mode.offline, {"service_mode": "streaming"}, None, "does not serve offline"),
        (Mode.auto, {"service_mode": "offline"}, 20.0, "does not serve streaming"),
        (Mode.streaming, {}, 0.0, "positive number"),
        (Mode.streaming, {}, float("nan"), "positive number"),
        (Mode.auto, {"ckpt_dir": ""}, None, "no model is given"),
    ],
)
def test_contradictions_are_refused(mode: Mode, flags: dict[str, object], feed_ms: float | None, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(None, {"ckpt_dir": "m", **flags}, mode, feed_ms)


def test_check_files(tmp_path: Path):
    with pytest.raises(ConfigError, match="once only"):
        check_files(["-", "-"], OutputFormat.text, None)
    with pytest.raises(ConfigError, match="2 files needs --output-dir"):
        check_files(["a", "b"], OutputFormat.vtt, None)
    check_files(["a"], OutputFormat.vtt, None)
    check_files(["a", "b"], OutputFormat.vtt, tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create it"):
        check_files(["a"], OutputFormat.text, tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.wav"], "no model is given"),
        (["a.wav", "--model", "m", "--set", "max_batchsize=3"], "Did you mean 'max_batch_size'?"),
        (["a.wav", "--model", "m", "--dtype", "float33"], "float33"),
        (["a.wav", "--model", "m", "--device", "cpu", "--set", "device=cuda"], "device is given twice"),
        (["a.wav", "b.wav", "--model", "m", "--format", "srt"], "--output-dir"),
        (["a.wav", "--model", "m", "--decode-option", "beam"], "expected KEY=VALUE"),
        (["a.wav", "--model", "m", "--config", "none.yaml"], "No such file"),
        (["--model", "m"], "FILES"),
        (["a.wav", "--model", "m", "--format", "xml"], "xml"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str):
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
