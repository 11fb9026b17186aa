"""The testing tools of decoding: scripted posteriors and the byte tokenizer."""

from __future__ import annotations

import math

import pytest
import torch

from oasr_core.testing.decoding import ByteTokenizer, Run, scripted_log_probs, scripted_output


def test_rows_are_distributions_with_the_posterior_asked_for():
    log_probs, lengths = scripted_log_probs([[Run(2, 3, 0.7), Run(0)], [Run(1, 1, 1.0)]], 4)
    assert (tuple(log_probs.shape), log_probs.dtype, lengths.tolist()) == ((2, 4, 4), torch.float32, [4, 1])
    assert log_probs[0].exp().sum(-1).tolist() == pytest.approx([1.0] * 4)
    assert log_probs[0, :3, 2].exp().tolist() == pytest.approx([0.7] * 3)
    assert log_probs[0].argmax(-1).tolist() == [2, 2, 2, 0]
    assert log_probs[1, 0].tolist() == [-math.inf, 0.0, -math.inf, -math.inf]


def test_padding_is_what_was_asked_for():
    assert scripted_log_probs([[], [Run(0)]], 2)[0][0].isnan().all()
    out = scripted_output([[], [Run(0)]], 2, padding=5.0)
    assert out.log_probs[0].tolist() == [[5.0, 5.0]]
    assert tuple(out.hidden.shape) == (2, 1, 1)
    assert tuple(scripted_log_probs([], 3)[0].shape) == (0, 0, 3)


@pytest.mark.parametrize("run", [Run(4), Run(-1), Run(0, 1, 1.5)])
def test_a_script_that_does_not_fit_is_refused(run):
    with pytest.raises(ValueError, match="does not fit a vocabulary of 4"):
        scripted_log_probs([[run]], 4)


def test_the_byte_tokenizer_keeps_its_contracts():
    tokenizer = ByteTokenizer()
    ids = [0, *tokenizer.encode("a你"), 0]
    assert tokenizer.decode(ids) == "a你"
    assert tokenizer.token_pieces(ids) == ["", "a", "", "", "你", ""]
    decoder = tokenizer.incremental()
    assert decoder.push(ids[:4]) + decoder.flush() == "a\ufffd"
    assert tokenizer.decode(ids[:4]) == "a\ufffd"
    assert tokenizer.token_pieces([]) == []
