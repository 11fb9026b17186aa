"""Streaming gives what offline gives, however an utterance is cut and whoever its neighbours are."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.decoding.base import Hypotheses
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import Run, scripted_log_probs, scripted_output
from oasr_ctc.greedy import InvalidLogProbsError

VOCAB = 4
GREEDY = DecodingOptions()


def chunk(rows):
    """One step's output of rows of different lengths, padded with NaN."""
    lengths = torch.tensor([len(row) for row in rows])
    log_probs = torch.full((len(rows), max(lengths.tolist(), default=0), VOCAB), math.nan)
    for padded, row in zip(log_probs, rows, strict=True):
        padded[: len(row)] = row
    return EncoderOutput(torch.zeros(1), lengths, log_probs)


def stream(strategy, utterances, cuts):
    """Decode utterances side by side; ``cuts[i]`` are the chunk sizes of utterance ``i``, zeros allowed."""
    sessions = [strategy.open(GREEDY) for _ in utterances]
    cursors = [0] * len(utterances)
    for step in range(max(map(len, cuts))):
        here = [i for i, sizes in enumerate(cuts) if step < len(sizes)]
        rows = [utterances[i][cursors[i] : cursors[i] + cuts[i][step]] for i in here]
        strategy.decode_chunk([sessions[i] for i in here], chunk(rows), [step + 1 == len(cuts[i]) for i in here])
        for i in here:
            cursors[i] += cuts[i][step]
    assert cursors == [len(utterance) for utterance in utterances]
    return [strategy.current(session) for session in sessions]


def offline(strategy, utterance):
    return strategy.decode_offline(chunk([utterance]), [GREEDY])[0]


def same(got: Hypotheses, want: Hypotheses):
    assert got.best.tokens == want.best.tokens
    assert got.best.frames == want.best.frames
    assert got.best.token_log_probs == want.best.token_log_probs
    assert got.best.score == pytest.approx(want.best.score, abs=1e-5)
    assert got.trailing_silence_frames == want.trailing_silence_frames


levels = st.sampled_from(
    [0.0, 0.0, 1.0, 2.0, 3.5, -math.inf]
)  # few levels: ties, runs and impossible labels are common


@st.composite
def utterances(draw):
    frames = draw(st.integers(0, 14))
    logits = torch.tensor([[draw(levels) for _ in range(VOCAB)] for _ in range(frames)]).reshape(frames, VOCAB)
    log_probs = logits.log_softmax(-1)
    return torch.where(log_probs.isnan(), -math.inf, log_probs)  # a frame without any posterior


@st.composite
def cut(draw, length):
    sizes = []
    while sum(sizes) < length:
        sizes.append(draw(st.integers(0, length - sum(sizes))) if len(sizes) < 30 else length - sum(sizes))
    return sizes or [0]


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(0, VOCAB - 1))
def test_any_cut_and_any_neighbours_equal_offline_alone(make_strategy, textbook, data, blank_id):
    strategy = make_strategy(search="greedy", vocab_size=VOCAB, blank_id=blank_id)
    batch = data.draw(st.lists(utterances(), min_size=1, max_size=4))
    cuts = [data.draw(cut(len(utterance))) for utterance in batch]
    want = [offline(strategy, utterance) for utterance in batch]
    for got, expected in zip(stream(strategy, batch, cuts), want, strict=True):
        same(got, expected)
    for got, expected in zip(strategy.decode_offline(chunk(batch), [GREEDY] * len(batch)), want, strict=True):
        same(got, expected)
    for utterance, expected in zip(batch, want, strict=True):
        reference = textbook(utterance.tolist(), blank_id)
        assert (expected.best.tokens, expected.best.frames) == (reference.tokens, reference.frames)
        assert expected.best.token_log_probs == reference.log_probs


@pytest.mark.parametrize("first", range(1, 6))
def test_a_run_over_a_border_is_one_token(make_strategy, first):
    log_probs, _ = scripted_log_probs([[Run(0), Run(3, 4), Run(0)]], VOCAB)
    strategy = make_strategy(search="greedy", vocab_size=VOCAB)
    (hyps,) = stream(strategy, [log_probs[0]], [[first, 6 - first]])
    assert (hyps.best.tokens, hyps.best.frames) == ([3], [1])


def test_the_next_chunk_completes_a_pending_posterior(make_strategy):
    strategy = make_strategy(search="greedy", vocab_size=VOCAB)
    session = strategy.open(GREEDY)
    first = strategy.decode_chunk([session], scripted_output([[Run(0), Run(3, 1, 0.6)]], VOCAB), [False])[0]
    assert math.exp(first.best.token_log_probs[0]) == pytest.approx(0.6)
    nothing = scripted_output([[]], VOCAB)
    strategy.decode_chunk([session], nothing, [False])
    second = strategy.decode_chunk([session], scripted_output([[Run(3, 1, 0.8), Run(3, 1, 0.99)]], VOCAB), [False])[0]
    assert math.exp(second.best.token_log_probs[0]) == pytest.approx(0.8)
    third = strategy.decode_chunk([session], scripted_output([[Run(3, 1, 0.999)]], VOCAB), [True])[0]
    assert math.exp(third.best.token_log_probs[0]) == pytest.approx(0.8)


def test_frames_and_silence_count_from_the_start_of_the_utterance(make_strategy):
    strategy = make_strategy(search="greedy", vocab_size=VOCAB)
    session = strategy.open(GREEDY)
    assert strategy.current(session).trailing_silence_frames == 0
    steps = [[Run(0, 4)], [Run(0), Run(2), Run(0, 2)], [Run(0, 4)], [Run(0, 3), Run(1)]]
    seen = []
    for step in steps:
        hyps = strategy.decode_chunk([session], scripted_output([step], VOCAB), [False])[0]
        seen.append((list(hyps.best.frames), hyps.trailing_silence_frames))
    assert seen == [([], 4), ([5], 2), ([5], 6), ([5, 15], 0)]
    assert strategy.current(session).best.tokens == [2, 1]


def test_an_invalid_chunk_changes_no_session(make_strategy):
    strategy = make_strategy(search="greedy", vocab_size=VOCAB)
    sessions = [strategy.open(GREEDY) for _ in range(2)]
    strategy.decode_chunk(sessions, scripted_output([[Run(1)], [Run(2)]], VOCAB), [False] * 2)
    before = copy.deepcopy(sessions)
    broken = scripted_output([[Run(3, 2)], [Run(3, 2)]], VOCAB)
    broken.log_probs[1, 1, 2] = math.nan
    with pytest.raises(InvalidLogProbsError) as caught:
        strategy.decode_chunk(sessions, broken, [False] * 2)
    assert caught.value.rows == (1,)
    assert sessions == before
    (hyps,) = strategy.decode_chunk(sessions[:1], scripted_output([[Run(3, 2)]], VOCAB), [True])
    assert hyps.best.tokens == [1, 3]


def test_sessions_share_nothing(make_strategy):
    strategy = make_strategy(search="greedy", vocab_size=VOCAB)
    one, two = strategy.open(GREEDY), strategy.open(GREEDY)
    strategy.decode_chunk([one], scripted_output([[Run(1, 2)]], VOCAB), [False])
    strategy.decode_chunk([two, one], scripted_output([[Run(2)], [Run(3)]], VOCAB), [False, True])
    strategy.close(one)
    assert strategy.current(two).best.tokens == [2]
    assert strategy.current(one).best.tokens == [1, 3]


def test_no_streams_no_results(make_strategy):
    assert make_strategy(search="greedy").decode_chunk([], chunk([]), []) == []
