"""Modified beam search, offline: against the textbook, n best, merging, batches, beam 1 and greedy."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.request import DecodingOptions

UTTERANCES = st.lists(st.lists(st.integers(0, 19), max_size=12), min_size=1, max_size=4)


def decode(strategy, out, n_best=1):
    return strategy.decode_offline(out, [DecodingOptions(n_best=n_best)] * len(out.lengths))


def check(hyps, want, frames):
    assert [(h.tokens, h.frames) for h in hyps.nbest] == [(tokens, times) for tokens, _, _, times, _ in want]
    for hyp, (tokens, log_prob, kept, _, posteriors) in zip(hyps.nbest, want, strict=True):
        assert hyp.score == pytest.approx((log_prob + kept) / (len(tokens) + 2), abs=1e-5)
        assert hyp.token_log_probs == pytest.approx(posteriors, abs=1e-5)
    times = want[0][3]
    assert hyps.trailing_silence_frames == len(frames) - 1 - (times[-1] if times else -1)
    lists = [tokens for tokens, *_ in want]
    stable = next((i for i, items in enumerate(zip(*lists, strict=False)) if len(set(items)) > 1), min(map(len, lists)))
    assert hyps.stable_tokens == stable


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 50),
    utterances=UTTERANCES,
    beam_size=st.sampled_from([1, 2, 4, 9]),
    blank_id=st.sampled_from([0, 5]),
    unk_id=st.sampled_from([None, 2]),
    penalty=st.sampled_from([0.0, 0.7]),
)
def test_equals_the_textbook(
    make_script, as_output, textbook_beam, seed, utterances, beam_size, blank_id, unk_id, penalty
):
    script = make_script(seed, blank_id=blank_id, unk_id=unk_id)
    strategy = script.strategy(search="beam", beam_size=beam_size, blank_penalty=penalty)
    for hyps, frames in zip(decode(strategy, as_output(utterances), beam_size), utterances, strict=True):
        check(hyps, textbook_beam(script, frames, beam_size=beam_size, penalty=penalty), frames)


def test_the_way_for_devices_gives_the_same(make_script, as_output, textbook_beam, on_a_device):
    rng = random.Random(8)
    utterances = [[rng.randrange(20) for _ in range(length)] for length in (4, 15, 0, 9, 9)]
    script = make_script(6)
    for hyps, frames in zip(decode(script.strategy(search="beam"), as_output(utterances), 4), utterances, strict=True):
        check(hyps, textbook_beam(script, frames), frames)


def test_a_vocabulary_smaller_than_the_beam(make_script, as_output, textbook_beam):
    script = make_script(2, vocab_size=3)
    (hyps,) = decode(script.strategy(search="beam", beam_size=8), as_output([[3, 1, 2]]), 8)
    check(hyps, textbook_beam(script, [3, 1, 2], beam_size=8), [3, 1, 2])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 200), frames=st.lists(st.integers(0, 19), max_size=40))
def test_beam_one_is_greedy_with_one_symbol_a_frame(make_script, as_output, seed, frames):
    script = make_script(seed, unk_id=3)
    (beam,) = decode(script.strategy(search="beam", beam_size=1), as_output([frames]))
    (greedy,) = decode(script.strategy(max_sym_per_frame=1), as_output([frames]))
    assert (beam.best.tokens, beam.best.frames) == (greedy.best.tokens, greedy.best.frames)
    assert beam.best.token_log_probs == pytest.approx(greedy.best.token_log_probs, abs=1e-6)
    assert beam.best.score * (len(beam.best.tokens) + 2) == pytest.approx(greedy.best.score, abs=1e-4)
    assert beam.trailing_silence_frames == greedy.trailing_silence_frames


def test_alignments_of_the_same_tokens_are_added_up(make_script, as_output):
    script = make_script(0, vocab_size=2)
    script.table.zero_()
    (hyps,) = decode(script.strategy(search="beam", beam_size=8), as_output([[0, 1]]), 8)
    scores = {tuple(hyp.tokens): hyp.score * (len(hyp.tokens) + 2) for hyp in hyps.nbest}
    assert scores == pytest.approx({(): math.log(1 / 4), (1,): math.log(2 / 4), (1, 1): math.log(1 / 4)})


@pytest.mark.parametrize("padding", [math.nan, 3.0])
def test_padding_and_neighbours_change_nothing(make_script, as_output, padding):
    rng = random.Random(2)
    utterances = [[rng.randrange(20) for _ in range(length)] for length in (9, 0, 30, 1)]
    strategy = make_script(4).strategy(search="beam")
    alone = [decode(strategy, as_output([frames]), 4)[0] for frames in utterances]
    for hyps, want in zip(decode(strategy, as_output(utterances, padding), 4), alone, strict=True):
        assert [(h.tokens, h.frames) for h in hyps.nbest] == [(h.tokens, h.frames) for h in want.nbest]
        assert [h.score for h in hyps.nbest] == pytest.approx([h.score for h in want.nbest], abs=1e-6)


def test_no_rows_and_no_frames(make_script, as_output):
    strategy = make_script(0).strategy(search="beam")
    assert decode(strategy, as_output([])) == []
    (hyps,) = decode(strategy, as_output([[]]), 4)
    assert [(hyp.tokens, hyp.score) for hyp in hyps.nbest] == [([], 0.0)]
    assert (hyps.trailing_silence_frames, hyps.stable_tokens) == (0, 0)


def test_results_own_their_lists(make_script, as_output):
    strategy = make_script(0, blank_bias=0.0).strategy(search="beam")
    (first,) = decode(strategy, as_output([[1, 2, 3, 4]]), 4)
    before = [list(hyp.tokens) for hyp in first.nbest]
    decode(strategy, as_output([[5, 6, 7, 8]]), 4)
    assert [hyp.tokens for hyp in first.nbest] == before
    assert len({id(hyp.tokens) for hyp in first.nbest}) == len(first.nbest)


def test_long_utterances_equal_the_textbook(make_script, as_output, textbook_beam):
    rng = random.Random(1)
    frames = [rng.randrange(20) for _ in range(400)]
    script = make_script(11)
    (hyps,) = decode(script.strategy(search="beam"), as_output([frames]), 4)
    check(hyps, textbook_beam(script, frames), frames)
    assert len(hyps.best.tokens) > 20
