from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from oasr_core.cli import transcriber as module
from oasr_core.cli.display import Display
from oasr_core.cli.formats import OutputFormat, ResultWriter
from oasr_core.cli.transcribe import Mode, app, check_files, plan
from oasr_core.cli.transcriber import Transcriber
from oasr_core.errors import ConfigError, InvalidAudioError, OasrError, RequestRefusedError, UnknownRequestError
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions, RequestOutput, Segment


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


def load(file: str, sample_rate: int) -> SimpleNamespace:
    """For the scripted engine a file's samples are the characters of its name."""
    if file.startswith("missing"):
        raise InvalidAudioError(f"{file}: no such file")
    samples = ["poison"] if file == "poison" else list(file)
    return SimpleNamespace(samples=samples, sample_rate=sample_rate, duration=len(file) / sample_rate)


def transcribe(engine: ScriptedEngine, files: list[str], *, limit=2, feed=0, display: Display | None = None):
    out, err = io.StringIO(), io.StringIO()
    writer = ResultWriter(files, OutputFormat.jsonl, out, err)
    display = display or Display(len(files))
    with patch.object(module, "_load", load):
        Transcriber(engine, files, writer, display, DecodingOptions(), limit=limit, feed_samples=feed).run()
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
        "error: two: out of memory (stage offline_oom) (run with OASR_DEBUG=1 for the traceback)",
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


@pytest.mark.parametrize("feed", [0, 2])
def test_hotwords_that_cannot_be_encoded_are_said_once(feed: int, capsys: pytest.CaptureFixture[str]):
    engine = ScriptedEngine({name: {"unencoded_hotwords": ["日本", "é"]} for name in FILES})
    transcribe(engine, FILES, feed=feed)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the hotword {phrase!r} has no effect: the model's tokenizer cannot encode it"
        for phrase in ("日本", "é")
    ]


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
        seen: list[tuple[int, str, str, float]]

        def partial(self, index: int, file: str, text: str, fed_seconds: float) -> None:
            self.seen.append((index, file, text, fed_seconds))

    display = Recording(1)
    display.seen = []
    transcribe(ScriptedEngine(), ["abcdef"], feed=2, display=display)
    assert display.seen == [(0, "abcdef", "ab", 0.002), (0, "abcdef", "abcd", 0.004)]


def test_partials_of_whole_recordings_say_how_far_they_reach():
    class Recording(Display):
        seen: list[tuple[str, float]]

        def partial(self, index: int, file: str, text: str, seconds: float) -> None:
            self.seen.append((text, seconds))

    class Windowed(ScriptedEngine):
        """Tells of three windows before each final."""

        def step(self) -> list[RequestOutput]:
            (request_id,) = self.open
            told = [
                RequestOutput(request_id, "a", segments=[Segment("a", 0.0, 0.002)]),
                RequestOutput(request_id, "a b", timestamps=[0.0, 0.003]),
                RequestOutput(request_id, "a b c", consumed_seconds=0.004, timestamps=[0.0]),
                RequestOutput(request_id, "a b c"),
            ]
            return [*told, *super().step()]

    display = Recording(1)
    display.seen = []
    transcribe(Windowed(), ["abcdef"], display=display)
    assert display.seen == [("a", 0.002), ("a b", 0.003), ("a b c", 0.004), ("a b c", 0.0)]


# --- plan and checks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "flags", "feed_ms", "partials", "service_mode"),
    [
        (Mode.auto, {}, None, False, "mixed"),
        (Mode.offline, {}, None, False, "offline"),
        (Mode.streaming, {}, None, False, "streaming"),
        (Mode.streaming, {"service_mode": "mixed"}, None, False, "streaming"),
        (Mode.auto, {"chunk_size": 8}, None, False, "streaming"),
        (Mode.auto, {}, 20.0, False, "streaming"),
        (Mode.auto, {}, None, True, "streaming"),
        (Mode.auto, {"service_mode": "streaming"}, None, False, "streaming"),
        (Mode.auto, {"service_mode": "offline"}, None, False, "offline"),
    ],
)
def test_mode(mode: Mode, flags: dict[str, object], feed_ms: float | None, partials: bool, service_mode: str):
    assert plan(None, {"ckpt_dir": "m", **flags}, mode, feed_ms, partials).service_mode == service_mode


@pytest.mark.parametrize(
    ("mode", "flags", "feed_ms", "message"),
    [
        (Mode.offline, {"chunk_size": 8}, None, "have no effect with --mode offline"),
        (Mode.offline, {}, 20.0, "have no effect with --mode offline"),
        (Mode.streaming, {"service_mode": "offline"}, None, r"'offline' \(flag\) does not serve streaming"),
        (Mode.offline, {"service_mode": "streaming"}, None, "does not serve offline"),
        (Mode.auto, {"service_mode": "offline"}, 20.0, "does not serve streaming"),
        (Mode.streaming, {}, 0.0, "positive number"),
        (Mode.streaming, {}, float("nan"), "positive number"),
        (Mode.auto, {"ckpt_dir": ""}, None, "no model is given"),
    ],
)
def test_contradictions_are_refused(mode: Mode, flags: dict[str, object], feed_ms: float | None, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(None, {"ckpt_dir": "m", **flags}, mode, feed_ms, False)


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


# --- through the engine ---------------------------------------------------------------------------------------------


@pytest.fixture
def oasr_transcribe(wenet_digits: Path):
    """Runs ``oasr transcribe`` on the trained digits checkpoint in fp32."""

    def run(*arguments: str | Path, stdin: bytes | None = None):
        fixed = ["--model", str(wenet_digits), "--device", "cpu", "--dtype", "float32"]
        return CliRunner().invoke(app, [*map(str, arguments), *fixed], input=stdin)

    return run


def references(wenet_digits: Path) -> dict[str, str]:
    """File name stem -> what is said in it."""
    lines = (wenet_digits / "test_wavs" / "text").read_text().splitlines()
    return dict(line.split("\t") for line in lines)


def wavs(wenet_digits: Path, *numbers: int) -> list[Path]:
    """Some of the test recordings."""
    return [next((wenet_digits / "test_wavs").glob(f"utt{number:02d}_*.wav")) for number in numbers]


@pytest.mark.parametrize("mode", ["auto", "offline", "streaming"])
def test_text(oasr_transcribe, wenet_digits: Path, mode: str):
    files = wavs(wenet_digits, 3, 0, 2)
    result = oasr_transcribe(*files, "--mode", mode)
    assert result.exit_code == 0, result.stderr
    said = references(wenet_digits)
    assert result.stdout.splitlines() == [f"{file}\t{said[file.stem]}" for file in files]
    assert result.stderr == ""


def test_the_error_of_a_missing_file_names_it_once(oasr_transcribe):
    result = oasr_transcribe("no such.wav")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: no such.wav: cannot be opened: No such file or directory; check the path\n"


@pytest.mark.parametrize("mode", ["offline", "streaming"])
def test_jsonl_and_one_bad_file(oasr_transcribe, wenet_digits: Path, tmp_path: Path, mode: str):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF but not really")
    one, three = wavs(wenet_digits, 1, 3)
    result = oasr_transcribe(one, bad, three, "--mode", mode, "--format", "jsonl", "--word-timestamps")
    assert result.exit_code == 1
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert set(rows[1]) == {"file", "error"}
    assert rows[1]["file"] == str(bad)
    assert f"error: {bad}: " in result.stderr
    for row, file in ((rows[0], one), (rows[2], three)):
        assert list(row) == ["file", "text", "tokens", "score", "words", "segments", "finish_reason", "duration"]
        assert row["file"] == str(file)
        assert row["text"] == references(wenet_digits)[file.stem]
        assert [word["word"] for word in row["words"]] == row["text"].split()
        assert all(0 <= word["start"] <= word["end"] <= row["duration"] for word in row["words"])
        assert (row["finish_reason"], len(row["tokens"]) > 0) == ("stop", True)
        assert row["score"] < 0
        assert [(each["text"], each["words"]) for each in row["segments"]] == [(row["text"], row["words"])]


def test_streaming_gives_the_same_for_any_feed_and_batch(oasr_transcribe, wenet_digits: Path):
    files = wavs(wenet_digits, 7, 1, 9)
    outputs = set()
    for more in ([], ["--feed-ms", "35", "--batch-size", "2"], ["--feed-ms", "1700", "--batch-size", "1"]):
        result = oasr_transcribe(*files, "--mode", "streaming", "--format", "jsonl", *more)
        assert result.exit_code == 0, result.stderr
        outputs.add(re.sub(r'"score": [^,]*', "", result.stdout))
    assert len(outputs) == 1


def test_partials_as_lines(oasr_transcribe, wenet_digits: Path):
    (file,) = wavs(wenet_digits, 16)
    result = oasr_transcribe(file, "--partials", "--feed-ms", "320")
    assert result.exit_code == 0
    texts = [re.sub(r"^ +[0-9.]+ s  ", "", line) for line in result.stderr.splitlines()]
    assert len(texts) >= 3
    assert all(later.startswith(earlier) for earlier, later in pairwise([*texts, result.stdout.rstrip()]))


def test_subtitles(oasr_transcribe, wenet_digits: Path, tmp_path: Path):
    file, other = wavs(wenet_digits, 9, 1)
    result = oasr_transcribe(file, "--format", "srt")
    assert result.exit_code == 0
    cues = [cue.split("\n") for cue in result.stdout.removesuffix("\n\n").split("\n\n")]
    assert [cue[0] for cue in cues] == [str(number) for number in range(1, len(cues) + 1)]
    clock = r"00:00:\d\d,\d{3}"
    assert all(re.fullmatch(f"{clock} --> {clock}", cue[1]) for cue in cues)
    assert " ".join(" ".join(cue[2:]) for cue in cues) == references(wenet_digits)[file.stem]
    result = oasr_transcribe(file, other, "--format", "vtt", "--output-dir", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "out" / f"{other.stem}.vtt").read_text().startswith("WEBVTT\n\n00:00:0")


def test_standard_input(oasr_transcribe, wenet_digits: Path):
    (file,) = wavs(wenet_digits, 2)
    result = oasr_transcribe("-", "--format", "json", stdin=file.read_bytes())
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["file"], document["text"]) == ("-", references(wenet_digits)[file.stem])


def test_no_samples_give_an_empty_final(oasr_transcribe, wenet_digits: Path, tmp_path: Path):
    import soundfile

    soundfile.write(tmp_path / "empty.wav", [], 16000)
    soundfile.write(tmp_path / "click.wav", [0.1] * 20, 16000)
    for mode in ("offline", "streaming"):
        result = oasr_transcribe(tmp_path / "empty.wav", tmp_path / "click.wav", "--mode", mode, "--format", "jsonl")
        assert result.exit_code == 0, result.stderr
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(row["text"], row["finish_reason"]) for row in rows] == [("", "stop"), ("", "stop")]
    result = oasr_transcribe(tmp_path / "empty.wav", "--format", "vtt")
    assert (result.exit_code, result.stdout) == (0, "WEBVTT\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk-size", "0"], "chunk_size"),
        (["--decode-method", "cct"], "Did you mean 'ctc'?"),
        (["--decode-option", "beem=3"], "unknown option 'beem'"),
        (["--decode-option", "beem=3"], "Did you mean 'beam_size'?"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_what_the_engine_refuses_exits_with_2(wenet_digits: Path, arguments: list[str], message: str):
    (file,) = wavs(wenet_digits, 1)
    result = CliRunner().invoke(app, [str(file), "--model", str(wenet_digits), *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_an_option_that_the_strategy_does_not_honour_exits_with_2(
    oasr_transcribe, wenet_digits: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry("decode_strategies").get("ctc"), "honours", frozenset())
    result = oasr_transcribe(*wavs(wenet_digits, 1, 2), "--word-timestamps", "--format", "jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("error:") == 1
    assert "word_timestamps" in result.stderr


def test_a_missing_model_exits_with_2():
    result = CliRunner().invoke(app, ["a.wav", "--model", "no/such/model/anywhere"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no/such/model/anywhere" in result.stderr


def test_a_configuration_file_and_set(wenet_digits: Path, tmp_path: Path):
    (file,) = wavs(wenet_digits, 1)
    settings = tmp_path / "c.yaml"
    settings.write_text(f"ckpt_dir: {wenet_digits}\ndtype: float32\ndevice: cpu\nservice_mode: streaming\n")
    result = CliRunner().invoke(app, [str(file), "--config", str(settings), "--set", "chunk_size=8"])
    assert (result.exit_code, result.stdout) == (0, references(wenet_digits)[file.stem] + "\n"), result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_a_real_terminal_shows_partials_and_the_pipe_gets_the_text(wenet_digits: Path):
    import pty

    (file,) = wavs(wenet_digits, 16)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oasr_core.cli.main", "transcribe", str(file), "--model", str(wenet_digits)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [*command, "--mode", "streaming", "--dtype", "float32", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    screen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(ours, 4096):
            screen += piece
    os.close(ours)
    text, _ = process.communicate()
    assert (process.returncode, text.decode()) == (0, references(wenet_digits)[file.stem] + "\n")
    shown = screen.decode()
    assert "streaming in chunks of 640 ms" in shown
    assert f"{file.name}: " in shown
    assert "0/1 files" in shown
