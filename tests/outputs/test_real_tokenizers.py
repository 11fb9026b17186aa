"""The built-in tokenizers under the output processor: WeNet's texts, words of its recordings."""

from __future__ import annotations

import json

import pytest

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions
from oasr_core.tokenizers.symbol_table import SymbolTableTokenizer

WORDS = DecodingOptions(word_timestamps=True)


@pytest.fixture(scope="module")
def processor(wenet_digits):
    spec = TokenizerSpec("symbol_table", {"symbols": wenet_digits / "units.txt"})
    return OutputProcessor(SymbolTableTokenizer.from_spec(spec), 0.04)


@pytest.fixture(scope="module")
def utterances(wenet_digits):
    return json.loads((wenet_digits / "oracle" / "decode_results.json").read_text())["utterances"]


def test_texts_and_words_of_the_digits(processor, utterances):
    assert len(utterances) == 20
    for name, modes in utterances.items():
        for greedy in (results["ctc_greedy_search"] for results in modes.values()):
            tokens = greedy["tokens"]
            frames = list(range(2, 2 + 3 * len(tokens), 3))
            hyps = Hypotheses([Hypothesis(tokens, frames, [-0.1] * len(tokens))])
            out = processor.final(name, hyps, WORDS, finish_reason="stop", duration=100.0)
            assert out.text == greedy["text"]
            assert [word.word for word in out.words] == greedy["text"].split()
            state = processor.open()
            for cut in range(len(tokens) + 1):
                partial = processor.partial(state, name, Hypotheses([Hypothesis(tokens[:cut])]), WORDS)
                assert out.text.startswith(partial.text)
            assert partial.text == out.text


def test_a_lone_word_mark_does_not_start_a_word(processor):
    # Unit 36 is the bare word mark, 43 "▁SIX", 34 "X": the mark's own frame belongs to no word.
    hyps = Hypotheses([Hypothesis([36, 34, 36, 43, 34], [0, 10, 20, 30, 31])])
    out = processor.final("r", hyps, WORDS, finish_reason="stop", duration=100.0)
    assert [(word.word, word.start, word.end) for word in out.words] == [("X", 0.4, 0.44), ("SIXX", 1.2, 1.28)]
