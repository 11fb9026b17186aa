"""Public bug cases on CTC search and phrase boosting, from scripted posteriors."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderOutput
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer, Run, scripted_output
from oasr_ctc.options import CtcOptions
from oasr_ctc.strategy import CtcStrategy

TOKENIZER = ByteTokenizer()


@pytest.fixture
def ctc():
    def build(vocab_size=TOKENIZER.vocab_size, **options):
        model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=0, vocab_size=vocab_size)})
        return CtcStrategy(DecodeContext(model, TOKENIZER, CtcOptions(**options)))

    return build


def decode(strategy, log_probs, **options):
    out = EncoderOutput(torch.zeros(1), torch.tensor([len(log_probs)]), log_probs[None])
    return strategy.decode_offline(out, [DecodingOptions(**options)])[0]


def sums(log_probs):
    """Summed probability of every token sequence, over all alignments."""
    total: dict = {}
    for labels in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        tokens = tuple(label for label, _ in itertools.groupby(labels) if label)
        probability = math.exp(sum(log_probs[t, label].item() for t, label in enumerate(labels)))
        total[tokens] = total.get(tokens, 0.0) + probability
    return total


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_case_33_blank_is_no_extension_and_scores_are_sums(ctc, frames):
    # espnet/espnet#1508: blank was allowed as a prefix extension.
    strategy = ctc(3, beam_size=64, blank_threshold=1.0)
    for seed in range(10):
        log_probs = (torch.randn(frames, 3, generator=torch.Generator().manual_seed(seed)) * 2).log_softmax(-1)
        want = sums(log_probs)
        nbest = decode(strategy, log_probs, n_best=64).nbest
        assert all(0 not in hyp.tokens for hyp in nbest)
        assert {tuple(hyp.tokens): math.exp(hyp.score) for hyp in nbest} == pytest.approx(want, abs=1e-6)
        assert [hyp.score for hyp in nbest] == sorted((hyp.score for hyp in nbest), reverse=True)


@pytest.mark.parametrize("script", [[1, 1], [1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 2, 1], [1, 1, 0, 1, 1]])
def test_case_34_repeats_with_and_without_blank(ctc, script):
    # wenet-e2e/wenet#2398: one of two implementations lacked the extension behind a blank. Here both are compared
    # with each other and with the sum over all alignments.
    compiled, tensors = ctc(3, beam_size=64, blank_threshold=1.0), ctc(3, beam_size=64, blank_threshold=1.0)
    tensors.search._advance_host = tensors.search._advance_device
    for peak in (0.4, 0.7, 0.95):
        log_probs = scripted_output([[Run(label, 1, peak) for label in script]], 3).log_probs[0]
        want = sums(log_probs)
        for strategy in (compiled, tensors):
            nbest = decode(strategy, log_probs, n_best=64).nbest
            assert {tuple(hyp.tokens): math.exp(hyp.score) for hyp in nbest} == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("boost", [0.0, 2.0, -2.0])
@pytest.mark.parametrize("said", ["ab", "abc", "xab", "abxab", "abab", "xa", "ax"])
def test_case_36_phrases_of_either_sign(ctc, boost, said):
    # wenet-e2e/wenet#686: the state was not initialised, and a negative score deleted every link.
    log_probs = scripted_output([[Run(token, 1, 0.9) for token in TOKENIZER.encode(said)]], 257).log_probs[0]
    hotwords = [{"phrase": phrase, "boost": boost} for phrase in ("ab", "abc")]
    boosted = decode(ctc(), log_probs, hotwords=hotwords, n_best=10)
    for hyp in boosted.nbest:
        text = TOKENIZER.decode(hyp.tokens)
        assert hyp.context_score == boost * (2 * text.count("ab") + 3 * text.count("abc"))
    if boost == 0.0:
        assert boosted == decode(ctc(), log_probs, n_best=10)
    if boost >= 0.0:
        assert TOKENIZER.decode(boosted.best.tokens) == said
    if boost < 0.0 and "ab" in said:
        assert "ab" not in TOKENIZER.decode(boosted.best.tokens)


def test_case_52_no_silent_cap_on_tokens(ctc):
    # chiendb97/oasr: 200 tokens, and no word about the rest.
    processor = OutputProcessor(TOKENIZER, frame_seconds=0.04)
    out = scripted_output([[Run(1 + index % 2, 1, 0.999) for index in range(250)]], 3)
    for cap, count, reason in ((None, 250, "stop"), (200, 200, "length")):
        (hyps,) = ctc(3, max_seq_len=cap).decode_offline(out, [DecodingOptions()])
        final = processor.final("r", hyps, DecodingOptions(), finish_reason="stop", duration=10.0)
        assert (len(final.tokens[0]), final.finish_reason) == (count, reason)
