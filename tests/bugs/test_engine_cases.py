"""Faults that users of other engines reported, as they would show in ours: life cycle, limits, memory, order.

Each test names its case: project, number, and what went wrong there.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import AudioTooLongError, StreamClosedError
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions
from oasr_core.testing import markers
from oasr_core.testing.markers import marker_audio, spell

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def marker_dir(tmp_path_factory):
    with markers.registered():
        yield str(markers.write_marker_bundle(tmp_path_factory.mktemp("bugs") / "bundle"))


@pytest.fixture
def engine(marker_dir):
    with ASREngine(EngineConfig(ckpt_dir=marker_dir, device="cpu", dtype="float32", max_batch_size=4)) as built:
        yield built


@pytest.fixture(scope="module")
def digits(wenet_digits):
    with ASREngine(EngineConfig(ckpt_dir=wenet_digits, device="cpu", dtype="float32", max_batch_size=8)) as built:
        yield built


@pytest.fixture(scope="module")
def speech(wenet_digits):
    return torch.from_numpy(load_audio(wenet_digits / "test_wavs" / "utt01_1d.wav").samples)


@pytest.mark.parametrize("streaming", [False, True])
def test_sherpa_onnx_3685_every_length_up_to_two_windows(digits, speech, streaming):
    """Too short a clip gave negative shapes and ended the program: alone and beside a longer one."""
    alone = digits.transcribe(speech, streaming=streaming)
    lengths = [0, 1, 159, 160, 399, 400, 401, *range(560, 2 * 10_960, 487)]
    outputs = digits.transcribe_outputs([speech[:n] for n in lengths] + [speech], streaming=streaming)
    assert [output.finish_reason for output in outputs] == ["stop"] * len(outputs)
    assert [output.text for output in outputs[:4]] == [""] * 4
    assert outputs[-1].text == alone


def test_mlx_audio_928_a_short_clip_does_not_report_a_longer_end(digits, speech):
    """Duration after padding: a clip's words end within the clip."""
    options = DecodingOptions(word_timestamps=True)
    for n in (160, 5_000, len(speech)):
        for streaming in (False, True):
            (output,) = digits.transcribe_outputs([speech[:n]], streaming=streaming, decoding=options)
            assert all(word.end <= n / 16000 for word in output.words)


def test_vllm_12738_audio_past_a_fixed_window_is_refused_not_cut(tmp_path):
    """Text after the window was silently missing: 65 s on a 30 s window is refused, whole."""

    class Window(markers.MarkerFrontend):
        window_seconds = 30.0

    with markers.registered(), registry("frontends").override("marker", Window):
        directory = markers.write_marker_bundle(tmp_path / "window")
        with ASREngine(EngineConfig(ckpt_dir=directory, device="cpu", gc_freeze=False)) as fixed:
            with pytest.raises(AudioTooLongError, match=r"65\.00 s of audio, the model's window is 30\.00 s"):
                fixed.add_request(torch.zeros(65 * 16000), streaming=False)
            assert issubclass(Window, FeatureFrontend)
            assert fixed.transcribe(marker_audio(TOKENS), streaming=False) == spell(TOKENS)


def test_wenet_1268_a_position_table_ends_one_stream_cleanly(tmp_path):
    """Long audio ran past the table: an assertion. Here that stream ends with length, the second one goes on."""
    with markers.registered():
        directory = markers.write_marker_bundle(tmp_path / "table", max_positions=64)
        config = EngineConfig(ckpt_dir=directory, device="cpu", dtype="float32", recycle_streaming_history=True)
        with ASREngine(config) as engine:
            long = engine.add_request(marker_audio([1 + i % 15 for i in range(90)]), streaming=True)
            short = engine.add_request(marker_audio(TOKENS), streaming=True)
            outputs = {output.request_id: output for output in engine.run()}
    assert (outputs[long].finish_reason, outputs[short].finish_reason) == ("length", "stop")
    assert outputs[short].text == spell(TOKENS)


@pytest.mark.parametrize("remainder", range(16))
def test_icefall_1779_the_last_frames_reach_the_text(engine, remainder):
    """Every total length modulo the chunk; and (icefall#1402) a tail of silence adds nothing."""
    tokens = [1 + i % 15 for i in range(16 + remainder)]
    for tail in (0, 16_000):
        audio = marker_audio(tokens, tail_samples=tail)
        assert engine.transcribe(audio, streaming=True) == spell(tokens)
        assert engine.transcribe(audio, streaming=False) == spell(tokens)


def test_vosk_146_audio_after_the_end_is_a_named_error(engine):
    """It aborted the process. Here: a named error, and the engine goes on."""
    stream = engine.add_streaming_request()
    engine.feed_chunk(stream, marker_audio(TOKENS), is_last=True)
    for _ in range(2):
        with pytest.raises(StreamClosedError):
            engine.feed_chunk(stream, marker_audio(TOKENS), is_last=True)
    engine.run()
    with pytest.raises(StreamClosedError):
        engine.abort_request(stream)
    aborted = engine.add_streaming_request()
    engine.abort_request(aborted)
    with pytest.raises(StreamClosedError):
        engine.feed_chunk(aborted, marker_audio(TOKENS))
    assert [output.finish_reason for output in engine.run()] == ["abort"]
    assert engine.transcribe(marker_audio(TOKENS)) == spell(TOKENS)


@pytest.mark.parametrize("commit", ["before", "during", "after"])
def test_nemo_speech_cpp_49_exactly_one_end_however_the_commit_races(engine, commit):
    """Commit before, during and after the last step, paced or in a burst: one terminal output within the deadline."""
    audio = marker_audio(TOKENS * 3)
    stream = engine.add_streaming_request()
    ends = []
    if commit == "before":
        engine.feed_chunk(stream, audio, is_last=True)
    elif commit == "after":
        engine.feed_chunk(stream, audio)
        ends += [output for output in engine.run() if output.finished]
        engine.feed_chunk(stream, None, is_last=True)
    else:
        engine.feed_chunk(stream, audio)
        feeder = threading.Thread(target=lambda: engine.feed_chunk(stream, None, is_last=True))
        feeder.start()
        ends += [output for output in engine.step() if output.finished]
        feeder.join(timeout=10)
    ends += [output for output in engine.run() if output.finished]
    assert [(output.request_id, output.text, output.finish_reason) for output in ends] == [
        (stream, spell(TOKENS * 3), "stop")
    ]


def test_vllm_51376_silence_in_a_reused_place_says_nothing(digits, speech):
    """Silence returned the transcript of the stream before it: freed blocks hold a pattern here, zeros say nothing."""
    want = digits.transcribe(torch.zeros(32_000), streaming=True)
    assert digits.transcribe(speech, streaming=True) != ""
    cache = digits._parts.runner.backend.store.attention
    cache._keys.fill_(3.0)  # every block is free: a marker pattern in all of them
    cache._values.fill_(-7.0)
    assert digits.transcribe(torch.zeros(32_000), streaming=True) == want
    assert digits.transcribe(speech, streaming=True) == digits.transcribe(speech, streaming=True)
    cache._keys.zero_()
    cache._values.zero_()


def test_funasr_943_nothing_stays_behind(engine):
    """A thousand short streams, a long one, three hundred aborted in the middle: counts are back at the start."""
    store = engine._parts.runner.backend.store
    audio = marker_audio(TOKENS)
    engine.transcribe([audio] * 8, streaming=True)
    gc.collect()
    start = (store.free_blocks, store.num_streams, sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    for _ in range(125):
        engine.transcribe([audio] * 8, streaming=True)
    engine.transcribe(marker_audio(TOKENS * 40), streaming=True)
    for _ in range(75):
        ids = [engine.add_streaming_request() for _ in range(4)]
        for request_id in ids:
            engine.feed_chunk(request_id, audio[:3000])
        engine.step()
        for request_id in ids:
            engine.abort_request(request_id)
        engine.step()
    gc.collect()
    end = (store.free_blocks, store.num_streams, sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert end == start


def test_sherpa_89_memory_that_runs_out_ends_that_batch_only(engine, monkeypatch):
    """A long file took the server down without a word: the allocator's error is that batch's alone."""
    runner = engine._parts.runner
    original = runner.forward_offline

    def limited(features, lengths, **kwargs):
        if features.shape[1] > 200:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return original(features, lengths, **kwargs)

    monkeypatch.setattr(runner, "forward_offline", limited)
    (long,) = engine.transcribe_outputs([marker_audio(TOKENS * 30)], streaming=False)
    assert (long.finish_reason, long.error_stage) == ("error", "offline_oom")
    assert "Tried to allocate" in long.error
    assert engine.transcribe(marker_audio(TOKENS), streaming=False) == spell(TOKENS)


def test_nemo_12376_items_beyond_one_batch_keep_their_own_times(engine):
    """Times of all but the last batch were overwritten: twelve items, batches of four, kept from every output."""
    clips = [marker_audio([1 + i, 0, 2 + i]) for i in range(12)]
    options = DecodingOptions(word_timestamps=True)
    for streaming in (False, True):
        kept = engine.transcribe_outputs(clips, streaming=streaming, decoding=options)
        for clip, output in zip(clips, kept, strict=True):
            (alone,) = engine.transcribe_outputs([clip], streaming=streaming, decoding=options)
            assert (output.words, output.timestamps, output.tokens) == (alone.words, alone.timestamps, alone.tokens)


def test_described_system_53_and_55_batch_one_and_priorities(engine):
    """Batch 1 lost trailing words; priority 0 queued behind less urgent requests."""
    tokens = [1 + i % 15 for i in range(33)]
    alone = engine.transcribe(marker_audio(tokens), streaming=False)
    padded = engine.transcribe([marker_audio(tokens), marker_audio(tokens * 2)], streaming=False)[0]
    assert alone == padded == spell(tokens)
    later = [engine.add_request(marker_audio(TOKENS), streaming=False, priority=5) for _ in range(4)]
    urgent = engine.add_request(marker_audio(TOKENS), streaming=False)
    first = {output.request_id for output in engine.step()}
    assert urgent in first
    assert not first.issuperset(later)
    engine.run()
