"""Three small tokenizers: bytes, pieces with a word mark, characters of which one token may cover several."""

from __future__ import annotations

import pytest

from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.outputs import OutputProcessor
from oasr_core.testing.decoding import ByteTokenizer
from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer

PIECES = ["<blank>", "▁", "▁SIX", "▁TH", "REE", "▁ON", "E", "▁of▁the", ",", "<unk>", "!"]
CHARACTERS = ["<blank>", "你", "好", "世界", "，", "。", "「", "」", "OK", " ", "か", "\u3099", "한", "국"]


class TableTokenizer(Tokenizer):
    """Joins units, ``▁`` is a space, the leading space of a text is dropped, id 0 and ``<unk>`` spell nothing."""

    oasr_api = "1.0"

    def __init__(self, units):
        self.units = units
        self.whole_decodes = 0

    @classmethod
    def from_spec(cls, spec):
        return cls(PIECES)

    @property
    def vocab_size(self):
        return len(self.units)

    @property
    def special_ids(self):
        return frozenset(i for i, unit in enumerate(self.units) if unit.startswith("<"))

    def decode(self, ids):
        self.whole_decodes += 1
        return "".join(self.token_pieces(ids))

    def token_pieces(self, ids):
        decoder = self.incremental()
        return [decoder.push([token]) for token in ids]

    def incremental(self):
        return _Joiner(self)


class _Joiner(IncrementalDecoder):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.empty = True

    def push(self, ids):
        text = ""
        for token in ids:
            unit = "" if token in self.tokenizer.special_ids else self.tokenizer.units[token].replace("▁", " ")
            text += unit.lstrip() if self.empty and not text else unit
        self.empty = self.empty and not text
        return text

    def flush(self):
        return ""


@pytest.fixture
def bpe():
    return TableTokenizer(PIECES)


@pytest.fixture
def cjk():
    return TableTokenizer(CHARACTERS)


@pytest.fixture
def bytewise():
    return ByteTokenizer()


@pytest.fixture
def make_hyps():
    """``make_hyps(tokens, frames=None, log_probs=None)``: hypotheses of one transcript."""

    def build(tokens, frames=None, log_probs=None, score=-1.5):
        return Hypotheses([Hypothesis(list(tokens), frames, log_probs, score)])

    return build


@pytest.fixture
def finalise():
    """``finalise(tokenizer, hyps, options, duration=10.0) -> RequestOutput`` with frames of 40 ms."""

    def run(tokenizer, hyps, options, duration=10.0):
        processor = OutputProcessor(tokenizer, 0.04)
        return processor.final("r", hyps, options, finish_reason="stop", duration=duration)

    return run
