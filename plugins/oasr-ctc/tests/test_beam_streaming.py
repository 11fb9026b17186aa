"""Prefix beam search of streams: any cut equals the whole, exactly; memory follows what is undecided."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import Run, scripted_output
from oasr_ctc.beams import EMISSION
from oasr_ctc.greedy import InvalidLogProbsError
from oasr_ctc.pool import BeamPool

VOCAB = 5
ALL = DecodingOptions(n_best=4)


def chunk(rows):
    """One step's output of rows of different lengths, padded with NaN."""
    lengths = torch.tensor([len(row) for row in rows])
    log_probs = torch.full((len(rows), max(lengths.tolist(), default=0), VOCAB), math.nan)
    for padded, row in zip(log_probs, rows, strict=True):
        padded[: len(row)] = row
    return EncoderOutput(torch.zeros(1), lengths, log_probs)


def stream(strategy, utterances, cuts, options):
    """Decode utterances side by side; ``cuts[i]`` are the chunk sizes of utterance ``i``. Every result, copied."""
    sessions = [strategy.open(wanted) for wanted in options]
    cursors = [0] * len(utterances)
    seen: list[list] = [[] for _ in utterances]
    for step in range(max(map(len, cuts))):
        here = [i for i, sizes in enumerate(cuts) if step < len(sizes)]
        rows = [utterances[i][cursors[i] : cursors[i] + cuts[i][step]] for i in here]
        results = strategy.decode_chunk(
            [sessions[i] for i in here], chunk(rows), [step + 1 == len(cuts[i]) for i in here]
        )
        for i, hyps in zip(here, results, strict=True):
            cursors[i] += cuts[i][step]
            seen[i].append((cursors[i], copy.deepcopy(hyps)))
    assert cursors == [len(utterance) for utterance in utterances]
    for session in sessions:
        strategy.close(session)
    return seen


@st.composite
def utterances(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(draw(st.integers(0, 24)), VOCAB, generator=generator) * draw(st.sampled_from([0.5, 2.0, 6.0]))
    log_probs = logits.log_softmax(-1)
    if draw(st.booleans()):
        log_probs = log_probs.mul(2).round().div(2)  # ties
    return log_probs


@st.composite
def cut(draw, length):
    sizes = []
    while sum(sizes) < length:
        sizes.append(draw(st.integers(0, length - sum(sizes))) if len(sizes) < 30 else length - sum(sizes))
    return sizes or [0]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_cut_and_any_neighbours_equal_offline_alone(make_strategy, data):
    blank_id = data.draw(st.integers(0, VOCAB - 1))
    strategy = make_strategy(
        VOCAB, blank_id, search="beam", beam_size=4, first_beam_size=data.draw(st.sampled_from([None, 3]))
    )
    batch = data.draw(st.lists(utterances(), min_size=1, max_size=4))
    phrases = data.draw(st.lists(st.sampled_from(["\x00", "\x01\x02", "\x03\x03", "\x02\x00\x01"]), max_size=2))
    phrases = [{"phrase": phrase, "boost": data.draw(st.sampled_from([-2.0, 0.0, 1.0]))} for phrase in phrases]
    wanted = [data.draw(st.sampled_from([ALL, DecodingOptions(n_best=2, hotwords=phrases)])) for _ in batch]
    seen = stream(strategy, batch, [data.draw(cut(len(utterance))) for utterance in batch], wanted)
    for utterance, options, results in zip(batch, wanted, seen, strict=True):
        stable: list[int] = []
        for frames, got in results:
            (alone,) = strategy.decode_offline(chunk([utterance[:frames]]), [options])
            assert got.nbest == alone.nbest
            assert got.trailing_silence_frames == alone.trailing_silence_frames
            assert got.stable_tokens >= len(stable)
            assert got.best.tokens[: len(stable)] == stable
            stable = got.best.tokens[: got.stable_tokens]
    assert strategy.search.pool.num_open == 0


def test_stable_tokens_are_those_that_every_prefix_begins_with(make_strategy):
    strategy = make_strategy(VOCAB, search="beam", beam_size=2)
    session = strategy.open(ALL)
    sure, torn = torch.tensor([1e-9, 1.0, 1e-9, 1e-9, 1e-9]).log(), torch.tensor([1e-9, 1e-9, 0.5, 0.5, 1e-9]).log()
    steps = [(sure, 0), (torn, 1), (torch.tensor([0.999, 1e-4, 1e-4, 1e-4, 7e-4]).log(), 1), (sure, 1)]
    for row, want in steps:
        (hyps,) = strategy.decode_chunk([session], chunk([row[None]]), [False])
        assert hyps.stable_tokens == want
    strategy.close(session)


def test_results_read_twice_are_the_same(make_strategy):
    strategy = make_strategy(VOCAB, search="beam")
    session = strategy.open(ALL)
    assert strategy.current(session).best.tokens == []
    assert strategy.current(session).trailing_silence_frames == 0
    (hyps,) = strategy.decode_chunk([session], scripted_output([[Run(0, 2), Run(3), Run(0), Run(4)]], VOCAB), [False])
    first = copy.deepcopy(hyps)
    assert strategy.current(session) == first
    assert strategy.current(session) == first
    strategy.close(session)


def test_an_invalid_chunk_changes_no_session(make_strategy):
    strategy = make_strategy(VOCAB, search="beam")
    sessions = [strategy.open(ALL) for _ in range(2)]
    strategy.decode_chunk(sessions, scripted_output([[Run(1)], [Run(2)]], VOCAB), [False] * 2)
    before = copy.deepcopy([strategy.current(session) for session in sessions])
    broken = scripted_output([[Run(3, 2)], [Run(3, 2)]], VOCAB)
    broken.log_probs[1, 1, 2] = math.nan
    with pytest.raises(InvalidLogProbsError) as caught:
        strategy.decode_chunk(sessions, broken, [False] * 2)
    assert caught.value.rows == (1,)
    assert [strategy.current(session) for session in sessions] == before
    (hyps,) = strategy.decode_chunk(sessions[:1], scripted_output([[Run(3, 2)]], VOCAB), [True])
    assert hyps.best.tokens == [1, 3]
    for session in sessions:
        strategy.close(session)


def noise(frames, seed, scale=1.0):
    return (torch.randn(frames, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale).log_softmax(-1)


def said_and_log_probs(frames, generator, least):
    """A token in every second frame, with posteriors between ``least`` and 1."""
    labels = torch.randint(1, VOCAB, (frames,), generator=generator)
    labels[::2] = 0
    peaks = least + (1 - least) * torch.rand(frames, generator=generator)
    probs = ((1 - peaks) / (VOCAB - 1))[:, None].repeat(1, VOCAB)
    probs[torch.arange(frames), labels] = peaks
    return labels[1::2].tolist(), probs.log()


def test_what_is_certain_is_forgotten(make_strategy):
    strategy = make_strategy(VOCAB, search="beam")
    session, generator, said = strategy.open(DecodingOptions()), torch.Generator().manual_seed(0), []
    for _ in range(700):
        tokens, log_probs = said_and_log_probs(16, generator, least=1.0)
        (hyps,) = strategy.decode_chunk([session], chunk([log_probs]), [False])
        said += tokens
        assert hyps.stable_tokens == len(said)
        assert session.settled >= len(said) - 1
    assert hyps.best.tokens == said
    strategy.search.pool.make_room(10)
    assert strategy.search.pool.used <= 2
    strategy.close(session)


def test_memory_of_a_long_stream_is_bounded_by_its_tokens(make_strategy):
    strategy = make_strategy(VOCAB, search="beam")
    session, generator, said = strategy.open(DecodingOptions()), torch.Generator().manual_seed(0), []
    for _ in range(300):
        tokens, log_probs = said_and_log_probs(32, generator, least=0.7)
        (hyps,) = strategy.decode_chunk([session], chunk([log_probs]), [False])
        said += tokens
        assert strategy.search.pool.used <= 2 * 4096 + 2 * 10 * len(said)
    assert hyps.best.tokens == said
    strategy.close(session)
    assert strategy.search.pool.nbytes == 4096 * EMISSION.itemsize


def test_one_long_utterance_reuses_its_memory(make_strategy):
    strategy = make_strategy(VOCAB, search="beam", blank_threshold=1.0)
    rows = noise(6000, 1)
    whole = strategy.decode_offline(chunk([rows]), [ALL])[0]
    (pieces,) = stream(strategy, [rows], [[1000] * 6], [ALL])
    assert pieces[-1][1].nbest == whole.nbest
    assert [len(hyp.tokens) for hyp in whole.nbest] == [len(hyp.frames) for hyp in whole.nbest]


def test_closed_streams_return_everything(make_strategy):
    strategy = make_strategy(VOCAB, search="beam")
    rng = np.random.default_rng(0)
    idle = strategy.search.pool.nbytes
    live: list = []
    for step in range(400):
        if live and rng.random() < 0.5:
            strategy.close(live.pop(rng.integers(len(live))))
        else:
            live.append(strategy.open(ALL))
        if live:
            strategy.decode_chunk(live, chunk([noise(4, step)] * len(live)), [False] * len(live))
        assert strategy.search.pool.num_open == len(live)
    while live:
        strategy.close(live.pop())
    assert strategy.search.pool.nbytes == idle


def test_places_of_the_pool_are_reused():
    pool = BeamPool(3)
    slots = [pool.open() for _ in range(20)]
    assert len(set(slots)) == 20
    pool.close(slots[4])
    assert pool.open() == slots[4]
    with pytest.raises(KeyError):
        pool.close(99)


def test_sessions_share_nothing(make_strategy):
    strategy = make_strategy(VOCAB, search="beam")
    one, two = strategy.open(ALL), strategy.open(ALL)
    strategy.decode_chunk([one], scripted_output([[Run(1, 2)]], VOCAB), [False])
    strategy.decode_chunk([two, one], scripted_output([[Run(2)], [Run(3)]], VOCAB), [False, True])
    strategy.close(one)
    three = strategy.open(ALL)
    strategy.decode_chunk([three], scripted_output([[Run(4)]], VOCAB), [True])
    assert strategy.current(two).best.tokens == [2]
    assert strategy.current(three).best.tokens == [4]
    strategy.close(two)
    strategy.close(three)


def test_no_streams_no_results(make_strategy):
    assert make_strategy(search="beam").decode_chunk([], chunk([]), []) == []
