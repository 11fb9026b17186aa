"""``oasr bench``: the measured loop on a scripted engine and clock, the row, the comparison, and the real model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from oasr_core.cli import load_generator as module
from oasr_core.cli.bench import BenchMetric, BenchMode, app, load_manifest, load_row, plan, print_table, summarise
from oasr_core.cli.load_generator import LoadGenerator, Measured, Run, Utterance
from oasr_core.errors import ConfigError, InvalidAudioError, OasrError, RequestRefusedError
from oasr_core.request import RequestOutput


class ScriptedEngine:
    """A second a step, a tenth a call; a request's samples are the characters of its text. Offline: two a step."""

    sample_rate = 2
    stride_samples = 4

    def __init__(self, script: dict[str, dict[str, object]] | None = None, stable: bool = False) -> None:
        self.now = 0.0
        self.script = script or {}
        self.stable = stable
        self.streams: dict[str, tuple[str, bool]] = {}
        self.queue: dict[str, str] = {}
        self.extra: list[RequestOutput] = []
        self.most = 0
        self.number = 0
        self.refuses = self.forgets = False

    def _add(self) -> str:
        if self.refuses:
            raise RequestRefusedError("word_timestamps is not honoured")
        self.now += 0.1
        self.number += 1
        return f"r{self.number}"

    def add_request(self, samples: str, *, streaming: bool) -> str:
        assert streaming is False
        if samples == "too long":
            raise InvalidAudioError("too long")
        request_id = self._add()
        self.queue[request_id] = samples
        self.most = max(self.most, len(self.queue))
        return request_id

    def add_streaming_request(self) -> str:
        request_id = self._add()
        self.streams[request_id] = ("", False)
        self.most = max(self.most, len(self.streams))
        return request_id

    def feed_chunk(self, request_id: str, piece: str, is_last: bool = False) -> None:
        if "!" in piece:
            raise InvalidAudioError("NaN at sample 0")
        self.now += 0.1
        assert len(piece) <= self.stride_samples
        self.streams[request_id] = (self.streams[request_id][0] + piece, is_last)

    def abort_request(self, request_id: str) -> None:
        del self.streams[request_id]
        self.extra.append(RequestOutput(request_id, finished=True, finish_reason="abort"))

    def _output(self, request_id: str, text: str, finished: bool):
        fields = self.script.get(text, {}) if finished else {}
        facts = {"text": text.strip(), "finished": finished, "finish_reason": "stop" if finished else None}
        stable = {"stable_prefix_chars": max(0, len(text) - 3)} if self.stable else {}
        errors = {"error": None, "error_stage": None}
        return SimpleNamespace(request_id=request_id, **{**errors, **facts, **stable, **fields})

    def step(self) -> list[object]:
        self.now += 1.0
        if self.forgets:
            return []
        outputs, self.extra = list(self.extra), []
        for request_id in list(self.queue)[:2]:
            outputs.append(self._output(request_id, self.queue.pop(request_id), True))
        for request_id, (text, ended) in list(self.streams.items()):
            outputs.append(self._output(request_id, text, ended))
            if ended:
                del self.streams[request_id]
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.streams) and not self.forgets


def measure(
    monkeypatch, engine: ScriptedEngine, texts: list[str], *, streaming: bool = False, in_flight: int = 2
) -> Run:
    """Loading a file takes a hundred seconds, which no measurement may show."""

    def load(path: Path, sample_rate: int) -> SimpleNamespace:
        engine.now += 100.0
        if path.name == "missing":
            raise InvalidAudioError("missing: no such file")
        return SimpleNamespace(samples=path.name, duration=len(path.name) / sample_rate)

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(module.time, "perf_counter", lambda: engine.now)
    loop = LoadGenerator(engine, streaming=streaming, in_flight=in_flight)  # type: ignore[arg-type]
    return loop.run([Utterance(Path(text), text) for text in texts])


# --- the measured loop ----------------------------------------------------------------------------------------------


def test_offline_times_are_the_engines_alone(monkeypatch):
    engine = ScriptedEngine(stable=True)
    run = measure(monkeypatch, engine, ["one", "two", "three"])
    assert [job.text for job in run.measured] == ["one", "two", "three"]
    assert run.wall_seconds == pytest.approx(3 * 0.1 + 2 * 1.0)
    latencies = [job.final - job.ended for job in run.measured]
    assert latencies == pytest.approx([1.2, 1.1, 1.1])
    assert engine.most == 2
    results = summarise(run, BenchMetric.wer, True)
    assert results["latency_ms"]["p50"] == pytest.approx(1100)
    assert results["audio_seconds"] == 5.5
    assert results["rtfx"] == pytest.approx(5.5 / 2.3)
    assert results["first_partial_ms"] is None
    assert results["stable_prefix_lag_s"] is None


def test_streaming_latency_runs_from_the_last_piece_and_the_first_text_from_the_first(monkeypatch):
    engine = ScriptedEngine()
    run = measure(monkeypatch, engine, ["    two four", "one"], streaming=True, in_flight=1)
    long, short = run.measured
    # three pieces of four, the first of them silence: text comes with the second step
    assert long.final - long.ended == pytest.approx(1.1)
    assert long.first_text - long.begun == pytest.approx(2.2)
    assert short.first_text - short.begun == pytest.approx(1.1)
    assert run.wall_seconds == pytest.approx(2 * 0.1 + 4 * 1.1)
    results = summarise(run, BenchMetric.wer, True)
    assert results["first_partial_ms"] == pytest.approx({"p50": 1650, "p90": 2090, "p99": 2189})
    assert results["latency_ms"]["p99"] == pytest.approx(1100)


def test_streams_run_side_by_side(monkeypatch):
    engine = ScriptedEngine()
    run = measure(monkeypatch, engine, ["one two three"] * 5, streaming=True, in_flight=3)
    assert engine.most == 3
    assert all(job.text == "one two three" for job in run.measured)


def test_lag_of_the_stable_prefix(monkeypatch):
    run = measure(monkeypatch, ScriptedEngine(stable=True), ["abcdefghij"], streaming=True)
    # outputs: 4 characters (1 stable) after 2 s of audio, 8 (5) after 4 s, the final after 5 s
    assert run.measured[0].stable_prefix_lags() == [0, 2, 2, 2, 0, 1, 1, 1, 0, 0]
    assert summarise(run, BenchMetric.wer, True)["stable_prefix_lag_s"] == pytest.approx(
        {"p50": 1.0, "p90": 2.0, "p99": 2.0}
    )


def test_lag_of_a_text_that_was_revised():
    job = Measured(Utterance(Path("a"), ""), shown=[(1.0, 3, 0), (2.0, 5, 1), (3.0, 2, 1), (4.0, 4, 4)])
    assert job.stable_prefix_lags() == [1.0, 3.0, 3.0, 2.0]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_failed_utterance_counts_as_empty(monkeypatch, streaming: bool):
    broken = {"text": "", "finish_reason": "error", "error": "out of memory", "error_stage": "offline_oom"}
    engine = ScriptedEngine({"two three": broken})
    run = measure(monkeypatch, engine, ["one", "missing", "two three", "four"], streaming=streaming)
    assert [job.error for job in run.measured] == [
        None,
        "missing: no such file",
        "out of memory (stage offline_oom)",
        None,
    ]
    results = summarise(run, BenchMetric.wer, True)
    assert (results["failed"], results["deletions"], results["reference_units"]) == (2, 3, 5)
    assert results["audio_seconds"] == 3.5


def test_refused_audio_is_that_utterances_own(monkeypatch):
    run = measure(monkeypatch, ScriptedEngine(), ["one", "tw!o", "too long", "six"], streaming=True)
    assert [job.error for job in run.measured] == [None, "NaN at sample 0", None, None]
    run = measure(monkeypatch, ScriptedEngine(), ["one", "too long"])
    assert [job.error for job in run.measured] == [None, "too long"]


def test_a_refused_request_ends_the_run(monkeypatch):
    engine = ScriptedEngine()
    engine.refuses = True
    with pytest.raises(RequestRefusedError):
        measure(monkeypatch, engine, ["one"])


def test_an_engine_that_loses_a_request_is_noticed(monkeypatch):
    engine = ScriptedEngine()
    engine.forgets = True
    with pytest.raises(OasrError, match="1 utterances have no final output"):
        measure(monkeypatch, engine, ["one"])


def test_progress_is_drawn_on_a_terminal(monkeypatch):
    monkeypatch.setattr(module, "load", lambda path, rate: SimpleNamespace(samples=path.name, duration=1.0))
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=60)
    loop = LoadGenerator(ScriptedEngine(), streaming=False, in_flight=2, console=console)  # type: ignore[arg-type]
    loop.run([Utterance(Path("one"), "one")] * 3)
    assert "measuring" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


# --- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "normalise", "counts"),
    [
        (BenchMetric.wer, True, (0, 0, 0, 2)),
        (BenchMetric.wer, False, (2, 0, 0, 2)),
        (BenchMetric.cer, True, (0, 0, 0, 10)),
        (BenchMetric.cer, False, (2, 2, 0, 12)),
    ],
)
def test_texts_are_normalised_or_not(metric, normalise, counts):
    job = Measured(Utterance(Path("a"), "Hello, World!"), final=1.0, text="hello world")
    results = summarise(Run([job], 1.0, False), metric, normalise)
    names = ("substitutions", "deletions", "insertions", "reference_units")
    assert tuple(results[name] for name in names) == counts
    assert results["error_rate_percent"] == pytest.approx(100 * sum(counts[:3]) / counts[3])
    assert results["error_rate_ci95_percent"] == pytest.approx([results["error_rate_percent"]] * 2)


def test_references_without_words_have_no_rate():
    results = summarise(Run([Measured(Utterance(Path("a"), "..."), final=1.0)], 1.0, False), BenchMetric.wer, True)
    assert results["error_rate_percent"] is None
    assert results["error_rate_ci95_percent"] is None


# --- manifest, settings, comparison ---------------------------------------------------------------------------------


def manifest_of(folder: Path, *lines: str) -> Path:
    (folder / "audio").mkdir(exist_ok=True)
    (folder / "audio" / "a.wav").touch()
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


GOOD = '{"audio": "audio/a.wav", "text": "one", "lang": "en"}'


def test_manifest(tmp_path: Path):
    path = manifest_of(tmp_path, GOOD, "", GOOD.replace("one", "zwölf"), GOOD)
    utterances = load_manifest(path)
    assert [utterance.text for utterance in utterances] == ["one", "zwölf", "one"]
    assert utterances[0].audio == tmp_path / "audio" / "a.wav"
    assert len(load_manifest(path, 2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"file": "audio/a.wav", "text": "one"}', "line 2: expected a string under the key 'audio', got None"),
        ('{"audio": "audio/a.wav", "text": 1}', "line 2: expected a string under the key 'text', got 1"),
        ('{"audio": "audio/b.wav", "text": "one"}', "line 2: no audio file"),
    ],
)
def test_bad_manifests_are_refused_by_line(tmp_path: Path, line: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_manifest(manifest_of(tmp_path, GOOD, line))


def test_empty_and_missing_manifests_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no utterances"):
        load_manifest(manifest_of(tmp_path, "", ""))
    with pytest.raises(ConfigError, match="cannot read it: No such file"):
        load_manifest(tmp_path / "none.jsonl")


def test_the_mode_is_pinned():
    assert plan(None, {"ckpt_dir": "m"}, BenchMode.streaming).service_mode == "streaming"
    assert plan(None, {"ckpt_dir": "m", "service_mode": "offline"}, BenchMode.offline).service_mode == "offline"
    with pytest.raises(ConfigError, match="does not serve --mode streaming"):
        plan(None, {"ckpt_dir": "m", "service_mode": "offline"}, BenchMode.streaming)
    with pytest.raises(ConfigError, match="no model is given"):
        plan(None, {}, BenchMode.offline)


def test_comparison_side_by_side():
    mine = {
        "conditions": {"dtype": "float32", "batch_size": 8, "versions": {"torch": "2"}},
        "results": {"rtfx": 50.0, "latency_ms": {"p50": 3.0}, "error_rate_ci95_percent": [1.0, 2.5], "failed": 0},
    }
    other = {
        "conditions": {"dtype": "bfloat16", "batch_size": 8, "versions": {"torch": "2"}, "old": True},
        "results": {"rtfx": 25.0, "latency_ms": None, "failed": 0},
    }
    text = io.StringIO()
    print_table(Console(file=text, width=100), mine, other, "before.json")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines()]
    assert ["rtfx", "50.00", "25.00", "2.000"] in rows
    assert ["latency_ms p50", "3.00", "-", "-"] in rows
    assert ["error_rate_ci95_percent", "1.00 to 2.50", "-", "-"] in rows
    assert ["failed", "0", "0", "-"] in rows
    assert ["dtype", "float32", "bfloat16", ""] in rows
    assert ["old", "-", "True", ""] in rows
    assert "batch_size" not in text.getvalue()
    assert "before.json" in text.getvalue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "expected a JSON object"),
        ("{}", "expected a row of oasr bench"),
        ('{"conditions": {"metric": "cer"}, "results": {}}', "its metric is 'cer'"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "row.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_row(tmp_path / "row.json", "wer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is given"),
        (["--model", "m", "--set", "max_batchsize=3"], "Did you mean 'max_batch_size'?"),
        (["--model", "m", "--decode-option", "beam"], "expected KEY=VALUE"),
        (["--model", "m", "--metric", "per"], "per"),
        (["--model", "m", "--limit", "0"], "--limit"),
        (["--model", "m", "--output", "no-such-directory/row.json"], "--output"),
        (["--model", "m", "--compare", "no-such-row.json"], "cannot read it"),
    ],
)
def test_usage_errors_exit_with_2(tmp_path: Path, arguments: list[str], message: str):
    result = CliRunner().invoke(app, [str(manifest_of(tmp_path, GOOD)), *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


# --- the trained model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_manifest(wenet_digits: Path, tmp_path_factory) -> Path:
    """The twenty recordings, in a manifest that disagrees with the transcripts in case and punctuation."""
    lines = (wenet_digits / "test_wavs" / "text").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    path = tmp_path_factory.mktemp("bench") / "digits.jsonl"
    wavs = wenet_digits / "test_wavs"
    rows = [{"audio": str(wavs / f"{name}.wav"), "text": text.capitalize() + "."} for name, text in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def bench(manifest: Path, model: Path, *arguments: str):
    common = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--batch-size", "8"]
    return CliRunner().invoke(app, [str(manifest), *common, *arguments])


def test_offline_error_rate_equals_wenets(digits_manifest: Path, wenet_digits: Path):
    result = bench(digits_manifest, wenet_digits)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    row = json.loads(result.stdout)
    results, conditions = row["results"], row["conditions"]
    assert results["error_rate_percent"] == pytest.approx(0.93, abs=0.005)
    assert (results["substitutions"], results["deletions"], results["insertions"]) == (1, 0, 0)
    assert (results["reference_units"], results["utterances"], results["failed"]) == (108, 20, 0)
    low, high = results["error_rate_ci95_percent"]
    assert low == 0.0
    assert 0.93 < high < 5.0
    assert results["audio_seconds"] == pytest.approx(76.48, abs=0.01)
    assert results["rtfx"] == pytest.approx(results["audio_seconds"] / results["wall_seconds"], rel=1e-2)
    assert 0 < results["latency_ms"]["p50"] <= results["latency_ms"]["p90"] <= results["latency_ms"]["p99"]
    assert results["peak_rss_mib"] > 50
    assert results["first_partial_ms"] is None
    wanted = {"mode": "offline", "device": "cpu", "dtype": "float32", "batch_size": 8, "in_flight": 8, "metric": "wer"}
    assert {key: conditions[key] for key in wanted} == wanted
    assert conditions["threads"] >= 1
    assert {"python", "torch", "numpy", "oasr-core", "oasr-conformer", "oasr-ctc"} <= set(conditions["versions"])
    assert "error_rate_percent" in result.stderr
    assert "0.93" in result.stderr


def test_streaming_error_rate_equals_wenets_and_rows_compare(digits_manifest: Path, wenet_digits: Path, tmp_path: Path):
    first = tmp_path / "short.json"
    assert bench(digits_manifest, wenet_digits, "--limit", "2", "--output", str(first), "--warmup", "0").stdout == ""
    assert json.loads(first.read_text(encoding="utf-8"))["results"]["utterances"] == 2
    streams = ["--mode", "streaming", "--set", "chunk_size=16", "--set", "num_left_chunks=-1", "--in-flight", "4"]
    result = bench(digits_manifest, wenet_digits, *streams, "--compare", str(first))
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)
    assert row["results"]["error_rate_percent"] == pytest.approx(1.85, abs=0.005)
    assert row["results"]["first_partial_ms"]["p50"] > 0
    assert (row["conditions"]["chunk_ms"], row["conditions"]["in_flight"]) == (640, 4)
    assert "short.json" in result.stderr
    assert "10.000" in result.stderr  # ten times the utterances


def test_an_undecodable_file_exits_with_1(wenet_digits: Path, tmp_path: Path):
    (tmp_path / "noise.wav").write_bytes(b"not audio")
    wav = wenet_digits / "test_wavs" / "utt00_1d.wav"
    rows = [{"audio": str(wav), "text": "three"}, {"audio": "noise.wav", "text": "one two"}]
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    result = bench(manifest, wenet_digits)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["results"]["deletions"] == 2
    assert "noise.wav" in result.stderr
