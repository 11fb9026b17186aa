"""Probabilities to spans: against silero-vad's own rules, and against its network step by step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import silero_vad
from hypothesis import given
from hypothesis import strategies as st
from silero_vad.utils_vad import get_speech_timestamps_from_probs

from oasr_vad.model import SpeechModel
from oasr_vad.options import VadOptions
from oasr_vad.spans import speech_spans


def walk(seed: int, count: int) -> list[float]:
    """Probabilities that stay a while where they are, above, between and below the thresholds."""
    chooser = random.Random(seed)
    values: list[float] = []
    while len(values) < count:
        values += [chooser.choice([0.02, 0.1, 0.34, 0.36, 0.45, 0.5, 0.52, 0.9])] * chooser.randint(1, 15)
    return values[:count]


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 300),
    threshold=st.sampled_from([0.3, 0.5, 0.7]),
    neg_threshold=st.sampled_from([None, 0.1, 0.3]),
    speech=st.sampled_from([0, 100, 250, 1000]),
    silence=st.sampled_from([0, 64, 100, 500]),
    pad=st.sampled_from([0, 30, 200, 1000]),
    rate=st.sampled_from([8000, 16000]),
    cut=st.integers(0, 255),
)
def test_spans_are_silero_vads(seed, count, threshold, neg_threshold, speech, silence, pad, rate, cut):
    probabilities = walk(seed, count)
    window = 512 if rate == 16000 else 256
    samples = max(count * window - cut, 0)
    expected = get_speech_timestamps_from_probs(
        probabilities,
        sampling_rate=rate,
        threshold=threshold,
        neg_threshold=neg_threshold,
        min_speech_duration_ms=speech,
        min_silence_duration_ms=silence,
        speech_pad_ms=pad,
        audio_length_samples=samples,
    )
    options = VadOptions(
        threshold=threshold,
        neg_threshold=neg_threshold,
        min_speech_seconds=speech / 1000,
        min_silence_seconds=silence / 1000,
        speech_pad_seconds=pad / 1000,
    )
    spans = speech_spans(probabilities, options, window=window, sample_rate=rate, samples=samples)
    assert [(span.start, span.end) for span in spans] == [(each["start"], each["end"]) for each in expected]


@pytest.mark.parametrize("rate", [8000, 16000])
def test_the_network_gives_what_it_gives_step_by_step(rate, digits):
    import onnxruntime

    path = f"{silero_vad.__path__[0]}/data/silero_vad.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    model = SpeechModel(rate)
    audio = digits["utt16_7d"].numpy()[:: 16000 // rate]
    windows = np.pad(audio, (0, -len(audio) % model.window)).reshape(-1, model.window)
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros(rate // 250, np.float32)
    expected = []
    for window in windows:
        inputs = {"input": np.concatenate([context, window])[None], "state": state, "sr": np.array(rate)}
        probability, state = session.run(None, inputs)
        expected.append(float(probability[0, 0]))
        context = window[-len(context) :]
    assert max(expected) > 0.9
    whole = model.probabilities(windows, model.start())
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    carried = model.start()
    parts = [model.probabilities(windows[first : first + 7], carried) for first in range(0, len(windows), 7)]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-5)


def test_blocks_of_a_long_sequence_are_one_sequence(digits, monkeypatch):
    import oasr_vad.model

    model = SpeechModel(16000)
    windows = digits["utt16_7d"].numpy()
    windows = windows[: len(windows) // 512 * 512].reshape(-1, 512)
    whole = model.probabilities(windows, model.start())
    monkeypatch.setattr(oasr_vad.model, "_BLOCK", 3)
    np.testing.assert_allclose(model.probabilities(windows, model.start()), whole, atol=1e-5)
