"""The engine with its default decoder on the trained digits model, against WeNet's prefix beam search from the wav."""

from __future__ import annotations

import json

import pytest

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions


@pytest.fixture(scope="module")
def results(wenet_digits):
    return json.loads((wenet_digits / "oracle" / "decode_results.json").read_text())["utterances"]


@pytest.fixture(scope="module")
def waveforms(wenet_digits, results):
    return {name: load_audio(wenet_digits / "test_wavs" / f"{name}.wav").samples for name in results}


@pytest.fixture(scope="module")
def make_engine(wenet_digits):
    engines = []

    def build(**settings):
        values = {"ckpt_dir": wenet_digits, "device": "cpu", "dtype": "float32", "gc_freeze": False}
        engines.append(ASREngine(EngineConfig(**{**values, **settings})))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("offline", {}),
        ("stream_c16_lall", {"chunk_size": 16}),
        ("stream_c16_l4", {"chunk_size": 16, "num_left_chunks": 4}),
    ],
)
def test_transcripts_equal_wenets(make_engine, results, waveforms, kind, settings):
    outputs = make_engine(**settings).transcribe_outputs(list(waveforms.values()), streaming=kind != "offline")
    assert len(outputs) == 20
    for name, output in zip(waveforms, outputs, strict=True):
        want = results[name][kind]["ctc_prefix_beam_search"]
        assert (output.text, output.tokens) == (want["text"], [want["tokens"]]), name


@pytest.mark.parametrize("streaming", [False, True])
def test_n_best_with_wenets_pruning_equals_wenets(make_engine, results, waveforms, streaming):
    engine = make_engine(decode_options={"first_beam_size": 10, "blank_threshold": 1.0}, chunk_size=16)
    kind = "stream_c16_lall" if streaming else "offline"
    options = DecodingOptions(n_best=10, word_timestamps=True)
    outputs = engine.transcribe_outputs(list(waveforms.values()), streaming=streaming, decoding=options)
    for name, output in zip(waveforms, outputs, strict=True):
        want = {
            tuple(hyp["tokens"]): hyp["ctc_score"] for hyp in results[name][kind]["ctc_prefix_beam_search"]["nbest"]
        }
        got = dict(zip(map(tuple, output.tokens), output.scores, strict=True))
        assert got == pytest.approx(want, abs=5e-3), name
        assert [word.word for word in output.words] == output.text.split()
        assert all(0.0 < word.confidence <= 1.0 for word in output.words)
        assert output.confidence > 0.5


def test_hotwords_reach_the_decoder(make_engine, waveforms):
    engine = make_engine()
    audio = [waveforms["utt11_5d"]]
    (plain,) = engine.transcribe_outputs(audio, streaming=False)
    first = plain.text.split()[0]
    avoided = DecodingOptions(hotwords=[{"phrase": first, "boost": -30.0}, "日本"])
    for streaming in (False, True):
        (output,) = engine.transcribe_outputs(audio, streaming=streaming, decoding=avoided)
        assert first not in output.text.split()
        assert output.unencoded_hotwords == ["日本"]
    (again,) = engine.transcribe_outputs(audio, streaming=False)
    assert (again.text, again.tokens, again.scores) == (plain.text, plain.tokens, plain.scores)


def test_hotwords_and_n_best_are_refused_where_they_cannot_be_served(make_engine, waveforms):
    audio = waveforms["utt01_1d"]
    strict = make_engine(decode_options={"strict_hotwords": True})
    with pytest.raises(RequestRefusedError, match="'日本' cannot be encoded"):
        strict.add_request(audio, decoding=DecodingOptions(hotwords=["日本"]))
    with pytest.raises(RequestRefusedError, match="n_best=11"):
        strict.add_request(audio, decoding=DecodingOptions(n_best=11))
    greedy = make_engine(decode_options={"search": "greedy"})
    with pytest.raises(RequestRefusedError, match="hotwords="):
        greedy.add_request(audio, decoding=DecodingOptions(hotwords=["ONE"]))
    assert (strict.num_waiting, greedy.num_waiting) == (0, 0)


def test_ended_streams_return_their_places(make_engine, waveforms):
    engine = make_engine(max_batch_size=4)
    pool = engine._parts.strategy.search.pool
    names = list(waveforms)[:6]
    ids = [engine.add_streaming_request() for _ in names]
    for request_id, name in zip(ids, names, strict=True):
        engine.feed_chunk(request_id, waveforms[name], is_last=True)
    engine.step()
    assert pool.num_open == 4
    engine.abort_request(ids[0])
    engine.run()
    assert pool.num_open == 0
