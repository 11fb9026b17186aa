"""Through the engine: texts equal the oracle's, and no company changes what a request gets."""

from __future__ import annotations

import json
import math

import pytest
import soundfile
import torch

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.testing.invariance import assert_equal, run_offline, run_streaming

ORACLE = {"ctc": "ctc_greedy", "transducer": "transducer_greedy"}


def waveforms(directory, names):
    return [torch.from_numpy(soundfile.read(directory / "test_wavs" / f"{n}.wav", dtype="float32")[0]) for n in names]


def results(directory):
    return json.loads((directory / "oracle" / "results.json").read_text())["utterances"]


def build(directory, method, **settings):
    return ASREngine(
        EngineConfig(ckpt_dir=str(directory), device="cpu", dtype="float32", decode_method=method, **settings)
    )


@pytest.fixture(scope="module", params=["ctc", "transducer"])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def engine(icefall_digits, method):
    return build(icefall_digits, method)


@pytest.fixture(scope="module")
def audio(icefall_digits):
    return waveforms(icefall_digits, sorted(results(icefall_digits)))


def check_offline(engine, method, directory):
    oracle = results(directory)
    names = sorted(oracle)
    for name, got in zip(names, run_offline(engine, waveforms(directory, names)), strict=True):
        want = oracle[name][ORACLE[method]]
        assert got.output.text == want["text"], name
        assert got.output.tokens[0] == want["tokens"], name


def check_streaming(engine, method, directory, chunk):
    oracle = results(directory)
    names = sorted(oracle)
    got = run_streaming(engine, waveforms(directory, names), lambda stream, piece: 4000 + 311 * stream, stagger=1)
    for name, each in zip(names, got, strict=True):
        assert each.output.text == oracle[name][f"streaming_chunk{chunk}_{ORACLE[method]}_text"], name


def test_offline(engine, method, icefall_digits):
    check_offline(engine, method, icefall_digits)


@pytest.mark.parametrize("chunk", [16, 32])
def test_streaming(method, icefall_digits, chunk):
    check_streaming(build(icefall_digits, method, chunk_size=chunk // 2), method, icefall_digits, chunk)


def test_checkpoints_settings_are_adopted(engine):
    assert (engine.config.chunk_size, engine.config.num_left_chunks, engine.config.audio_scale) == (8, 8, 1.0)


def test_offline_company(engine, audio):
    alone = [run_offline(engine, [each])[0] for each in audio]
    assert_equal(run_offline(engine, audio, order=[3, 0, 4, 2, 1]), alone, what="batch")


def test_streaming_company(engine, audio):
    alone = [run_streaming(engine, [each], lambda stream, piece: 16000 * 60)[0] for each in audio]
    together = run_streaming(engine, audio, lambda stream, piece: 1 + (stream * 977 + piece * 331) % 5000, stagger=3)
    assert_equal(together, alone, what="streams")


def test_silence_says_nothing(engine):
    """The flush is silence of features: it adds frames, not words."""
    silence = torch.zeros(3 * 16000)
    assert run_offline(engine, [silence])[0].output.text == ""
    assert run_streaming(engine, [silence], lambda stream, piece: 8000)[0].output.text == ""


def test_shortest_audio(engine):
    """From nothing to a few frames: an answer, and none but the words that are there."""
    for samples in (0, 1, 400, 1360, 1440):
        audio = 0.01 * torch.sin(torch.arange(samples) * 2 * math.pi / 80)
        got = run_streaming(engine, [audio], lambda stream, piece: 16000)[0]
        assert got.output.finish_reason == "stop"


@pytest.mark.slow
def test_all_utterances(method, icefall_shared):
    engine = build(icefall_shared, method)
    check_offline(engine, method, icefall_shared)
    check_streaming(engine, method, icefall_shared, 16)
    check_streaming(build(icefall_shared, method, chunk_size=16), method, icefall_shared, 32)
