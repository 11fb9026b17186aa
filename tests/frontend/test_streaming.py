"""Streams: any cutting of the audio gives the offline features; cursor, buffer and memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.errors import InvalidAudioError, RequestRefusedError, StreamClosedError
from oasr_core.frontend.fbank import FbankFrontend, MfccFrontend
from oasr_core.frontend.framing import CentredFraming, SnipEdgesFraming, cut_frames
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.options import FeatureConfig
from oasr_core.frontend.streaming import FeatureStream

FRONTENDS = {
    "snipped": FbankFrontend(FeatureConfig(), 32768.0),
    "centred": FbankFrontend(FeatureConfig(snip_edges=False, high_freq=-400), 1.0),
    "8 kHz": FbankFrontend(FeatureConfig(sample_rate=8000, num_mel_bins=40, snip_edges=False), 32768.0),
    "odd span": FbankFrontend(FeatureConfig(sample_rate=11025, snip_edges=False, frame_shift_ms=11), 32768.0),
    "mfcc": MfccFrontend(FeatureConfig(num_mel_bins=23, use_energy=True), 32768.0),
    "gaps": FbankFrontend(FeatureConfig(frame_length_ms=10, frame_shift_ms=25), 32768.0),
    "centred gaps": FbankFrontend(FeatureConfig(frame_length_ms=10, frame_shift_ms=25, snip_edges=False), 32768.0),
}


def offline(processor, samples):
    features, (frames,) = processor.extract([samples])
    return features[0, :frames]


def stream_through(processor, samples, sizes):
    """Feed pieces of the given sizes (the last one repeated), computing after each."""
    stream = processor.open_stream()
    sizes = list(sizes)
    start = 0
    while start < len(samples):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        stream.append(samples[start : start + size])
        start += size
        processor.extract_streaming_batch([stream])
    stream.finish()
    processor.extract_streaming_batch([stream])
    assert stream.samples_received == len(samples)
    assert stream.frames_pending == 0
    return stream.window(stream.frames_ready)


@pytest.mark.parametrize("name", FRONTENDS)
@pytest.mark.parametrize("size", [7, 16, 80, 159, 160, 161, 400, 1000, 10240, 48000])
def test_any_piece_size_gives_the_offline_features(speech_like, name, size):
    processor = InputProcessor(FRONTENDS[name])
    samples = torch.from_numpy(speech_like(16123))
    torch.testing.assert_close(
        stream_through(processor, samples, [size]), offline(processor, samples), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("name", ["snipped", "centred"])
def test_single_samples_give_the_offline_features(speech_like, name):
    processor = InputProcessor(FRONTENDS[name])
    samples = torch.from_numpy(speech_like(2500))
    torch.testing.assert_close(stream_through(processor, samples, [1]), offline(processor, samples), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", FRONTENDS)
def test_the_same_raw_frames_are_cut(speech_like, name):
    """The raw frames are equal bit for bit; what is left is the rounding of FFT and product in other batch sizes."""
    frontend = FRONTENDS[name]
    samples = torch.from_numpy(speech_like(5003))
    whole = FeatureStream(frontend)
    whole.append(samples)
    whole.finish()
    expected = whole.pending_frames().clone()
    for size in (1, 50, 333, 2000):
        stream, cut = FeatureStream(frontend), []
        for start in range(0, len(samples), size):
            stream.append(samples[start : start + size])
            frames = stream.pending_frames().clone()
            cut.append(frames)
            stream.accept(torch.zeros(len(frames), frontend.feature_dim))
        stream.finish()
        cut.append(stream.pending_frames())
        assert torch.equal(torch.cat(cut), expected)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("span", "hop"), [(9, 4), (10, 4), (10, 3), (9, 3), (7, 7), (5, 8), (6, 5), (2, 1), (11, 1)])
def test_kept_samples_suffice_on_any_grid(span, hop, centred):
    """Where the last frame is mirrored right at its middle, it reaches back to before its own start."""
    framing = (CentredFraming if centred else SnipEdgesFraming)(span, hop)
    for length in range(60):
        expected = cut_frames(torch.arange(length).float(), framing, 0, framing.frames(length, final=True))
        for size in (1, 3, 60):
            stream, cut = FeatureStream(SimpleNamespace(framing=framing, feature_dim=1)), []
            for piece in torch.arange(length).float().split(size):
                stream.append(piece)
                cut.append(stream.pending_frames().clone())
                stream.accept(torch.zeros(len(cut[-1]), 1))
            stream.finish()
            cut.append(stream.pending_frames())
            assert torch.equal(torch.cat(cut), expected)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(FRONTENDS)),
    length=st.integers(0, 6000),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
)
def test_ragged_pieces(speech_like, name, length, sizes):
    processor = InputProcessor(FRONTENDS[name])
    samples = torch.from_numpy(speech_like(length))
    torch.testing.assert_close(
        stream_through(processor, samples, [*sizes, 500]), offline(processor, samples), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("name", ["snipped", "centred"])
def test_short_audio(speech_like, name):
    processor = InputProcessor(FRONTENDS[name])
    for length in [*range(0, 700, 13), 79, 80, 239, 240, 399, 400, 401, 560]:
        samples = torch.from_numpy(speech_like(length))
        features = stream_through(processor, samples, [length or 1])
        assert features.shape == (processor.num_frames(length), 80)
        torch.testing.assert_close(features, offline(processor, samples), rtol=0, atol=2e-5)


def test_streams_of_different_age_share_one_call(speech_like, monkeypatch):
    frontend = FbankFrontend(FeatureConfig(snip_edges=False), 32768.0)
    processor = InputProcessor(frontend)
    waveforms = [torch.from_numpy(speech_like(length, seed)) for seed, length in enumerate((12000, 5000, 90, 16000))]
    streams = [processor.open_stream() for _ in waveforms]
    calls = []
    compute = frontend.compute_frames
    monkeypatch.setattr(frontend, "compute_frames", lambda frames: calls.append(len(frames)) or compute(frames))
    for step in range(9):
        active = []
        for age, (stream, waveform) in enumerate(zip(streams, waveforms, strict=True)):
            start = (step - age) * 3000
            if start < 0 or stream.finished:
                continue
            stream.append(waveform[start : start + 3000])
            if start + 3000 >= len(waveform):
                stream.finish()
            active.append(stream)
        before = len(calls)
        processor.extract_streaming_batch(active)
        assert len(calls) - before <= 1
    for stream, waveform in zip(streams, waveforms, strict=True):
        torch.testing.assert_close(stream.window(stream.frames_ready), offline(processor, waveform), rtol=0, atol=2e-5)


def test_nothing_pending_is_no_call(monkeypatch):
    frontend = FbankFrontend(FeatureConfig(), 1.0)
    processor = InputProcessor(frontend)
    monkeypatch.setattr(frontend, "compute_frames", lambda frames: pytest.fail("called for nothing"))
    stream = processor.open_stream()
    processor.extract_streaming_batch([])
    processor.extract_streaming_batch([stream])
    stream.append(torch.zeros(399))
    processor.extract_streaming_batch([stream])
    stream.finish()
    processor.extract_streaming_batch([stream])
    assert stream.frames_computed == 0


def numbered(first, count, dim=80):
    return torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1).expand(count, dim)


def filled(frames):
    """A stream whose accepted frames hold their own number."""
    stream = FeatureStream(FRONTENDS["snipped"])
    feed(stream, frames)
    return stream


def feed(stream, frames):
    first = stream.frames_computed
    stream.append(torch.zeros(max(0, 240 + 160 * (first + frames) - stream.samples_received)))
    assert stream.frames_pending == frames
    stream.accept(numbered(first, frames))


def test_windows_follow_the_cursor():
    stream = filled(100)
    assert (stream.cursor, stream.frames_ready, stream.frames_computed) == (0, 100, 100)
    assert stream.window(67)[:, 0].tolist() == list(range(67))
    stream.advance(64)
    assert (stream.cursor, stream.frames_ready, stream.frames_computed) == (64, 36, 100)
    assert stream.window(67)[:, 0].tolist() == list(range(64, 100))
    feed(stream, 64)
    assert stream.window(67)[:, 0].tolist() == list(range(64, 131))
    assert stream.window(0).shape == (0, 80)
    assert FeatureStream(FRONTENDS["mfcc"]).window(5).shape == (0, 13)


def test_a_window_stays_valid():
    stream = filled(67)
    held = []
    for _ in range(40):
        view = stream.window(67)
        held.append((view, view.clone()))
        stream.advance(64)
        feed(stream, 64)
    for view, copy in held:
        assert torch.equal(view, copy)


def test_memory_is_bounded():
    """After an hour in steps of 640 ms a stream holds about a window of frames and less than a frame of samples."""
    stream = FeatureStream(FRONTENDS["centred"])
    step = torch.zeros(10240)
    largest_buffer = largest_samples = 0
    for _ in range(5625):
        stream.append(step)
        stream.accept(torch.zeros(stream.frames_pending, 80))
        stream.advance(min(64, stream.frames_ready))
        largest_buffer = max(largest_buffer, stream._buffer.untyped_storage().nbytes())
        largest_samples = max(largest_samples, sum(piece.untyped_storage().nbytes() for piece in stream._pieces))
    assert stream.samples_received == 5625 * 10240
    assert largest_buffer <= 1024 * 80 * 4
    assert largest_samples <= 2 * 400 * 4
    stream.finish()
    stream.accept(torch.zeros(stream.frames_pending, 80))
    assert sum(len(piece) for piece in stream._pieces) == 0


def test_a_backlog_is_given_back_while_it_is_used():
    stream = filled(5000)
    for _ in range(450):
        stream.advance(10)
    assert stream.frames_ready == 500
    assert stream._buffer.shape[0] <= 1250
    assert stream.window(1)[0, 0] == 4500


def test_a_backlog_is_not_copied_for_each_chunk(monkeypatch):
    copied = 0
    move = FeatureStream._move_rows

    def counted(self, capacity, device=None):
        nonlocal copied
        copied += self.frames_ready
        move(self, capacity, device)

    monkeypatch.setattr(FeatureStream, "_move_rows", counted)
    stream = filled(0)
    for _ in range(500):
        feed(stream, 20)
    assert copied <= 2 * 10000
    copied = 0
    for _ in range(1000):
        stream.advance(10)
    assert copied <= 10000
    assert stream.frames_ready == 0


def test_flush_frames_follow_the_audio():
    stream = filled(10)
    with pytest.raises(ValueError, match="finish"):
        stream.append_frames(torch.full((3, 80), -23.0))
    stream.finish()
    stream.append_frames(torch.full((3, 80), -23.0))
    assert (stream.frames_computed, stream.frames_ready, stream.frames_pending) == (13, 13, 0)
    assert stream.window(20)[:, 0].tolist() == [*range(10), -23, -23, -23]


def test_the_cursor_stops_at_the_end():
    stream = filled(10)
    with pytest.raises(ValueError, match="10 are ready"):
        stream.advance(11)
    assert stream.cursor == 0
    stream.finish()
    stream.advance(64)
    assert (stream.cursor, stream.frames_ready, stream.frames_computed) == (10, 0, 10)


def test_more_than_pending_is_refused():
    stream = filled(10)
    with pytest.raises(ValueError, match="pending"):
        stream.accept(torch.zeros(1, 80))


def test_audio_after_the_end_is_refused():
    stream = filled(1)
    stream.finish()
    assert stream.finished
    with pytest.raises(StreamClosedError):
        stream.append(torch.zeros(1))


@pytest.mark.parametrize("samples", [torch.zeros(1, 5), torch.zeros(5, dtype=torch.float64), torch.zeros(5).short()])
def test_only_canonical_samples_are_queued(samples):
    with pytest.raises(InvalidAudioError, match="1-D float32"):
        filled(0).append(samples)


@pytest.mark.parametrize("stacking", [{"lfr_m": 7, "lfr_n": 6}, {"lfr_m": 3}, {"lfr_n": 2}])
def test_stacked_frames_do_not_stream(stacking):
    frontend = FbankFrontend(FeatureConfig(**stacking), 32768.0)
    with pytest.raises(RequestRefusedError, match="streaming=False"):
        InputProcessor(frontend).open_stream()
    with pytest.raises(NotImplementedError):
        frontend.compute_frames(torch.zeros(1, 400))
