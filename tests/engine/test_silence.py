"""What keeps silence from the decoder, and whose silence ends the segments of a stream."""

from __future__ import annotations

import pytest
import torch
from pydantic import BaseModel

from oasr_core import construction
from oasr_core.audio import load_audio
from oasr_core.errors import ConfigError, PluginError, RequestRefusedError
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions
from oasr_core.segmenters.base import Segmenter, SpeechSpan, SpeechStream
from oasr_core.segmenters.gate import SegmenterGate, SilenceGate
from oasr_core.testing.autoregressive import word_audio, words
from oasr_core.testing.markers import marker_audio, spell

RATE = 16000


class ScriptedOptions(BaseModel):
    """``quiet``: the token whose samples this segmenter takes for silence."""

    model_config = {"extra": "forbid"}

    quiet: int = 15


class ScriptedStream(SpeechStream):
    """Silence is what the token ``quiet`` spells; a sample of -1 cannot be listened to."""

    def __init__(self, quiet):
        self.quiet = quiet
        self.silent = 0

    def push(self, samples):
        if (samples == -1.0).any():
            raise RuntimeError("deaf")
        speech = (samples != self.quiet / 64).nonzero()
        self.silent = len(samples) - 1 - int(speech[-1]) if len(speech) else self.silent + len(samples)

    @property
    def trailing_silence_seconds(self):
        return self.silent / RATE


class Scripted(Segmenter):
    """Speech everywhere but in audio that begins with 0.5; audio that begins with -0.5 cannot be looked at."""

    oasr_api = "1.0"
    options_cls = ScriptedOptions
    offers_streams = True

    def speech(self, waveform):
        if waveform[0] == -0.5:
            raise RuntimeError("blind")
        return [] if waveform[0] == 0.5 else [SpeechSpan(0, len(waveform))]

    def open_stream(self):
        if self.options.quiet == 0:
            raise RuntimeError("no stream")
        return ScriptedStream(self.options.quiet)


class Offline(Scripted):
    """Follows no stream."""

    oasr_api = "1.0"
    offers_streams = False


@pytest.fixture(autouse=True)
def _segmenters():
    with registry("segmenters").override("scripted", Scripted), registry("segmenters").override("offline", Offline):
        yield


def sounds():
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(2 * RATE) / RATE
    return {
        "zeros": torch.zeros(2 * RATE),
        "constant": torch.full((2 * RATE,), 0.1),
        "noise": 0.1 * torch.randn(2 * RATE, generator=generator),
        "tone": 0.3 * torch.sin(2 * torch.pi * 440 * time),
        "hum": 0.2 * torch.sin(2 * torch.pi * 50 * time) + 0.1 * torch.sin(2 * torch.pi * 150 * time),
    }


@pytest.fixture(scope="module")
def speech(wenet_digits):
    return torch.from_numpy(load_audio(wenet_digits / "test_wavs" / "utt09_4d.wav").samples)[: 2 * RATE]


def counting(engine, monkeypatch):
    """The number of rows of each offline forward."""
    rows = []
    original = engine._parts.runner.forward_offline

    def forward(features, lengths, **kwargs):
        rows.append(len(lengths))
        return original(features, lengths, **kwargs)

    monkeypatch.setattr(engine._parts.runner, "forward_offline", forward)
    return rows


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sound", sounds())
@pytest.mark.parametrize("gate", ["auto", "signal"])
def test_a_family_that_invents_text_says_nothing_about_silence(
    make_toy, assert_returned, monkeypatch, speech, sound, gate
):
    engine = make_toy(decode_method="toy_attention", silence_gate=gate)
    rows = counting(engine, monkeypatch)
    silent, spoken = engine.transcribe_outputs([sounds()[sound], speech])
    assert (silent.text, silent.tokens, silent.segments, silent.finish_reason) == ("", [[]], [], "stop")
    assert spoken.text
    assert rows == [1]
    (invented,) = make_toy(decode_method="toy_attention", silence_gate="off").transcribe_outputs([sounds()[sound]])
    assert invented.text
    assert_returned(engine)


def test_auto_leaves_families_alone_that_invent_nothing(make_toy, make_engine, monkeypatch):
    for engine in (make_toy(), make_engine()):
        rows = counting(engine, monkeypatch)
        engine.transcribe(torch.zeros(RATE), streaming=False)
        assert rows == [1]


def test_the_gate_of_a_family_that_decodes_at_once(make_engine, monkeypatch, speech):
    engine = make_engine(silence_gate="signal")
    rows = counting(engine, monkeypatch)
    outputs = engine.transcribe_outputs([torch.zeros(RATE), speech, torch.zeros(RATE)], streaming=False)
    assert [output.text for output in outputs[::2]] == ["", ""]
    assert [output.finish_reason for output in outputs] == ["stop"] * 3
    assert rows == [1]


@pytest.mark.parametrize("family", ["toy", "marker"])
def test_a_segmenter_as_gate(make_toy, make_engine, monkeypatch, family):
    """Silent is what it finds no speech in; where it raises, that request fails and no other."""
    engine = (make_toy if family == "toy" else make_engine)(silence_gate="scripted")
    rows = counting(engine, monkeypatch)
    good = word_audio([5, 6]) if family == "toy" else marker_audio([5, 6])
    text = words([5, 6]) if family == "toy" else spell([5, 6])
    silent, blind = good.clone(), good.clone()
    silent[0], blind[0] = 0.5, -0.5
    outputs = engine.transcribe_outputs([silent, blind, good], streaming=False)
    assert [output.text for output in outputs] == ["", "", text]
    assert [output.error_stage for output in outputs] == [None, "offline_forward", None]
    assert "blind" in outputs[1].error
    assert rows == [1]


def test_the_gate_is_the_configured_segmenter_where_names_agree(make_toy):
    named = make_toy(silence_gate="scripted", segmenter="scripted", segmenter_options={"quiet": 3})
    gate = named._parts.incremental._intake._gate
    assert isinstance(gate, SegmenterGate)
    assert gate.segmenter is named._parts.segmenter
    other = make_toy(silence_gate="scripted", segmenter="quiet", long_form=True)._parts.incremental._intake._gate
    assert isinstance(other.segmenter, Scripted)
    assert type(make_toy(silence_gate="signal")._parts.incremental._intake._gate) is SilenceGate


def test_the_gate_looks_at_every_window_of_long_audio(make_toy, monkeypatch, speech):
    engine = make_toy(
        "window",
        decode_method="toy_attention",
        long_form=True,
        segmenter="quiet",
        max_batch_size=8,
        silence_gate="auto",
    )
    rows = counting(engine, monkeypatch)
    audio = torch.cat([torch.zeros(3 * RATE), speech[:RATE], torch.zeros(3 * RATE)])
    (output,) = engine.transcribe_outputs([audio])
    assert output.finish_reason == "stop"
    assert output.text
    assert 1 <= sum(rows) <= 2


# -- endpoints ---------------------------------------------------------------------------------------------------------


LISTENING = {"segmenter": "scripted", "endpoint_silence": "segmenter", "endpointing": True}
#: Thirty-five frames are 1.4 s, more than the 1.2 s that end a segment.
PAUSE = 35


def stream(engine, audio, piece=2560, decoding=None, request_id=None):
    request_id = engine.add_streaming_request(decoding=decoding, request_id=request_id)
    outputs = []
    for start in range(0, len(audio), piece):
        engine.feed_chunk(request_id, audio[start : start + piece], is_last=start + piece >= len(audio))
        outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    return outputs


def commits(outputs):
    return [output.segments[0].text for output in outputs if output.is_segment_final and not output.finished]


@pytest.mark.parametrize("piece", [640, 2560, 10**6])
@pytest.mark.parametrize(("reset", "text"), [("none", "abcode"), ("decoder", "abcoode")])
def test_endpoints_follow_the_segmenter(make_engine, piece, reset, text):
    """What the decoder takes for silence (0) ends nothing; what the segmenter takes for it (15, a word) does.

    A decoder that is begun anew inside of that word says it again.
    """
    engine = make_engine(**LISTENING, endpoint_reset=reset)
    tokens = [1, 2, *[0] * 2 * PAUSE, 3, *[15] * PAUSE, 4, 5]
    outputs = stream(engine, marker_audio(tokens), piece)
    assert commits(outputs) == ["abco"]
    assert outputs[-1].text == text
    assert [segment.text for segment in outputs[-1].segments] == ["abco", text[4:]]
    by_decoder = make_engine(endpointing=True)
    assert commits(stream(by_decoder, marker_audio(tokens), piece)) == ["ab"]


def test_a_stream_without_endpoints_is_not_listened_to(make_engine, monkeypatch):
    engine = make_engine(**LISTENING | {"endpointing": False})
    opened = []
    original = engine._parts.segmenter.open_stream
    monkeypatch.setattr(engine._parts.segmenter, "open_stream", lambda: opened.append(1) or original())
    tokens = [1, 2, *[15] * PAUSE, 3]
    assert commits(stream(engine, marker_audio(tokens))) == []
    assert opened == []
    assert commits(stream(engine, marker_audio(tokens), decoding=DecodingOptions(endpointing=True))) == ["abo"]
    assert opened == [1]


def assert_idle(engine):
    store = engine._parts.runner.backend.store
    assert (store.num_streams, store.free_blocks) == (0, store.attention.config.num_blocks)
    assert not engine.has_work
    assert engine._parts.streaming._live == {}


def test_a_segmenter_that_raises_fails_its_stream(make_engine):
    engine = make_engine(**LISTENING)
    audio = marker_audio([1, 2, 3, 4, 5, 6, 7, 8])
    bad = audio.clone()
    bad[4000] = -1.0
    engine.add_request(audio, streaming=True, request_id="good")
    engine.add_request(bad, streaming=True, request_id="bad")
    outputs = {output.request_id: output for output in engine.run()}
    assert (outputs["bad"].finish_reason, outputs["bad"].error_stage) == ("error", "streaming_features")
    assert "deaf" in outputs["bad"].error
    assert outputs["good"].text == "abcdefgh"
    assert_idle(engine)


def test_a_segmenter_that_opens_no_stream_leaves_no_state(make_engine):
    engine = make_engine(**LISTENING, segmenter_options={"quiet": 0})
    for _ in range(engine.config.max_batch_size + 2):
        (output,) = engine.transcribe_outputs([marker_audio([1, 2])], streaming=True)
        assert (output.finish_reason, output.error_stage) == ("error", "streaming_forward")
        assert "no stream" in output.error
    assert_idle(engine)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"silence_gate": "scriptd"}, ConfigError, "Did you mean 'scripted'"),
        ({"segmenter": "quiet"}, ConfigError, "nothing to do"),
        ({"long_form": True, "condition_on_previous_text": False}, ConfigError, "sequential"),
        ({"long_form_overlap_seconds": 2.0}, ConfigError, "parallel"),
        ({"long_form_mode": "sequential"}, ConfigError, "long_form=True"),
        ({"segmenter": "scriptd"}, PluginError, "scripted"),
        ({"segmenter_options": {"quiet": 1}}, ConfigError, "without a segmenter"),
        ({"segmenter": "scripted", "segmenter_options": {"loud": 1}}, ConfigError, "loud"),
        ({"endpoint_silence": "segmenter"}, ConfigError, "needs a segmenter"),
        ({"endpoint_silence": "segmenter", "segmenter": "offline"}, ConfigError, "does not follow streams"),
        ({"endpoint_silence": "segmenters"}, ConfigError, "endpoint_silence"),
        ({"long_form": True, "segmenter": "quiet", "long_form_overlap_seconds": 2.0}, ConfigError, "'overlap'"),
        ({"long_form": True, "long_form_mode": "sequential"}, ConfigError, "'parallel'"),
        ({"long_form_mode": "serial"}, ConfigError, "long_form_mode"),
    ],
)
def test_refusals(make_engine, settings, error, message):
    with pytest.raises(error, match=message):
        make_engine(**settings)


def test_auto_mode_follows_the_family(make_toy):
    scripted = make_toy("window", long_form=True, long_form_mode="auto")
    assert scripted.config.long_form_mode == "sequential"
    random = make_toy("window", long_form=True, long_form_mode="auto", decode_method="toy_attention")
    assert random.config.long_form_mode == "parallel"
    with pytest.raises(ConfigError, match="does not write"):
        make_toy("window", long_form=True, long_form_mode="sequential", decode_method="toy_attention")
    with pytest.raises(RequestRefusedError, match="segment_timestamps"):
        random.add_request(torch.zeros(RATE), decoding=DecodingOptions(segment_timestamps=True))


def test_settings_are_refused_before_weights_are_read(make_engine, monkeypatch):
    monkeypatch.setattr(construction, "load_model", lambda bundle: pytest.fail("the weights were read"))
    for settings in ({"silence_gate": "loud"}, {"segmenter": "quiet"}, {"segmenter_options": {"quiet": 1}}):
        with pytest.raises(ConfigError):
            make_engine(**settings)
