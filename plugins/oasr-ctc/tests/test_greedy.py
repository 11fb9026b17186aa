"""Greedy search, offline: collapse, blanks, frames, posteriors, scores, ties, invalid numbers."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
import torch

from oasr_core.decoding.base import DecodeStrategy
from oasr_core.errors import PluginContractError
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import Run, scripted_output
from oasr_ctc.greedy import BestPath, InvalidLogProbsError, _best_path_device, best_path

NAN, INF = math.nan, math.inf


def output(rows, lengths=None):
    log_probs = torch.as_tensor(rows, dtype=torch.float32)
    lengths = torch.full((len(log_probs),), log_probs.shape[1]) if lengths is None else torch.as_tensor(lengths)
    return EncoderOutput(torch.zeros(1), lengths, log_probs)


def decode(strategy, out):
    return strategy.decode_offline(out, [DecodingOptions()] * len(out.lengths))


def test_repeats_collapse_and_a_blank_between_separates(make_strategy):
    out = scripted_output([[Run(0, 2), Run(3, 3), Run(4), Run(0), Run(4, 2), Run(0, 5)]], 5)
    (hyps,) = decode(make_strategy(search="greedy"), out)
    assert hyps.best.tokens == [3, 4, 4]
    assert hyps.best.frames == [2, 5, 7]
    assert hyps.trailing_silence_frames == 5
    assert len(hyps.nbest) == 1


def test_posterior_is_the_larger_of_the_first_frame_and_the_next(make_strategy):
    rising = [Run(3, 1, 0.6), Run(3, 1, 0.8), Run(3, 1, 0.95)]
    falling = [Run(3, 1, 0.7), Run(0, 1, 0.9)]
    at_the_end = [Run(0, 2, 0.9), Run(3, 1, 0.5)]
    raised_by_another_label = [Run(3, 1, 0.3), Run(4, 1, 0.4)]
    out = scripted_output([rising, falling, at_the_end, raised_by_another_label], 5)
    best = [hyps.best for hyps in decode(make_strategy(search="greedy"), out)]
    assert math.exp(best[0].token_log_probs[0]) == pytest.approx(0.8)
    assert math.exp(best[1].token_log_probs[0]) == pytest.approx(0.7)
    assert math.exp(best[2].token_log_probs[0]) == pytest.approx(0.5)
    assert [math.exp(x) for x in best[3].token_log_probs] == pytest.approx([0.3, 0.4])


def test_score_is_the_log_posterior_of_the_path(make_strategy):
    out = scripted_output([[Run(0, 2, 0.5), Run(3, 1, 0.25 + 0.5)]], 5)
    (hyps,) = decode(make_strategy(search="greedy"), out)
    assert hyps.best.score == pytest.approx(2 * math.log(0.5) + math.log(0.75), abs=1e-6)


@pytest.mark.parametrize("blank_id", [0, 2, 4])
def test_equals_the_textbook(make_strategy, textbook, blank_id):
    rng = random.Random(7)
    strategy = make_strategy(search="greedy", blank_id=blank_id)
    for _ in range(50):
        logits = torch.tensor([[rng.gauss(0, 2) for _ in range(5)] for _ in range(rng.randint(1, 12))])
        log_probs = logits.log_softmax(-1)
        (hyps,) = decode(strategy, output(log_probs[None]))
        want = textbook(log_probs.tolist(), blank_id)
        assert (hyps.best.tokens, hyps.best.frames) == (want.tokens, want.frames)
        assert hyps.best.token_log_probs == want.log_probs
        assert hyps.best.score == pytest.approx(want.score, abs=1e-6)
        assert hyps.trailing_silence_frames == want.silence


def test_the_score_is_the_best_over_all_paths(make_strategy):
    log_probs = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    (hyps,) = decode(make_strategy(search="greedy", vocab_size=3), output(log_probs[None]))
    grid = np.indices((3,) * 4).reshape(4, -1).T
    paths = {tuple(path): sum(log_probs[t, label].item() for t, label in enumerate(path)) for path in grid.tolist()}
    assert hyps.best.score == pytest.approx(max(paths.values()), abs=1e-6)


@pytest.mark.parametrize("find", [best_path, lambda lp, n, c: _best_path_device(lp, n, torch.tensor(c))])
@pytest.mark.parametrize("vocab", [3, 17, 300, 5000])
def test_the_lowest_id_wins_a_tie_wherever_it_lies(find, vocab):
    tied = torch.full((1, 64, vocab), -9.0)
    want = []
    rng = random.Random(vocab)
    for frame in range(64):
        ids = sorted(rng.sample(range(vocab), rng.randint(2, min(vocab, 40))))
        tied[0, frame, ids] = -0.5
        want.append(ids[0])
    path = find(tied, torch.tensor([64]), [0])
    assert path.labels[0].tolist() == want
    assert find(tied.transpose(1, 2).contiguous().transpose(1, 2), torch.tensor([64]), [0]).labels[0].tolist() == want


def test_host_and_device_arithmetic_agree():
    log_probs = torch.randn(3, 9, 40, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_probs[1, 4:] = NAN
    lengths = torch.tensor([9, 4, 0])
    carried = [0, 7, 39]
    host, device = best_path(log_probs, lengths, carried), _best_path_device(log_probs, lengths, torch.tensor(carried))
    for name in BestPath._fields:
        a, b = getattr(host, name), getattr(device, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a[1:2, :4] if a.ndim == 2 else a, b[1:2, :4] if b.ndim == 2 else b)
        np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_cuda_gives_what_the_host_gives(make_strategy, vocab):
    log_probs = torch.randn(4, 50, vocab, generator=torch.Generator().manual_seed(2)).mul(4).round().log_softmax(-1)
    lengths = torch.tensor([50, 1, 0, 33])
    host, device = output(log_probs, lengths), output(log_probs, lengths)
    device.log_probs, device.lengths = log_probs.cuda(), lengths.cuda()
    assert decode(make_strategy(vocab, search="greedy"), host) == decode(make_strategy(vocab, search="greedy"), device)


def test_all_blank_and_no_frames_give_empty_transcripts(make_strategy):
    out = scripted_output([[Run(0, 4)], []], 5)
    blank, nothing = decode(make_strategy(search="greedy"), out)
    for hyps, silence in ((blank, 4), (nothing, 0)):
        assert (hyps.best.tokens, hyps.best.frames, hyps.best.token_log_probs) == ([], [], [])
        assert hyps.trailing_silence_frames == silence
    assert nothing.best.score == 0.0


def test_a_batch_without_frames_or_rows(make_strategy):
    (hyps,) = decode(make_strategy(search="greedy"), output(torch.zeros(1, 0, 5)))
    assert hyps.best.tokens == []
    assert decode(make_strategy(search="greedy"), output(torch.zeros(0, 3, 5), torch.zeros(0, dtype=torch.int64))) == []


@pytest.mark.parametrize("blank_id", [0, 3])
def test_frames_without_any_posterior_count_as_blank(make_strategy, blank_id):
    rows = torch.full((1, 4, 5), -INF)
    (hyps,) = decode(make_strategy(search="greedy", blank_id=blank_id), output(rows))
    assert (hyps.best.tokens, hyps.best.score, hyps.trailing_silence_frames) == ([], 0.0, 4)
    rows[0, 1] = torch.tensor([0.1, 0.1, 0.6, 0.1, 0.1]).log()
    (hyps,) = decode(make_strategy(search="greedy", blank_id=blank_id), output(rows))
    assert (hyps.best.tokens, hyps.best.frames) == ([2], [1])
    assert hyps.best.score == pytest.approx(math.log(0.6))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", [(0, 0, 0), (0, 2, 4)])
def test_nan_and_inf_are_refused_and_the_rows_named(make_strategy, value, place):
    out = scripted_output([[Run(3, 3)], [Run(4, 3)]], 5)
    out.log_probs[place] = value
    with pytest.raises(InvalidLogProbsError, match=rf"row\(s\) \[0\].*frame {place[1]} of row 0") as caught:
        decode(make_strategy(search="greedy"), out)
    assert caught.value.rows == (0,)
    assert pickle.loads(pickle.dumps(caught.value)).rows == (0,)


@pytest.mark.parametrize("padding", [NAN, INF, -INF, 1e4, 0.0])
def test_padding_changes_nothing(make_strategy, padding):
    scripts = [[Run(3, 2), Run(0), Run(4)], [Run(2, 9)], [Run(4)], []]
    alone = [decode(make_strategy(search="greedy"), scripted_output([script], 5))[0] for script in scripts]
    assert decode(make_strategy(search="greedy"), scripted_output(scripts, 5, padding=padding)) == alone


def test_results_own_their_lists(make_strategy):
    strategy = make_strategy(search="greedy")
    first = decode(strategy, scripted_output([[Run(3, 2)]], 5))[0]
    decode(strategy, scripted_output([[Run(4, 2)]], 5))
    assert first.best.tokens == [3]


def test_contract_violations_are_named(make_strategy):
    out = scripted_output([[Run(3)]], 5)
    with pytest.raises(PluginContractError, match="2 requests and log_probs of 1 rows"):
        make_strategy(search="greedy").decode_offline(out, [DecodingOptions()] * 2)
    out.log_probs = None
    with pytest.raises(PluginContractError, match="consumes log_probs"):
        decode(make_strategy(search="greedy"), out)


def test_the_strategy_states_what_it_is(make_strategy):
    strategy = make_strategy(search="greedy")
    assert isinstance(strategy, DecodeStrategy)
    assert (strategy.oasr_api, strategy.requires, strategy.consumes) == ("1.0", ("ctc",), "log_probs")
    assert set(strategy.modes) == {"offline", "streaming"}
    assert strategy.honours == {"word_timestamps", "hotwords"}
