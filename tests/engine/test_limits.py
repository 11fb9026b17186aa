"""Long streams, the cache ceiling, positions, failures that are contained, and the return of every resource."""

from __future__ import annotations

import gc

import pytest
import torch

from oasr_core import gc_freeze
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import AudioTooLongError, CacheGeometryError, ConfigError, PluginError, TranscriptionError
from oasr_core.testing.markers import VOCAB, marker_audio, registered, spell, write_marker_bundle

LONG = [1 + i % (VOCAB - 1) for i in range(100)]


def finals(engine):
    return {output.request_id: output for output in engine.run()}


def test_a_stream_at_the_cache_ceiling_ends_with_length(make_engine):
    engine = make_engine(max_num_blocks=4 * 6)  # 6 blocks of 4 frames each: 24 of the 100 frames
    long = engine.add_request(marker_audio(LONG), streaming=True)
    short = engine.add_request(marker_audio(LONG[:20]), streaming=True)
    outputs = finals(engine)
    assert (outputs[long].finish_reason, outputs[long].text) == ("length", spell(LONG[:24]))
    assert (outputs[short].finish_reason, outputs[short].text) == ("stop", spell(LONG[:20]))


@pytest.mark.parametrize(
    "settings", [{"num_left_chunks": 2}, {"max_num_blocks": 24, "recycle_streaming_history": True}, {}]
)
def test_bounded_or_recycled_history_goes_on(make_engine, settings):
    engine = make_engine(**settings)
    request_id = engine.add_request(marker_audio(LONG), streaming=True)
    output = finals(engine)[request_id]
    assert (output.finish_reason, output.text) == ("stop", spell(LONG))


def test_a_stream_fed_after_its_ceiling_is_finished_not_stuck(make_engine):
    engine = make_engine(max_num_blocks=24)
    request_id = engine.add_streaming_request()
    engine.feed_chunk(request_id, marker_audio(LONG))  # not the last piece
    assert finals(engine)[request_id].finish_reason == "length"
    with pytest.raises(KeyError, match="has finished"):
        engine.feed_chunk(request_id, marker_audio(LONG), is_last=True)


def test_positions_end_cleanly_and_hurt_nobody(tmp_path):
    with registered():
        directory = write_marker_bundle(tmp_path / "limited", max_positions=64)
        config = EngineConfig(ckpt_dir=directory, device="cpu", dtype="float32", gc_freeze=False)
        with ASREngine(config) as engine:
            long = engine.add_request(marker_audio(LONG), streaming=True)
            short = engine.add_request(marker_audio(LONG[:60]), streaming=True)
            outputs = finals(engine)
            assert (outputs[long].finish_reason, outputs[long].text) == ("length", spell(LONG[:64]))
            assert (outputs[short].finish_reason, outputs[short].text) == ("stop", spell(LONG[:60]))
            with pytest.raises(AudioTooLongError, match="100 encoder frames, the model has positions for 64"):
                engine.add_request(marker_audio(LONG), streaming=False)
            assert engine.transcribe(marker_audio(LONG[:64]), streaming=False) == spell(LONG[:64])


class Fault:
    """Makes one engine stage raise when the batch contains the marked request."""

    def __init__(self, monkeypatch, target, name, error, when=lambda *args, **kwargs: True):
        original = getattr(target, name)

        def broken(*args, **kwargs):
            if when(*args, **kwargs):
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, broken)


def has_length(frames):
    return lambda features, lengths, **_: frames in list(lengths)


def test_offline_failure_is_the_culprits_own(engine, monkeypatch):
    bad = marker_audio(LONG[:30])
    Fault(monkeypatch, engine._parts.runner, "forward_offline", RuntimeError("kernel"), has_length(123))
    ids = [engine.add_request(marker_audio(LONG[:n]), streaming=False) for n in (10, 20)]
    culprit = engine.add_request(bad, streaming=False)
    outputs = finals(engine)
    assert [outputs[i].text for i in ids] == [spell(LONG[:10]), spell(LONG[:20])]
    assert (outputs[culprit].finish_reason, outputs[culprit].error_stage) == ("error", "offline_forward")
    assert "kernel" in outputs[culprit].error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_is_not_retried(engine, monkeypatch, error):
    calls = []
    Fault(monkeypatch, engine._parts.runner, "forward_offline", error, lambda *a, **k: calls.append(1) or True)
    ids = [engine.add_request(marker_audio(LONG[:n]), streaming=False) for n in (10, 20)]
    outputs = finals(engine)
    assert {outputs[i].error_stage for i in ids} == {"offline_oom"}
    assert len(calls) == 1


def test_a_streaming_failure_takes_the_ready_cohort_only(engine, monkeypatch):
    with monkeypatch.context() as patch:
        late = engine.add_streaming_request()  # has no window yet
        engine.feed_chunk(late, marker_audio(LONG[:20])[:800])
        ready = [engine.add_request(marker_audio(LONG[:20]), streaming=True) for _ in range(2)]
        Fault(patch, engine._parts.runner, "forward_streaming", RuntimeError("kernel"))
        outputs = {output.request_id: output for output in engine.step()}
        assert {outputs[i].error_stage for i in ready} == {"streaming_forward"}
        assert late not in outputs
    engine.feed_chunk(late, marker_audio(LONG[:20])[800:], is_last=True)
    assert finals(engine)[late].text == spell(LONG[:20])
    assert engine._parts.runner.backend.store.num_streams == 0


def test_feature_failure_stage(engine, monkeypatch):
    Fault(monkeypatch, engine._inputs, "extract_streaming_batch", RuntimeError("fft"))
    request_id = engine.add_request(marker_audio(LONG), streaming=True)
    assert finals(engine)[request_id].error_stage == "streaming_features"


def test_text_failure_is_one_streams_own(engine, monkeypatch):
    bad = engine.add_request(marker_audio(LONG[:9]), streaming=True)
    good = engine.add_request(marker_audio(LONG[:20]), streaming=True)
    Fault(
        monkeypatch, engine._parts.outputs, "final", ValueError("text"), lambda request_id, *a, **k: request_id == bad
    )
    outputs = finals(engine)
    assert outputs[bad].finish_reason == "error"
    assert outputs[good].text == spell(LONG[:20])


def test_transcribe_raises_what_failed(engine, monkeypatch):
    Fault(monkeypatch, engine._parts.runner, "forward_offline", RuntimeError("kernel"))
    with pytest.raises(TranscriptionError, match="recording 0: offline_forward: RuntimeError: kernel"):
        engine.transcribe([marker_audio(LONG[:9])], streaming=False)
    assert engine.num_waiting == 0


def test_every_block_row_and_session_returns(engine):
    store = engine._parts.runner.backend.store
    free = store.free_blocks
    generator = torch.Generator().manual_seed(7)
    for turn in range(300):
        request_id = engine.add_streaming_request()
        tokens = torch.randint(0, VOCAB, (int(torch.randint(1, 30, (1,), generator=generator)),), generator=generator)
        engine.feed_chunk(request_id, marker_audio(tokens.tolist()), is_last=turn % 3 != 0)
        if turn % 5 == 0:
            engine.step()
        if turn % 3 == 0 and engine._loop.lookup(request_id) is not None:
            engine.abort_request(request_id)
    engine.run()
    assert store.free_blocks == free
    assert store.num_streams == 0
    assert engine._parts.streaming._live == {}
    assert engine._loop.unfinished() == []
    assert engine._loop.owned == {}


def test_a_reused_row_says_nothing_of_its_past(engine):
    assert engine.transcribe(marker_audio(LONG), streaming=True) == spell(LONG)
    assert engine.transcribe(torch.zeros(16000), streaming=True) == ""


def test_gc_freeze_is_counted(make_engine):
    before = gc_freeze.holders()
    one, two = make_engine(gc_freeze=True), make_engine(gc_freeze=True)
    assert gc_freeze.holders() == before + 2
    assert gc.get_freeze_count() > 0
    one.close()
    assert gc.get_freeze_count() > 0
    two.close()
    assert gc_freeze.holders() == before


def test_configuration_refusals(make_engine):
    with pytest.raises(ConfigError, match="ckpt_dir is empty"):
        make_engine(ckpt_dir="")
    with pytest.raises(ConfigError, match=r"CUDA is not available|is not a device"):
        make_engine(device="cuda:99")
    with pytest.raises(ConfigError, match="'cpux' is not a device"):
        make_engine(device="cpux")
    with pytest.raises(PluginError, match=r"fcfs \(oasr-core\), sjf \(oasr-core\), window"):
        make_engine(schedule_policy="sjff")
    with pytest.raises(PluginError, match="oasr-llm"):
        make_engine(decode_method="llm")
    with pytest.raises(ConfigError, match="unknown option 'beem'"):
        make_engine(decode_options={"beem": 3})
    with pytest.raises(CacheGeometryError, match="chunk_size=8 is larger than block_size_frames=4"):
        make_engine(chunk_size=8, block_size_frames=4)


def test_dense_cache_gives_the_same(make_engine):
    audio = marker_audio(LONG)
    assert make_engine(use_paged_cache=False).transcribe(audio, streaming=True) == spell(LONG)
    capped = make_engine(use_paged_cache=False, max_num_blocks=24)
    request_id = capped.add_request(audio, streaming=True)
    assert finals(capped)[request_id].finish_reason == "length"
