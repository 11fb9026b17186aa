"""Built-in cutters: windows cover the audio, fit, and end where they should."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.errors import ConfigError, PluginContractError
from oasr_core.registry import registry
from oasr_core.segmenters.base import Segmenter, SpeechSpan, Window
from oasr_core.segmenters.energy import quietest
from oasr_core.segmenters.overlap import OverlapOptions, OverlapSegmenter
from oasr_core.segmenters.quiet import QuietOptions, QuietSegmenter

RATE = 1000


def noise(seconds: float, rate: int = RATE, level: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(round(seconds * rate), generator=generator) * level


@pytest.mark.parametrize("name", ["overlap", "quiet"])
def test_built_ins_are_on_the_axis(name):
    segmenter = registry("segmenters").get(name).from_options({}, 16000)
    assert isinstance(segmenter, Segmenter)
    assert segmenter.shares_audio == (name == "overlap")
    with pytest.raises(ConfigError, match="does not follow streams"):
        segmenter.open_stream()


@given(st.integers(0, 20000), st.integers(100, 5000), st.integers(0, 50))
def test_overlapping_windows(samples, longest, percent):
    overlap = longest * percent // 100
    segmenter = OverlapSegmenter(OverlapOptions(overlap_seconds=overlap / RATE), RATE)
    windows = segmenter.windows(torch.zeros(samples), longest)
    if not samples:
        assert windows == []
        return
    assert windows[0].start == 0
    assert windows[-1].end == samples
    for before, after in pairwise(windows):
        assert before.end - after.start == after.overlap_before == overlap
    lengths = [window.end - window.start for window in windows]
    assert max(lengths) <= longest
    assert max(lengths) - min(lengths) <= 1 + overlap
    # As few as there can be.
    fewest = 1 if samples <= longest else -(-(samples - overlap) // (longest - overlap))
    assert len(windows) == fewest


def test_an_overlap_of_more_than_half_a_window_is_refused():
    segmenter = OverlapSegmenter(OverlapOptions(overlap_seconds=6.0), RATE)
    with pytest.raises(ConfigError, match="more than half of a window of 10 s; give at most 5"):
        segmenter.windows(torch.zeros(30 * RATE), 10 * RATE)


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match=r"overlap: no such option.*Did you mean 'overlap_seconds'"):
        OverlapSegmenter.from_options({"overlap": 1.0}, RATE)
    with pytest.raises(ConfigError, match="search_seconds=-1"):
        QuietSegmenter.from_options({"search_seconds": -1}, RATE)


@given(st.integers(0, 20000), st.integers(30, 5000), st.floats(0.001, 20.0))
def test_quiet_windows_touch_and_cover(samples, longest, search):
    segmenter = QuietSegmenter(QuietOptions(search_seconds=search), RATE)
    windows = segmenter.windows(noise(samples / RATE), longest)
    assert sum(window.end - window.start for window in windows) == samples
    for before, after in pairwise(windows):
        assert before.end == after.start
        assert after.overlap_before == 0
    assert all(window.end - window.start <= longest for window in windows)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_quiet_cuts_lie_in_the_pauses(rate):
    audio = noise(40.0, rate)
    pauses = [(8.3, 8.8), (17.0, 17.3), (25.2, 26.0), (33.1, 33.4)]
    for begin, end in pauses:
        audio[round(begin * rate) : round(end * rate)] *= 0.01
    segmenter = QuietSegmenter(QuietOptions(search_seconds=3.0), rate)
    windows = segmenter.windows(audio, 10 * rate)
    assert len(windows) == 5
    for window, (begin, end) in zip(windows, pauses, strict=False):
        assert begin + 0.05 < window.end / rate < end - 0.05


def test_a_pause_between_words_is_preferred_to_the_closure_of_a_plosive():
    audio = noise(10.0, 16000)
    audio[16000 * 6 : 16000 * 6 + 800] *= 0.0  # 50 ms of nothing
    audio[16000 * 4 : 16000 * 4 + 4800] *= 0.03  # 300 ms of quiet
    assert 16000 * 4 < quietest(audio, 0, len(audio), 16000) < 16000 * 4 + 4800


def test_the_middle_of_digital_silence_is_quietest():
    audio = noise(10.0, 16000)
    audio[16000 * 3 : 16000 * 5] = 0.0
    assert abs(quietest(audio, 0, len(audio), 16000) - 16000 * 4) < 800
    assert quietest(torch.zeros(160000), 0, 160000, 16000) == pytest.approx(80000, abs=400)


def test_the_last_quiet_window_is_no_sliver():
    segmenter = QuietSegmenter(QuietOptions(search_seconds=2.0), RATE)
    windows = segmenter.windows(noise(10.1), 10 * RATE)
    assert [window.end - window.start >= 2 * RATE for window in windows] == [True, True]


class Spans(Segmenter):
    """Speech where a test says."""

    oasr_api = "1.0"
    options_cls = QuietOptions
    spans: tuple[tuple[int, int], ...] = ()

    def speech(self, waveform):
        return [SpeechSpan(start, end) for start, end in self.spans]


def spans(*pairs: tuple[int, int]) -> Spans:
    segmenter = Spans(QuietOptions(), RATE)
    segmenter.spans = pairs
    return segmenter


def test_spans_are_packed_and_long_silence_is_left_out():
    segmenter = spans((1000, 3000), (3500, 6000), (6100, 9000), (30000, 34000))
    windows = segmenter.windows(noise(60), 6000)
    assert windows == [Window(800, 6050), Window(6050, 9200), Window(29800, 34200)]


def test_a_span_longer_than_a_window_is_cut_where_it_is_quiet():
    audio = noise(60)
    audio[9000:9300] *= 0.001
    windows = spans((1000, 20000)).windows(audio, 10000)
    assert windows[0].end == windows[1].start
    assert 9000 < windows[0].end < 9300


def test_no_speech_gives_no_windows():
    assert spans().windows(noise(60), 10000) == []
    assert spans().windows(noise(5), 10000) == [Window(0, 5000)]  # what fits is given whole


@given(st.lists(st.integers(0, 40000), max_size=30, unique=True).map(sorted))
def test_packed_windows_hold_all_speech(edges):
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    samples = 41000
    covered = torch.zeros(samples, dtype=torch.int64)
    for window in spans(*pairs).windows(torch.zeros(samples), 3000):
        covered[window.start : window.end] += 1
    assert int(covered.max()) <= 1
    for start, end in pairs:
        assert bool((covered[start:end] == 1).all())


@pytest.mark.parametrize(
    "windows",
    [
        [Window(0, 7000)],
        [Window(0, 4000), Window(3000, 8000, 1000)],
        [Window(0, 4000), Window(4000, 30001)],
        [Window(5000, 8000), Window(0, 4000)],
        [Window(0, 0)],
        [Window(0, 4000), Window(4000, 8000, 5)],
    ],
)
def test_bad_windows_of_a_plugin_are_refused(windows):
    class Bad(Spans):
        def cut(self, waveform, max_samples):
            return windows

    with pytest.raises(PluginContractError, match="cut gave Window"):
        Bad(QuietOptions(), RATE).windows(torch.zeros(30000), 6000)
