"""Hotwords in prefix beam search: what they change, what they do not, and what is said when they cannot be encoded."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.models.base import EncoderOutput
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions, Hotword
from oasr_core.testing.decoding import ByteTokenizer
from oasr_ctc.options import CtcOptions

TOKENIZER = ByteTokenizer()
VOCAB = TOKENIZER.vocab_size


def spell(text):
    """Frames that say ``text``; ``"a|b"`` says either, ``a`` a little more probably."""
    probs = []
    for place in text.split(" "):
        row = torch.full((VOCAB,), 1e-6)
        row[0] = 1e-3
        for letter, share in zip(place.split("|"), (0.6, 0.39), strict=False):
            row[TOKENIZER.encode(letter)[0]] = share
        blank = torch.full((VOCAB,), 1e-6)
        blank[0] = 0.99
        probs += [row, blank]
    return torch.stack(probs).log()


def decode(strategy, log_probs, hotwords=(), **options):
    out = EncoderOutput(torch.zeros(1), torch.tensor([len(log_probs)]), log_probs[None])
    return strategy.decode_offline(out, [DecodingOptions(hotwords=hotwords, **options)])[0]


def text(hyps):
    return TOKENIZER.decode(hyps.best.tokens)


@pytest.fixture(scope="module")
def beam(make_strategy):
    return make_strategy(VOCAB, search="beam")


def test_options_take_strings_mappings_and_objects():
    options = DecodingOptions(hotwords=["one", {"phrase": "two", "boost": -1}, Hotword(phrase="three", boost=0.5)])
    assert [(word.phrase, word.boost) for word in options.hotwords] == [("one", None), ("two", -1.0), ("three", 0.5)]
    assert DecodingOptions(**options.model_dump()) == options
    assert CtcOptions(search="beam", hotwords=["one"]).hotwords == (Hotword(phrase="one"),)
    for wrong in ([""], [" "], [{"phrase": "a", "boost": math.nan}], [{"boost": 1.0}], [3], "abc"):
        with pytest.raises(RequestRefusedError, match="hotwords"):
            DecodingOptions(hotwords=wrong)


def test_a_phrase_is_preferred_or_avoided(beam):
    log_probs = spell("c a|u t")
    assert text(decode(beam, log_probs)) == "cat"
    assert text(decode(beam, log_probs, ["cut"])) == "cut"
    assert text(decode(beam, log_probs, [{"phrase": "cat", "boost": -1.0}])) == "cut"
    assert text(decode(beam, log_probs, ["dog"])) == "cat"


@pytest.mark.parametrize("place", ["c a|u t x y z", "x y c a|u t z z", "x y z c a|u t"])
def test_at_the_start_in_the_middle_and_at_the_end(beam, place):
    assert "cut" in text(decode(beam, spell(place), ["cut"]))


def test_twice(beam):
    hyps = decode(beam, spell("c a|u t x c a|u t"), ["cut"])
    assert text(hyps) == "cutxcut"
    assert hyps.best.context_score == pytest.approx(2 * 3 * 1.5)


def test_only_completed_phrases_count_in_the_end(beam):
    plain = decode(beam, spell("c a|u t"), n_best=10)
    for phrase in ("cutter", "cu", "utx", "tc"):
        hyps = decode(beam, spell("c a|u t"), [{"phrase": phrase, "boost": 3.0}], n_best=10)
        for hyp in hyps.nbest:
            count = TOKENIZER.decode(hyp.tokens).count(phrase)
            assert hyp.context_score == 3.0 * len(phrase) * count
            for other in plain.nbest:
                if other.tokens == hyp.tokens:
                    assert hyp.score - hyp.context_score == pytest.approx(other.score, abs=1e-4)
        assert [hyp.score for hyp in hyps.nbest] == sorted((hyp.score for hyp in hyps.nbest), reverse=True)


def test_a_match_that_breaks_leaves_no_trace(beam):
    log_probs = spell("c a|u t")
    assert decode(beam, log_probs, [{"phrase": "cux", "boost": 0.01}]).best == decode(beam, log_probs).best


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_equals_the_dictionary_search(make_strategy, prefix_beam, data):
    vocab = data.draw(st.integers(3, 8))
    blank_id = data.draw(st.integers(0, vocab - 1))
    labels = [label for label in range(1, vocab) if label != blank_id]
    setting = {
        "beam_size": data.draw(st.integers(1, 6)),
        "first_beam_size": data.draw(st.none() | st.integers(2, 5)),
    }
    listed = data.draw(
        st.lists(st.tuples(st.lists(st.sampled_from(labels), min_size=1, max_size=4), st.floats(-3, 3)), max_size=4)
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    log_probs = (torch.randn(data.draw(st.integers(1, 16)), vocab, generator=generator) * 2).log_softmax(-1)
    phrases = [(phrase, boost) for phrase, boost in listed if TOKENIZER.decode(phrase).strip()]
    hotwords = [{"phrase": TOKENIZER.decode(phrase), "boost": boost} for phrase, boost in phrases]
    strategy = make_strategy(vocab, blank_id, search="beam", blank_threshold=1.0, **setting)
    want = prefix_beam(log_probs.tolist(), blank_id=blank_id, phrases=phrases, **setting)
    got = decode(strategy, log_probs, hotwords, n_best=setting["beam_size"])
    assert got.unencoded_hotwords == []
    assert [hyp.score for hyp in got.nbest] == pytest.approx([score for _, score, *_ in want], abs=1e-9)
    assert [hyp.context_score for hyp in got.nbest] == pytest.approx([kept for _, _, kept, _ in want], abs=1e-9)
    assert [hyp.tokens for hyp in got.nbest] == [tokens for tokens, *_ in want]
    assert [hyp.frames for hyp in got.nbest] == [frames for *_, frames in want]


def test_neighbours_keep_their_own(beam):
    log_probs = spell("c a|u t")
    out = EncoderOutput(torch.zeros(1), torch.tensor([len(log_probs)] * 3), torch.stack([log_probs] * 3))
    wanted = [DecodingOptions(), DecodingOptions(hotwords=["cut"]), DecodingOptions(hotwords=["cut", "dog"])]
    results = beam.decode_offline(out, wanted)
    assert [text(hyps) for hyps in results] == ["cat", "cut", "cut"]
    assert results[0] == decode(beam, log_probs)


def test_a_request_has_the_last_word_on_a_phrase(make_strategy):
    strategy = make_strategy(VOCAB, search="beam", hotwords=["cut"], hotword_boost=2.0)
    log_probs = spell("c a|u t")
    assert text(decode(strategy, log_probs)) == "cut"
    assert decode(strategy, log_probs).best.context_score == 6.0
    assert text(decode(strategy, log_probs, [{"phrase": "cut", "boost": 0.0}])) == "cat"
    assert text(decode(strategy, log_probs, ["dog"])) == "cut"


def test_many_lists_of_hotwords_do_not_pile_up(beam):
    for index in range(200):
        beam.search._hotwords.context(DecodingOptions(hotwords=[f"phrase {index}"]))
    assert len(beam.search._hotwords._contexts) <= 64


def test_what_cannot_be_encoded_is_reported(make_strategy):
    strategy = make_strategy(120, search="beam")  # no labels for the bytes of é
    log_probs = spell("a")[:, :120]
    hyps = decode(strategy, log_probs, ["é", "b", "é"])
    assert hyps.unencoded_hotwords == ["é"]
    processor = OutputProcessor(TOKENIZER, frame_seconds=0.04)
    output = processor.final("r", hyps, DecodingOptions(), finish_reason="stop", duration=1.0)
    assert output.unencoded_hotwords == ["é"]
    assert output.to_dict()["unencoded_hotwords"] == ["é"]
    assert processor.partial(processor.open(), "r", hyps, DecodingOptions()).unencoded_hotwords == ["é"]
    strategy.validate(DecodingOptions(hotwords=["é"]), "offline")


def test_strict_hotwords_are_refused_at_admission(make_strategy):
    strategy = make_strategy(120, search="beam", strict_hotwords=True)
    strategy.validate(DecodingOptions(hotwords=["b"]), "offline")
    with pytest.raises(
        RequestRefusedError, match=r"hotwords are refused: 'é', 'ü' cannot be encoded: the model has no"
    ):
        strategy.validate(DecodingOptions(hotwords=["é", "b", "ü"]), "offline")


def test_the_engines_own_are_checked_at_construction(make_strategy, caplog):
    with pytest.raises(ConfigError, match=r"hotwords.*'é' cannot be encoded"):
        make_strategy(120, search="beam", hotwords=["é"], strict_hotwords=True)
    with caplog.at_level(logging.WARNING):
        strategy = make_strategy(120, search="beam", hotwords=["é", "b"])
    assert "hotwords without effect: 'é'" in caplog.text
    assert decode(strategy, spell("a")[:, :120]).unencoded_hotwords == ["é"]


def test_a_tokenizer_without_encoder_says_so(make_strategy, monkeypatch):
    def refuse(self, text):
        raise RequestRefusedError("no encoder")

    monkeypatch.setattr(ByteTokenizer, "supports_encode", False)
    monkeypatch.setattr(ByteTokenizer, "encode", refuse)
    strategy = make_strategy(search="beam", strict_hotwords=True)
    with pytest.raises(RequestRefusedError, match="ByteTokenizer cannot encode text"):
        strategy.validate(DecodingOptions(hotwords=["a"]), "streaming")


def test_special_labels_are_no_hotwords(make_strategy, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [0] if text == "blank" else [3])
    strategy = make_strategy(5, blank_id=3, search="beam")
    assert decode(strategy, torch.zeros(1, 5).log_softmax(1), ["blank", "other"]).unencoded_hotwords == [
        "blank",
        "other",
    ]


def test_greedy_search_refuses_hotwords_by_name(make_strategy):
    with pytest.raises(RequestRefusedError, match=r"hotwords=.*one.* is refused by decode strategy 'ctc' \(offline\)"):
        make_strategy(search="greedy").validate(DecodingOptions(hotwords=["one"]), "offline")
