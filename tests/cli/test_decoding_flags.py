"""Flags of ``oasr transcribe`` that ask something of the decoder, or cut long recordings: what reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from oasr_core.cli import transcribe as command
from oasr_core.cli.formats import OutputFormat
from oasr_core.cli.long_form import LongForm, long_form_flags
from oasr_core.cli.options import engine_flags
from oasr_core.cli.request_options import requested, with_times
from oasr_core.cli.transcribe import Mode, app, plan
from oasr_core.config import EngineConfig
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.request import DecodingOptions, RequestOutput, Segment

EVERYTHING = ("segment_timestamps", "word_timestamps", "language", "task", "prompt", "temperature", "max_new_tokens")


class RecordingEngine:
    """Notes what it is asked for, and answers each request with two segments."""

    sample_rate = 16000
    can_offline = True
    has_work = True
    honours: tuple[str, ...] = EVERYTHING

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.asked: list[DecodingOptions] = []
        self.waiting: list[str] = []

    def __enter__(self) -> RecordingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        names = ("model", "architecture", "decode_method", "device", "dtype")
        return {**dict.fromkeys(names, "x"), "honours": self.honours}

    def add_request(self, samples: object, *, streaming: bool, decoding: DecodingOptions) -> str:
        self.asked.append(decoding)
        self.waiting.append(f"r{len(self.asked)}")
        return self.waiting[-1]

    def step(self) -> list[RequestOutput]:
        segments = [Segment("One.", 0.0, 1.0), Segment("Two.", 1.0, 2.5)]
        done = {"finished": True, "finish_reason": "stop", "language": "de"}
        outputs = [RequestOutput(each, "One. Two.", segments=segments, **done) for each in self.waiting]
        self.waiting = []
        return outputs


@pytest.fixture
def run(wenet_digits: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs ``oasr transcribe`` on a recording through a :class:`RecordingEngine`."""
    (file,) = (wenet_digits / "test_wavs").glob("utt02_*.wav")

    def run(*arguments: str, honours: tuple[str, ...] = EVERYTHING) -> Any:
        made = SimpleNamespace(engine=None)

        def start(config: EngineConfig) -> RecordingEngine:
            made.engine = RecordingEngine(config)
            made.engine.honours = honours
            return made.engine

        monkeypatch.setattr(command, "start_engine", start)
        result = CliRunner().invoke(app, [str(file), "--model", "m", *arguments])
        return SimpleNamespace(
            code=result.exit_code,
            out=result.stdout,
            err=result.stderr,
            config=made.engine.config,
            asked=made.engine.asked,
        )

    return run


# --- what is asked of the decoder -----------------------------------------------------------------------------------


def test_what_is_not_given_is_not_asked_for(run):
    done = run(honours=())
    assert (done.code, done.out) == (0, "One. Two.\n")
    assert done.asked == [DecodingOptions()]
    assert done.config.decode_options == {}
    assert done.config.silence_gate == "auto"


def test_each_flag_reaches_the_request(run):
    flags = ["--language", "de", "--task", "translate", "--initial-prompt", "Names: Ada.", "--temperature", "0.5"]
    done = run(*flags, "--max-new-tokens", "7", "--beam-size", "3", "--decode-option", "length_penalty=0.5")
    assert done.code == 0
    assert done.asked == [
        DecodingOptions(
            language="de",
            task="translate",
            prompt="Names: Ada.",
            temperature=0.5,
            max_new_tokens=7,
            segment_timestamps=True,
            word_timestamps=False,
        )
    ]
    assert done.config.decode_options == {"beam_size": 3, "length_penalty": 0.5}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (
            ["--beam-size", "2", "--decode-option", "beam_size=3"],
            "beam_size is given twice: 3 by --decode-option and 2",
        ),
        (["--segmenter", "vad", "--set", "segmenter=quiet"], "segmenter is given twice"),
        (["--long-form", "off", "--set", "long_form=true"], "long_form is given twice"),
        (["--long-form", "sideways"], "sideways"),
    ],
)
def test_bad_values_are_refused_before_the_model_is_loaded(flags: list[str], message: str):
    result = CliRunner().invoke(app, ["a.wav", "--model", "no/such/model", *flags])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "no/such/model" not in result.stderr


def test_an_empty_request_is_the_default():
    assert requested(language=None, temperature=None).model_fields_set == set()
    with pytest.raises(RequestRefusedError, match="temperature"):
        requested(temperature=-0.5)


@pytest.mark.parametrize(
    ("output_format", "honours", "words", "times"),
    [
        (OutputFormat.text, EVERYTHING, False, (True, False)),
        (OutputFormat.jsonl, EVERYTHING, True, (True, True)),
        (OutputFormat.srt, EVERYTHING, False, (True, False)),
        (OutputFormat.vtt, EVERYTHING, True, (True, True)),
        (OutputFormat.text, ("word_timestamps",), False, (False, False)),
        (OutputFormat.json, ("word_timestamps",), True, (False, True)),
        (OutputFormat.srt, ("word_timestamps",), False, (False, True)),
        (OutputFormat.vtt, (), False, (False, True)),
    ],
)
def test_times(output_format: OutputFormat, honours: tuple[str, ...], words: bool, times: tuple[bool, bool]):
    asked = with_times(DecodingOptions(word_timestamps=words), output_format, honours)
    assert (asked.segment_timestamps, asked.word_timestamps) == times


def test_subtitles_are_the_models_segments(run):
    assert run("--format", "srt").out == (
        "1\n00:00:00,000 --> 00:00:01,000\nOne.\n\n2\n00:00:01,000 --> 00:00:02,500\nTwo.\n\n"
    )


def test_json_has_segments_and_language(run):
    row = json.loads(run("--format", "jsonl").out)
    assert [(each["text"], each["start"], each["end"]) for each in row["segments"]] == [
        ("One.", 0.0, 1.0),
        ("Two.", 1.0, 2.5),
    ]
    assert row["language"] == "de"
    assert "no_speech_prob" not in row


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--language", "en"], "language='en'"),
        (["--task", "translate"], "task='translate'"),
        (["--initial-prompt", "x"], "prompt='x'"),
        (["--temperature", "0.5"], "temperature=0.5"),
        (["--max-new-tokens", "5"], "max_new_tokens=5"),
        (["--long-form", "sequential"], "long_form_mode='sequential'"),
        (["--beam-size", "0"], "beam_size"),
        (["--decode-method", "ctc", "--decode-option", "search=greedy", "--beam-size", "5"], "beam"),
        (["--segmenter", "sharp"], "No segmenter named 'sharp'"),
        (["--silence-gate", "sharp"], "silence_gate='sharp' is not known"),
    ],
)
def test_what_a_decode_family_cannot_do_exits_with_2(wenet_digits: Path, flags: list[str], name: str):
    (file,) = (wenet_digits / "test_wavs").glob("utt02_*.wav")
    result = CliRunner().invoke(app, [str(file), "--model", str(wenet_digits), "--dtype", "float32", *flags])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("error:") == 1
    assert name in result.stderr


# --- long recordings ------------------------------------------------------------------------------------------------


def planned(file: Path | None = None, mode: Mode = Mode.auto, **flags: Any) -> tuple[bool, str]:
    """``long_form`` and ``long_form_mode`` of a call with these fields set by flags."""
    config = plan(file, engine_flags(model="m", **flags), mode, None, False)
    return config.long_form, config.long_form_mode


@pytest.mark.parametrize(
    ("wanted", "segmenter", "expected"),
    [
        (None, None, (True, "auto")),
        (None, "vad", (True, "parallel")),
        (LongForm.auto, None, (True, "auto")),
        (LongForm.auto, "vad", (True, "parallel")),
        (LongForm.parallel, None, (True, "parallel")),
        (LongForm.sequential, None, (True, "sequential")),
    ],
)
def test_long_form(wanted: LongForm | None, segmenter: str | None, expected: tuple[bool, str]):
    assert planned(segmenter=segmenter, **long_form_flags(wanted)) == expected


def test_long_form_off():
    assert planned(**long_form_flags(LongForm.off))[0] is False


def test_a_file_and_set_rank_before_the_default(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("long_form: false\n")
    assert planned(file)[0] is False
    assert planned(file, **long_form_flags(LongForm.parallel)) == (True, "parallel")
    file.write_text("long_form_mode: parallel\nsegmenter: quiet\n")
    assert planned(file) == (True, "parallel")
    assert planned(settings=["long_form_mode=sequential"]) == (True, "sequential")


@pytest.mark.parametrize("wanted", [LongForm.off, LongForm.sequential])
def test_a_segmenter_without_anything_to_cut_is_refused(wanted: LongForm, tmp_path: Path):
    flags = long_form_flags(wanted)
    with pytest.raises(ConfigError, match="segmenter 'vad' would have nothing to do"):
        planned(segmenter="vad", **flags)
    assert planned(segmenter="vad", silence_gate="vad", **flags)[0] is flags["long_form"]
    file = tmp_path / "c.yaml"
    file.write_text("segmenter: vad\n")  # settings for several purposes
    assert planned(file, **flags)[0] is flags["long_form"]


def test_streams_refuse_what_acts_on_whole_recordings():
    for flags in ({"long_form": True}, {"silence_gate": "off"}, {"long_form": True, "silence_gate": "vad"}):
        names = " and ".join(f"--{name.replace('_', '-')}" for name in flags)
        with pytest.raises(ConfigError, match=f"^{names}: no effect on streams"):
            planned(mode=Mode.streaming, **flags)
    assert planned(mode=Mode.streaming) == (True, "auto")


def test_help_is_grouped():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100", "TERM": "dumb"}).stdout
    for panel in ("Output", "Decoding", "Long recordings and silence", "Streaming", "Engine"):
        assert f" {panel} " in shown


# --- Whisper --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whisper_transcribes_english_speech(tiny_en: Path, repo_root: Path, tmp_path: Path):
    import soundfile

    from oasr_core.audio import load_audio

    clip = repo_root / "plugins" / "oasr-whisper" / "tests" / "data" / "jfk.mp3"
    samples = load_audio(clip, sample_rate=16000).samples
    soundfile.write(tmp_path / "silence.wav", 0 * samples, 16000)
    common = ["--model", str(tiny_en), "--device", "cpu", "--dtype", "float32", "--language", "en"]

    result = CliRunner().invoke(app, [str(clip), str(tmp_path / "silence.wav"), *common, "--format", "jsonl"])
    assert (result.exit_code, result.stderr) == (0, "")
    spoken, silent = map(json.loads, result.stdout.splitlines())
    said = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
    assert "".join(char for char in spoken["text"].lower() if char.isalpha() or char == " ") == said
    assert len(spoken["segments"]) > 1
    assert all(0 <= each["start"] < each["end"] <= spoken["duration"] for each in spoken["segments"])
    assert (spoken["language"], silent["text"]) == ("en", "")

    result = CliRunner().invoke(app, [str(clip), *common, "--format", "srt", "--word-timestamps"])
    assert result.exit_code == 0
    cues = [cue.split("\n") for cue in result.stdout.removesuffix("\n\n").split("\n\n")]
    assert " ".join(" ".join(cue[2:]) for cue in cues) == spoken["text"]


@pytest.mark.slow
def test_whisper_takes_a_recording_longer_than_its_window(tiny_en: Path, shared_fixtures: Path):
    clip = shared_fixtures / "audio" / "long_42s.ogg"
    common = ["--model", str(tiny_en), "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(app, [str(clip), *common, "--format", "jsonl"])
    assert (result.exit_code, result.stderr) == (0, "")
    row = json.loads(result.stdout)
    assert row["text"].startswith("If the reader will excuse me")
    assert row["text"].endswith("hurt the small dog.")
    times = [time for each in row["segments"] for time in (each["start"], each["end"])]
    assert times == sorted(times)
    assert 40 < times[-1] <= row["duration"]
    result = CliRunner().invoke(app, [str(clip), *common, "--long-form", "off"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the model's window is 30.00 s" in result.stderr
