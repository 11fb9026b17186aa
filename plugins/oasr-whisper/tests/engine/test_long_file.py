"""A file of ten minutes through the engine, in every mode: nothing lost, nothing said twice, times in order."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass

import numpy as np
import pytest

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.metrics import ErrorCounts, count_errors, normalise_text
from oasr_core.request import DecodingOptions

RATE, GAP = 16000, 0.8
SECONDS = 600
SPELT = {"1": "one", "2": "two", "3": "three", "1813": "eighteen thirteen"}
DECODING = DecodingOptions(segment_timestamps=True, word_timestamps=True)


@dataclass
class Said:
    words: list[str]
    start: float
    end: float


def words_of(text: str) -> list[str]:
    return " ".join(SPELT.get(word, word) for word in normalise_text(text).split()).split()


@pytest.fixture(scope="module")
def clips(shared_fixtures) -> list[tuple[np.ndarray, str]]:
    """English recordings that fit into a window, with their texts."""
    folder = shared_fixtures / "audio"
    entries = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    return [
        (np.asarray(load_audio(folder / entry["file"], sample_rate=RATE).samples, dtype=np.float32), entry["text"])
        for entry in entries
        if entry["lang"] == "en" and entry["text"] and entry["duration"] <= 30
    ]


@pytest.fixture(scope="module")
def long_file(clips) -> tuple[np.ndarray, list[Said]]:
    pieces, said, position = [], [], 0.0
    while position < SECONDS:
        samples, text = clips[len(said) % len(clips)]
        said.append(Said(words_of(text), position, position + len(samples) / RATE))
        pieces += [samples, np.zeros(int(GAP * RATE), dtype=np.float32)]
        position = sum(map(len, pieces)) / RATE
    return np.concatenate(pieces), said


@pytest.fixture(scope="module")
def one_by_one(tiny_en, clips, long_file) -> float:
    """Error rate of the same recordings alone."""
    with ASREngine(EngineConfig(ckpt_dir=tiny_en, device="cpu")) as engine:
        outputs = engine.transcribe_outputs([samples for samples, _ in clips], decoding=DECODING)
    total = ErrorCounts()
    for index, said in enumerate(long_file[1]):
        total += count_errors(said.words, words_of(outputs[index % len(clips)].text))
    return total.rate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "margin"),
    [
        pytest.param({"long_form_mode": "sequential"}, 0.005, id="sequential"),
        pytest.param({"segmenter": "overlap"}, 0.02, id="parallel-overlap"),
        pytest.param({"segmenter": "quiet"}, 0.02, id="parallel-quiet"),
    ],
)
def test_ten_minutes(tiny_en, long_file, one_by_one, settings, margin):
    samples, said = long_file
    partials = []
    with ASREngine(EngineConfig(ckpt_dir=tiny_en, device="cpu", long_form=True, **settings)) as engine:
        request_id = engine.add_request(samples, decoding=DECODING)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        output = None
        while output is None:
            for each in engine.step():
                assert each.request_id == request_id
                if each.finished:
                    output = each
                else:
                    partials.append(each)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert output.finish_reason == "stop"
    assert grown < 600 * 1024  # KiB: a handful of windows, not twenty
    # Progress: partials grow, and so does the audio that they account for.
    dealt_with = [partial.consumed_seconds for partial in partials]
    assert len(dealt_with) > 10
    assert dealt_with == sorted(dealt_with)
    # Words: the error rate, and no recording whose words are missing or there twice.
    found = words_of(output.text)
    errors = count_errors([word for each in said for word in each.words], found)
    assert errors.rate <= one_by_one + margin
    for each in said:
        inside = [word for word in output.words if each.start - 0.4 <= (word.start + word.end) / 2 < each.end + 0.4]
        heard = words_of(" ".join(word.word for word in inside))
        assert abs(len(heard) - len(each.words)) <= max(2, 0.4 * len(each.words)), (each, heard)
    # Times: in order, inside of the audio.
    starts = [word.start for word in output.words]
    assert starts == sorted(starts)
    bounds = [time for segment in output.segments for time in (segment.start, segment.end)]
    assert bounds == sorted(bounds)
    assert bounds[0] >= 0.0
    assert bounds[-1] <= len(samples) / RATE + 0.01
