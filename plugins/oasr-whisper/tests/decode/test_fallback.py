"""When a result is decoded again, and which is kept."""

from __future__ import annotations

import zlib

import pytest
from pydantic import ValidationError

from oasr_whisper.fallback import (
    Attempt,
    average_log_prob,
    best_attempt,
    compression_ratio,
    fails,
    is_silence,
    next_temperature,
)
from oasr_whisper.options import AedOptions

OPTIONS = AedOptions(temperature_fallback=(0.2, 0.4))


def attempt(average, ratio=1.0, temperature=0.0, result=""):
    return Attempt(temperature, average, ratio, result)


def test_repetition_compresses_well():
    text = "the same again and " * 20
    assert compression_ratio(text) == len(text.strip()) / len(zlib.compress(text.strip().encode()))
    assert compression_ratio(text) > 2.4 > compression_ratio("nothing here is said twice")
    assert compression_ratio(" ") == 0.0


def test_averages_count_the_end():
    assert average_log_prob(-3.0, 2) == -1.0
    assert average_log_prob(-3.0, 0) == -3.0


@pytest.mark.parametrize(
    ("average", "ratio", "no_speech", "failed"),
    [
        (-0.5, 1.0, 0.0, False),
        (-1.5, 1.0, 0.0, True),
        (-0.5, 3.0, 0.0, True),
        (-1.5, 1.0, 0.9, False),
        (-1.5, 3.0, 0.9, False),
        (-0.5, 3.0, 0.9, True),
        (-1.5, 1.0, None, True),
    ],
)
def test_bad_results_fail_and_silence_does_not(average, ratio, no_speech, failed):
    assert fails(OPTIONS, attempt(average, ratio), no_speech) is failed


def test_thresholds_can_be_off():
    anything = AedOptions(compression_ratio_threshold=None, log_prob_threshold=None)
    assert not fails(anything, attempt(-9.0, 9.0), 0.0)
    assert not is_silence(AedOptions(no_speech_threshold=None), -9.0, 1.0)


def test_silence_is_improbable_text_where_nobody_speaks():
    assert is_silence(OPTIONS, -1.5, 0.7)
    assert not is_silence(OPTIONS, -0.5, 0.7)
    assert not is_silence(OPTIONS, -1.5, 0.5)
    assert is_silence(AedOptions(log_prob_threshold=None), -0.1, 0.7)


def test_temperatures_rise():
    assert [next_temperature(OPTIONS, each) for each in (0.0, 0.2, 0.3, 0.4)] == [0.2, 0.4, 0.4, None]
    with pytest.raises(ValidationError, match="must rise"):
        AedOptions(temperature_fallback=(0.4, 0.2))


def test_the_best_of_failures_is_one_that_does_not_repeat_itself():
    tried = [attempt(-1.2, 5.0, 0.0, "a"), attempt(-1.9, 1.0, 0.2, "b"), attempt(-1.5, 1.0, 0.4, "c")]
    assert best_attempt(OPTIONS, tried)[3] == "c"
    assert best_attempt(OPTIONS, tried[:2]) == attempt(-1.9, 1.0, 0.2, "b")
    assert best_attempt(OPTIONS, [tried[0], attempt(-2.0, 6.0, 0.2, "d")]) == attempt(-1.2, 5.0, 0.2, "a")
