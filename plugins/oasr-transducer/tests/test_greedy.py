"""Greedy search, offline: against the textbook, batches, padding, max_sym_per_frame, durations, invalid numbers."""

from __future__ import annotations

import math
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.decoding.base import DecodeStrategy
from oasr_core.errors import PluginContractError
from oasr_core.request import DecodingOptions
from oasr_transducer.errors import InvalidLogitsError

UTTERANCES = st.lists(st.lists(st.integers(0, 19), max_size=30), min_size=1, max_size=5)


def decode(strategy, out):
    return strategy.decode_offline(out, [DecodingOptions()] * len(out.lengths))


def check(hyps, want, frames):
    assert (hyps.best.tokens, hyps.best.frames) == (want.tokens, want.frames)
    assert hyps.best.token_log_probs == pytest.approx(want.log_probs, abs=1e-5)
    assert hyps.best.score == pytest.approx(want.score, abs=1e-4)
    assert hyps.trailing_silence_frames == len(frames) - 1 - (want.frames[-1] if want.frames else -1)
    assert hyps.stable_tokens == len(want.tokens)
    assert len(hyps.nbest) == 1


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 50),
    utterances=UTTERANCES,
    max_sym=st.integers(1, 4),
    blank_id=st.sampled_from([0, 3, 5]),
    unk_id=st.sampled_from([None, 2]),
    penalty=st.sampled_from([0.0, 0.7]),
)
def test_equals_the_textbook(
    make_script, as_output, textbook_greedy, seed, utterances, max_sym, blank_id, unk_id, penalty
):
    script = make_script(seed, blank_id=blank_id, unk_id=unk_id)
    strategy = script.strategy(max_sym_per_frame=max_sym, blank_penalty=penalty)
    for hyps, frames in zip(decode(strategy, as_output(utterances)), utterances, strict=True):
        check(hyps, textbook_greedy(script, frames, max_sym=max_sym, penalty=penalty), frames)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 50),
    utterances=UTTERANCES,
    max_sym=st.integers(1, 3),
    durations=st.sampled_from([(0, 1, 2, 3, 4), (1, 2), (0, 1), (4, 0)]),
    blank_id=st.sampled_from([0, 5]),
)
def test_durations_equal_the_textbook(
    make_script, as_output, textbook_greedy, seed, utterances, max_sym, durations, blank_id
):
    script = make_script(seed, blank_id=blank_id, durations=durations)
    strategy = script.strategy(max_sym_per_frame=max_sym)
    for hyps, frames in zip(decode(strategy, as_output(utterances)), utterances, strict=True):
        check(hyps, textbook_greedy(script, frames, max_sym=max_sym), frames)


@pytest.mark.parametrize("durations", [None, (0, 1, 3)])
@pytest.mark.parametrize("max_sym", [1, 3])
def test_the_way_for_devices_gives_the_same(
    request, make_script, as_output, textbook_greedy, on_a_device, durations, max_sym
):
    rng = random.Random(5)
    utterances = [[rng.randrange(20) for _ in range(length)] for length in (40, 0, 3, 17, 25)]
    script = make_script(9, durations=durations)
    for hyps, frames in zip(
        decode(script.strategy(max_sym_per_frame=max_sym), as_output(utterances)), utterances, strict=True
    ):
        check(hyps, textbook_greedy(script, frames, max_sym=max_sym), frames)


def test_the_predictor_runs_for_rows_that_speak_alone(make_script, as_output):
    script = make_script(3, blank_bias=3.0)
    hyps = decode(script.strategy(), as_output([list(range(20)), list(range(10)), [4] * 3]))
    assert 0 < sum(len(h.best.tokens) for h in hyps) < 33
    assert script.interface.predictor.rows == 1 + sum(len(h.best.tokens) for h in hyps)


def test_unset_max_sym_per_frame_is_the_models(make_script, as_output, textbook_greedy):
    frames = list(range(20))
    script = make_script(1, max_sym=3, blank_bias=0.0)
    (hyps,) = decode(script.strategy(), as_output([frames]))
    check(hyps, textbook_greedy(script, frames, max_sym=3), frames)
    assert max(map(hyps.best.frames.count, hyps.best.frames)) > 1


def test_a_silent_label_wins_a_tie(make_script, as_output):
    script = make_script(0, blank_id=5)
    script.table.zero_()
    (hyps,) = decode(script.strategy(), as_output([[0, 1]]))
    assert hyps.best.tokens == []
    assert hyps.best.score == pytest.approx(2 * math.log(1 / 6))


@pytest.mark.parametrize("max_sym", [1, 4])
def test_labels_without_end_stop_at_max_sym_per_frame(make_script, as_output, max_sym):
    script = make_script(0)
    script.table.zero_()
    script.table[..., 3] = 5.0
    (hyps,) = decode(script.strategy(max_sym_per_frame=max_sym), as_output([[0, 1, 2]]))
    assert hyps.best.frames == [frame for frame in range(3) for _ in range(max_sym)]


@pytest.mark.parametrize("padding", [math.nan, 3.0])
def test_padding_and_neighbours_change_nothing(make_script, as_output, padding):
    rng = random.Random(2)
    utterances = [[rng.randrange(20) for _ in range(length)] for length in (9, 0, 30, 1)]
    strategy = make_script(4).strategy()
    alone = [decode(strategy, as_output([frames]))[0] for frames in utterances]
    for hyps, want in zip(decode(strategy, as_output(utterances, padding)), alone, strict=True):
        assert (hyps.best.tokens, hyps.best.frames) == (want.best.tokens, want.best.frames)
        assert hyps.best.score == pytest.approx(want.best.score, abs=1e-5)


def test_no_rows(make_script, as_output):
    assert decode(make_script(0).strategy(), as_output([])) == []


@pytest.mark.parametrize("search", ["greedy", "beam"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "-inf everywhere"])
def test_numbers_that_are_no_posteriors_are_refused_and_the_rows_named(make_script, as_output, search, value):
    script = make_script(0)
    if isinstance(value, str):
        script.table[7] = -math.inf
    else:
        script.table[7, :, 4] = value
    with pytest.raises(InvalidLogitsError, match=r"row\(s\) \[1\]") as caught:
        decode(script.strategy(search=search), as_output([[1, 2, 3], [0, 1, 7, 2], [5] * 6]))
    assert caught.value.rows == (1,)
    assert pickle.loads(pickle.dumps(caught.value)).rows == (1,)


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_labels_may_have_no_probability(make_script, as_output, search):
    script = make_script(0)
    script.table[..., 1:] = -math.inf
    (hyps,) = decode(script.strategy(search=search), as_output([[1, 2, 3]]))
    assert (hyps.best.tokens, hyps.best.score, hyps.trailing_silence_frames) == ([], 0.0, 3)


def test_contract_violations_are_named(make_script, as_output):
    script = make_script(0)
    with pytest.raises(PluginContractError, match="2 requests, hidden states of 1 rows"):
        script.strategy().decode_offline(as_output([[1]]), [DecodingOptions()] * 2)
    out = as_output([[1, 2], [3]])
    out.lengths[1] = 3
    with pytest.raises(PluginContractError, match=r"2 frames and lengths \[2, 3\]"):
        decode(script.strategy(), out)
    script.interface.joiner.table = script.table[..., :5]
    with pytest.raises(PluginContractError, match="gave 5 logits; vocab_size=6"):
        decode(script.strategy(), as_output([[1]]))
    for durations in ((), (0,), (-1, 1)):
        with pytest.raises(PluginContractError, match="durations"):
            make_script(0, durations=durations).strategy()


def test_the_strategy_states_what_it_is(make_script):
    strategy = make_script(0).strategy()
    assert isinstance(strategy, DecodeStrategy)
    assert (strategy.oasr_api, strategy.requires, strategy.consumes) == ("1.0", ("transducer",), "hidden")
    assert set(strategy.modes) == {"offline", "streaming"}
    assert strategy.honours == {"word_timestamps", "hotwords"}


def test_half_precision_outputs_are_read_in_single(make_script, as_output):
    script = make_script(0)
    script.interface.joiner.table = script.table.half()
    (hyps,) = decode(script.strategy(), as_output([list(range(20))]))
    assert all(isinstance(value, float) for value in hyps.best.token_log_probs)
    assert torch.tensor(hyps.best.token_log_probs).exp().le(1.0).all()
