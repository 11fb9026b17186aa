"""The life of a request: admission, feeding, ending, aborting; one terminal output each, to one consumer."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oasr_core.errors import (
    InvalidAudioError,
    OasrError,
    RequestRefusedError,
    StreamClosedError,
    UnknownRequestError,
)
from oasr_core.request import DecodingOptions
from oasr_core.testing.markers import marker_audio, spell

TOKENS = [1, 2, 3, 0, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11]
TEXT = spell(TOKENS)


def feed_all(engine, request_id, audio, piece):
    for start in range(0, max(len(audio), 1), piece):
        engine.feed_chunk(request_id, audio[start : start + piece], is_last=start + piece >= len(audio))


@pytest.mark.parametrize("streaming", [True, False])
def test_whole_audio(engine, streaming):
    audio = marker_audio(TOKENS)
    assert engine.transcribe(audio, streaming=streaming) == TEXT
    assert engine.transcribe([audio, audio[:1600], audio], streaming=streaming) == [TEXT, "a", TEXT]


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "column", "float64"])
def test_what_a_waveform_may_be(engine, kind):
    audio = marker_audio(TOKENS)
    given_ = {
        "tensor": audio,
        "array": audio.numpy(),
        "list": audio.tolist(),
        "column": audio[:, None],
        "float64": audio.double().numpy(),
    }[kind]
    assert engine.transcribe(given_, streaming=False) == TEXT


def test_mixed_pools_on_one_engine(engine):
    audio = marker_audio(TOKENS)
    ids = [engine.add_request(audio, streaming=i % 2 == 0) for i in range(7)]
    finals = {output.request_id: output.text for output in engine.run()}
    assert finals == dict.fromkeys(ids, TEXT)


@pytest.mark.parametrize("piece", [16, 160, 777, 10_000, 10**6])
def test_feeding_before_admission_and_after(engine, piece):
    audio = marker_audio(TOKENS)
    before = engine.add_streaming_request()
    feed_all(engine, before, audio, piece)
    after = engine.add_streaming_request()
    engine.step()
    feed_all(engine, after, audio, piece)
    finals = {output.request_id: output.text for output in engine.run()}
    assert finals == {before: TEXT, after: TEXT}


def test_partials_are_cumulative_and_the_final_is_last(engine):
    request_id = engine.add_request(marker_audio(TOKENS), streaming=True)
    seen = []
    while engine.has_work:
        seen += engine.step()
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    texts = [output.text for output in seen]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == TEXT
    assert len(seen) > 2
    assert {output.request_id for output in seen} == {request_id}
    assert seen[-1].finish_reason == "stop"


@pytest.mark.parametrize(("interval", "expected"), [(1, 3), (2, 1), (0, 0), (-1, 0)])
def test_partial_decode_interval(make_engine, interval, expected):
    engine = make_engine(partial_decode_interval=interval)
    engine.add_request(marker_audio(TOKENS), streaming=True)  # four chunks: three partials and a final
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(not output.finished for output in outputs) == expected
    assert outputs[-1].text == TEXT


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.integers(0, 15), min_size=1, max_size=40),
    tail=st.integers(0, 700),
    pieces=st.lists(st.integers(80, 9000), min_size=1, max_size=12),
)
def test_no_last_word_is_lost_or_invented(engine, tokens, tail, pieces):
    """Every total length modulo the window, in any pieces: the text is what the audio spells."""
    audio = marker_audio(tokens, tail_samples=tail)
    request_id = engine.add_streaming_request()
    position = turn = 0
    outputs = []
    while position < len(audio):
        size = pieces[turn % len(pieces)]
        turn += 1
        engine.feed_chunk(request_id, audio[position : position + size], is_last=position + size >= len(audio))
        position += size
        if turn % 3 == 0:
            outputs += engine.step()
    (final,) = [output for output in outputs + engine.run() if output.finished]
    assert final.text == spell(tokens)
    assert engine.transcribe(audio, streaming=False) == spell(tokens)


@pytest.mark.parametrize("samples", [0, 1, 159, 160, 399, 7 * 160 - 1])
@pytest.mark.parametrize("streaming", [True, False])
def test_audio_too_short_for_a_frame_ends_empty(engine, samples, streaming):
    (output,) = engine.transcribe_outputs([torch.zeros(samples)], streaming=streaming)
    assert (output.text, output.tokens, output.finish_reason) == ("", [[]], "stop")


def test_a_stream_without_audio_ends_empty(engine):
    request_id = engine.add_streaming_request()
    engine.feed_chunk(request_id, None, is_last=True)
    (final,) = engine.run()
    assert (final.text, final.finished, final.finish_reason) == ("", True, "stop")


def test_run_returns_when_a_stream_waits_for_audio(engine):
    request_id = engine.add_streaming_request()
    engine.feed_chunk(request_id, marker_audio(TOKENS)[:5000])
    assert engine.run() == []
    assert engine.num_running == 1
    engine.feed_chunk(request_id, marker_audio(TOKENS)[5000:], is_last=True)
    assert [output.text for output in engine.run()] == [TEXT]
    assert engine.num_running == engine.num_waiting == 0


def test_the_state_machine_of_feeding(engine):
    audio = marker_audio(TOKENS)
    with pytest.raises(UnknownRequestError, match="no request 'nobody'") as unknown:
        engine.feed_chunk("nobody", audio)
    assert isinstance(unknown.value, KeyError)
    assert isinstance(unknown.value, OasrError)

    request_id = engine.add_streaming_request(request_id="mine")
    engine.feed_chunk(request_id, audio, is_last=True)
    with pytest.raises(StreamClosedError, match="has had its last piece"):
        engine.feed_chunk(request_id, audio)
    with pytest.raises(RequestRefusedError, match="request id 'mine' is in use"):
        engine.add_streaming_request(request_id="mine")
    assert [output.text for output in engine.run()] == [TEXT]
    with pytest.raises(StreamClosedError, match="'mine' has finished") as closed:
        engine.feed_chunk(request_id, audio)
    assert isinstance(closed.value, KeyError)
    with pytest.raises(KeyError):
        engine.abort_request(request_id)

    offline = engine.add_request(audio, streaming=False)
    with pytest.raises(RequestRefusedError, match="is offline"):
        engine.feed_chunk(offline, audio)
    assert [output.text for output in engine.run()] == [TEXT]


@pytest.mark.parametrize("when", ["waiting", "running", "offline"])
def test_abort_gives_one_terminal_output(engine, when):
    audio = marker_audio(TOKENS)
    if when == "offline":
        request_id = engine.add_request(audio, streaming=False)
    else:
        request_id = engine.add_streaming_request()
        engine.feed_chunk(request_id, audio[:5000])
        if when == "running":
            engine.step()
    neighbour = engine.add_request(audio, streaming=True)
    engine.abort_request(request_id)
    outputs = [output for output in engine.run() if output.request_id == request_id]
    assert [(output.finish_reason, output.finished) for output in outputs] == [("abort", True)]
    with pytest.raises(StreamClosedError):
        engine.feed_chunk(request_id, audio)
    assert engine.num_running == engine.num_waiting == 0
    del neighbour


def test_outputs_of_transcribe_reach_no_one_else(engine):
    audio = marker_audio(TOKENS)
    mine = engine.add_request(audio, streaming=True)
    assert engine.transcribe(audio, streaming=True) == TEXT
    collected = engine.run()
    assert {output.request_id for output in collected} == {mine}


def test_a_refused_piece_leaves_the_stream_alive(engine):
    audio = marker_audio(TOKENS)
    request_id = engine.add_streaming_request()
    bad = audio[:100].clone()
    bad[7] = float("nan")
    with pytest.raises(InvalidAudioError, match="7"):
        engine.feed_chunk(request_id, bad)
    engine.feed_chunk(request_id, audio, is_last=True)
    assert [output.text for output in engine.run()] == [TEXT]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("streaming", [True, False])
def test_non_finite_audio_is_refused_and_hurts_nobody(engine, bad, streaming):
    audio = marker_audio(TOKENS)
    neighbour = engine.add_request(audio, streaming=streaming)
    broken = audio.clone()
    broken[100] = bad
    with pytest.raises(InvalidAudioError, match="100"):
        engine.add_request(broken, streaming=streaming)
    assert [(output.request_id, output.text) for output in engine.run()] == [(neighbour, TEXT)]


@pytest.mark.parametrize("shape", [(2, 100), (1, 2, 50), ()])
def test_wrong_shapes_are_refused(engine, shape):
    with pytest.raises(InvalidAudioError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
        engine.add_request(np.zeros(shape, dtype=np.float32))


def test_options_that_the_strategy_does_not_honour_are_refused_by_name(engine):
    with pytest.raises(RequestRefusedError, match="language='en'"):
        engine.add_request(marker_audio(TOKENS), decoding=DecodingOptions(language="en"))
    with pytest.raises(RequestRefusedError, match="n_best"):
        engine.add_request(marker_audio(TOKENS), decoding=DecodingOptions(n_best=11))
    with pytest.raises(RequestRefusedError, match=r"is no DecodingOptions; write DecodingOptions\(name=value\)"):
        engine.add_request(marker_audio(TOKENS), decoding={"n_best": 2})
    with pytest.raises(RequestRefusedError, match="colour"):
        engine.add_request(marker_audio(TOKENS), decoding=DecodingOptions(extra={"colour": 1}))
    assert engine.num_waiting == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_word_timestamps_only_when_asked(engine, streaming):
    audio = marker_audio(TOKENS)
    (plain,) = engine.transcribe_outputs([audio], streaming=streaming)
    assert plain.words is None
    (output,) = engine.transcribe_outputs([audio], streaming=streaming, decoding=DecodingOptions(word_timestamps=True))
    assert [word.word for word in output.words] == [TEXT]
    assert output.timestamps == pytest.approx([0.04 * n for n in (0, 1, 2, 4, 5, 6, 7, 10, 11, 12, 13, 14)])
    json.dumps(output.to_dict())


def test_results_own_their_memory(engine):
    """Outputs kept from every request equal those of requests alone, also when later ones reuse the buffers."""
    streams = [marker_audio([1 + i % 15, 2, 3 + i % 12]) for i in range(12)]
    options = DecodingOptions(word_timestamps=True)
    together = engine.transcribe_outputs(streams, streaming=False, decoding=options)
    kept = [output.to_dict() for output in together]
    for audio, before, output in zip(streams, kept, together, strict=True):
        (alone,) = engine.transcribe_outputs([audio], streaming=False, decoding=options)
        assert output.to_dict() == before
        assert (output.text, output.timestamps, output.words) == (alone.text, alone.timestamps, alone.words)


@pytest.mark.parametrize("mode", ["streaming", "offline"])
def test_service_mode_pins_one_pool(make_engine, mode):
    engine = make_engine(service_mode=mode)
    audio = marker_audio(TOKENS)
    assert engine.transcribe(audio) == TEXT
    with pytest.raises(RequestRefusedError, match=f"service_mode='{mode}'"):
        engine.add_request(audio, streaming=mode == "offline")
    assert (engine.can_stream, engine.can_offline) == (mode == "streaming", mode == "offline")
    if mode == "offline":
        with pytest.raises(RequestRefusedError):
            engine.add_streaming_request()


def test_close_is_final_and_idempotent(make_engine):
    engine = make_engine()
    engine.add_streaming_request()
    engine.close()
    engine.close()
    assert engine.num_running == engine.num_waiting == 0
    with pytest.raises(RequestRefusedError, match="closed"):
        engine.add_request(marker_audio(TOKENS))


def test_audio_buffer_is_ordinary_memory_on_the_cpu(engine):
    buffer = engine.new_audio_buffer(1600)
    assert buffer.shape == (1600,)
    assert not buffer.is_pinned()


def test_describe_is_json(engine):
    facts = json.loads(json.dumps(engine.describe()))
    assert facts["modes"] == ["offline", "streaming"]
    assert facts["chunk_ms"] == 160
