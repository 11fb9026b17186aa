"""Zipformer (slots) and transducer, greedy and beam: batch, order, padding, chunking, neighbours change nothing."""

from __future__ import annotations

import random

import pytest
import torch

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import ConfigError
from oasr_core.request import DecodingOptions
from oasr_core.testing.invariance import assert_equal, run_offline, run_streaming

METHODS = {
    "ctc": {"decode_method": "ctc"},
    "greedy": {"decode_method": "transducer"},
    "beam": {"decode_method": "transducer", "decode_options": {"search": "beam", "beam_size": 4}},
}


@pytest.fixture(scope="module")
def icefall(repo_root):
    return repo_root / "tests" / "data" / "icefall_digits"


@pytest.fixture(scope="module")
def clips(icefall):
    wavs = sorted((icefall / "test_wavs").glob("*.wav"))
    whole = [torch.from_numpy(load_audio(wav).samples) for wav in wavs]
    return [*whole, whole[0][:3000], torch.cat([whole[1], whole[2]])]


@pytest.fixture
def make(icefall):
    engines = []

    def build(method: str, **settings) -> ASREngine:
        config = {"ckpt_dir": icefall, "device": "cpu", "dtype": "float32", "gc_freeze": False, **METHODS[method]}
        engines.append(ASREngine(EngineConfig(**{**config, **settings})))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("method", METHODS)
def test_offline_in_any_batch_and_order(make, clips, method):
    want = [run_offline(make(method, max_batch_size=1), [clip])[0] for clip in clips]
    for batch in (2, 8):
        engine = make(method, max_batch_size=batch)
        order = random.Random(batch).sample(range(len(clips)), len(clips))
        assert_equal(run_offline(engine, clips, order=order), want, what=f"{method} batch {batch}")


@pytest.mark.parametrize("method", METHODS)
def test_streaming_in_any_pieces_and_company(make, clips, method):
    alone = make(method, max_batch_size=1)
    want = [run_streaming(alone, [clip], lambda *_: 10**9)[0] for clip in clips]
    sizes = random.Random(method)
    for batch in (2, 8):
        engine = make(method, max_batch_size=batch)
        got = run_streaming(engine, clips, lambda *_: sizes.choice([320, 5_000, 12_000]), stagger=1)
        assert_equal(got, want, what=f"{method}, {batch} streams")


@pytest.mark.parametrize("mode", ["offline", "streaming"])
def test_beam_one_is_greedy_with_one_symbol_a_frame(make, clips, mode):
    greedy = make("greedy", decode_options={"search": "greedy", "max_sym_per_frame": 1})
    one = make("beam", decode_options={"search": "beam", "beam_size": 1})
    want, got = (engine.transcribe_outputs(clips, streaming=mode == "streaming") for engine in (greedy, one))
    for mine, reference in zip(got, want, strict=True):
        assert (mine.text, mine.tokens, mine.timestamps) == (reference.text, reference.tokens, reference.timestamps)


@pytest.mark.parametrize("method", METHODS)
def test_sixty_four_streams_with_starts_pauses_aborts_and_endpoints(make, clips, method):
    """Each transcript equals the one that the stream has alone."""
    pause = torch.zeros(30_000)
    audio = [torch.cat([clips[i % 5], pause, clips[(i + 2) % 5]]) if i % 4 == 0 else clips[i % 5] for i in range(64)]
    alone = make(method, max_batch_size=1)
    want = {i: alone.transcribe(audio[i], streaming=True) for i in range(20)}  # the sixty-four repeat these
    engine = make(method, max_batch_size=64)
    generator = random.Random(64)
    streams: dict[int, str] = {}
    fed = dict.fromkeys(range(64), 0)
    waiting, finals = list(range(64)), {}
    aborted = set(generator.sample(range(64), 8))
    while waiting:
        for i in generator.sample(waiting, min(24, len(waiting))):  # the others pause
            if i not in streams:
                options = DecodingOptions(endpointing=i % 4 == 0)
                streams[i] = engine.add_streaming_request(decoding=options)
            size = generator.choice([800, 4_000, 9_000])
            last = fed[i] + size >= len(audio[i])
            if i in aborted and fed[i] > len(audio[i]) // 2:
                engine.abort_request(streams[i])
                waiting.remove(i)
                continue
            engine.feed_chunk(streams[i], audio[i][fed[i] : fed[i] + size], is_last=last)
            fed[i] += size
            if last:
                waiting.remove(i)
        finals |= {output.request_id: output for output in engine.step() if output.finished}
    finals |= {output.request_id: output for output in engine.run()}
    for i, stream in streams.items():
        if finals[stream].finish_reason != "abort":
            assert finals[stream].text == want[i % 20], i
    assert sum(final.finish_reason == "abort" for final in finals.values()) >= 1
    assert engine._parts.runner.backend.store.num_streams == 0


def test_a_fixed_left_context_cannot_be_set(icefall):
    with pytest.raises(ConfigError, match="left context of this zipformer checkpoint is fixed"):
        ASREngine(EngineConfig(ckpt_dir=icefall, device="cpu", num_left_chunks=2))


def test_a_short_last_window_is_filled_whatever_the_setting(make, clips):
    want = make("greedy").transcribe(clips, streaming=True)
    assert make("greedy", finalize_silence_pad=False).transcribe(clips, streaming=True) == want
