"""Whisper through the engine: what is around a request changes no token, and silence stays silent."""

from __future__ import annotations

import random

import numpy as np
import pytest

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.request import DecodingOptions

RATE = 16000
CLIPS = (
    "arctic_a0024.wav",
    "librispeech-1995-1837-0001.wav",
    "librispeech-2412-153948-0000.flac",
    "new-home-in-the-stars-16k.wav",
    "harvard_spk1_snt1.wav",
    "harvard_spk1_snt3.wav",
    "harvard_spk1_snt4.wav",
    "LJ002-0020.wav",
)


@pytest.fixture(scope="module")
def waves(shared_fixtures) -> list[np.ndarray]:
    return [load_audio(shared_fixtures / "audio" / name, sample_rate=RATE).samples for name in CLIPS]


@pytest.fixture(scope="module")
def make_engine(tiny_en):
    def make(**settings) -> ASREngine:
        return ASREngine(EngineConfig(**{"ckpt_dir": tiny_en, "device": "cpu", "dtype": "float32", **settings}))

    return make


@pytest.fixture(scope="module")
def alone(make_engine, waves) -> list[list[int]]:
    with make_engine() as engine:
        return [engine.transcribe_outputs(wave)[0].tokens[0] for wave in waves]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["dense", "paged"])
def test_a_batch_gives_what_each_gives_alone(make_engine, waves, alone, storage):
    with make_engine(decode_options={"kv_storage": storage}) as engine:
        assert [output.tokens[0] for output in engine.transcribe_outputs(waves)] == alone


@pytest.mark.slow
def test_arrival_at_random_ticks_among_neighbours_that_leave(make_engine, waves, alone):
    order = random.Random(5)
    with make_engine(decode_steps_per_tick=3, max_tick_ms=0, max_batch_size=3) as engine:
        ids: dict[str, int] = {}
        waiting = list(range(len(waves)))
        order.shuffle(waiting)
        finals: dict[int, list[int]] = {}
        dropped = ""
        while waiting or engine.has_work:
            if waiting and (order.random() < 0.4 or not engine.has_work):
                index = waiting.pop()
                ids[engine.add_request(waves[index])] = index
                if len(waiting) == 4:
                    dropped = engine.add_request(waves[0])
            for output in engine.step():
                if dropped and output.request_id == dropped and not output.finished:
                    engine.abort_request(dropped)
                    dropped = ""
                if output.finished and output.request_id in ids:
                    finals[ids[output.request_id]] = output.tokens[0]
    assert [finals[index] for index in range(len(waves))] == alone


def noise(kind: str, seconds: float) -> np.ndarray:
    generator, count = np.random.default_rng(3), int(seconds * RATE)
    time = np.arange(count) / RATE
    sounds = {
        "zeros": np.zeros(count),
        "white noise": 0.1 * generator.standard_normal(count),
        "faint noise": 0.001 * generator.standard_normal(count),
        "tone": 0.3 * np.sin(2 * np.pi * 440 * time),
        "hum": 0.2 * sum(np.sin(2 * np.pi * 50 * k * time) / k for k in (1, 2, 3, 5)),
    }
    return sounds[kind].clip(-1, 1).astype(np.float32)


@pytest.mark.parametrize("seconds", [1.0, 12.0])
@pytest.mark.parametrize("kind", ["zeros", "white noise", "faint noise", "tone", "hum"])
def test_no_text_is_invented(quiet_engine, kind, seconds):
    (output,) = quiet_engine.transcribe_outputs(noise(kind, seconds))
    assert (output.text, output.segments, output.finish_reason) == ("", [], "stop")


@pytest.fixture(scope="module")
def quiet_engine(make_engine):
    with make_engine() as engine:
        yield engine


def test_speech_passes_the_gate_and_the_gate_can_be_taken_away(quiet_engine, make_engine, waves):
    faint = (0.01 * np.asarray(waves[4])).astype(np.float32)
    assert "dog" in quiet_engine.transcribe(faint)
    with make_engine(silence_gate="off", decode_options={"no_speech_gate": False}) as engine:
        assert engine.transcribe(noise("zeros", 3.0)) != ""


def test_what_whisper_cannot_do_is_refused_by_name(quiet_engine, waves):
    from oasr_core.errors import RequestRefusedError

    for options, named in (
        ({"language": "fr"}, "language"),
        ({"task": "translate"}, "translate"),
        ({"n_best": 3}, "n_best"),
        ({"hotwords": [{"phrase": "OASR", "boost": 2.0}]}, "boost"),
    ):
        with pytest.raises(RequestRefusedError, match=named):
            quiet_engine.transcribe_outputs(waves[0], decoding=DecodingOptions(**options))
