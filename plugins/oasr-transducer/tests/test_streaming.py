"""Streams: chunks equal the whole, streams do not see each other, failures change nothing, rows are given back."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.request import DecodingOptions
from oasr_transducer.errors import InvalidLogitsError

SEARCHES = [
    {"search": "greedy"},
    {"search": "greedy", "max_sym_per_frame": 3},
    {"search": "beam", "beam_size": 4},
]


def seen(hyps):
    return [(h.tokens, h.frames) for h in hyps.nbest], hyps.trailing_silence_frames


def same(got, want):
    assert seen(got) == seen(want)
    for one, other in zip(got.nbest, want.nbest, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)


def whole(strategy, as_output, frames, options=None):
    return strategy.decode_offline(as_output([frames]), [options or DecodingOptions()])[0]


@settings(deadline=None, max_examples=40)
@given(
    options=st.sampled_from(SEARCHES),
    seed=st.integers(0, 30),
    chunks=st.lists(st.lists(st.integers(0, 19), max_size=6), min_size=1, max_size=8),
    durations=st.sampled_from([None, (0, 1, 2, 5, 9)]),
)
def test_chunks_equal_the_whole_so_far(make_script, as_output, options, seed, chunks, durations):
    if options["search"] == "beam":
        durations = None
    wanted = DecodingOptions(n_best=options.get("beam_size", 1))
    strategy = make_script(seed, durations=durations).strategy(**options)
    session, spoken, stable = strategy.open(wanted), [], 0
    for chunk in chunks:
        spoken += chunk
        (got,) = strategy.decode_chunk([session], as_output([chunk]), [False])
        same(got, whole(strategy, as_output, spoken, wanted))
        assert got.stable_tokens >= stable
        stable = got.stable_tokens
    same(strategy.current(session), whole(strategy, as_output, spoken, wanted))


@pytest.mark.parametrize("options", SEARCHES)
def test_stable_tokens_are_never_taken_back(make_script, as_output, options):
    rng = random.Random(3)
    strategy = make_script(12, blank_bias=0.5).strategy(**options)
    session, stable = strategy.open(DecodingOptions()), []
    for _ in range(40):
        chunk = [rng.randrange(20) for _ in range(rng.randint(0, 4))]
        (hyps,) = strategy.decode_chunk([session], as_output([chunk]), [False])
        assert hyps.best.tokens[: len(stable)] == stable
        assert hyps.stable_tokens >= len(stable)
        stable = list(hyps.best.tokens[: hyps.stable_tokens])
    assert len(stable) > 5


@pytest.mark.parametrize("options", SEARCHES)
def test_streams_of_any_age_side_by_side_equal_each_alone(make_script, as_output, options):
    rng = random.Random(7)
    strategy = make_script(5).strategy(**options)
    utterances = {name: [rng.randrange(20) for _ in range(rng.randint(1, 40))] for name in range(12)}
    rest, sessions, finals = {name: list(frames) for name, frames in utterances.items()}, {}, {}
    while rest:
        for name in rest.keys() - sessions.keys():
            if rng.random() < 0.4:
                sessions[name] = strategy.open(DecodingOptions())
        here = rng.sample(sorted(sessions), rng.randint(0, len(sessions)))
        chunks = []
        for name in here:
            size = rng.randint(0, 7)
            chunks.append(rest[name][:size])
            rest[name] = rest[name][size:]
        last = [not rest[name] for name in here]
        results = strategy.decode_chunk([sessions[name] for name in here], as_output(chunks), last)
        for name, hyps, ended in zip(here, results, last, strict=True):
            if ended:
                finals[name] = copy.deepcopy(hyps)
                strategy.close(sessions.pop(name))
                del rest[name]
    for name, frames in utterances.items():
        same(finals[name], whole(strategy, as_output, frames))
    assert len(strategy.search.pool) == 0


@pytest.mark.parametrize("options", SEARCHES)
def test_invalid_numbers_change_no_session(make_script, as_output, options):
    script = make_script(1)
    strategy = script.strategy(**options)
    script.table[19, :, 2] = float("nan")
    sessions = [strategy.open(DecodingOptions()) for _ in range(2)]
    strategy.decode_chunk(sessions, as_output([[1, 2, 3], [4, 5, 6]]), [False] * 2)
    with pytest.raises(InvalidLogitsError) as caught:
        strategy.decode_chunk(sessions, as_output([[7, 8], [9, 19]]), [False] * 2)
    assert caught.value.rows == (1,)
    got = strategy.decode_chunk(sessions, as_output([[7, 8], [9, 10]]), [True] * 2)
    same(got[0], whole(strategy, as_output, [1, 2, 3, 7, 8]))
    same(got[1], whole(strategy, as_output, [4, 5, 6, 9, 10]))


@pytest.mark.parametrize("options", SEARCHES)
def test_rows_are_reused_and_a_new_stream_begins_afresh(make_script, as_output, options):
    strategy = make_script(1).strategy(**options)
    for round_ in range(5):
        sessions = [strategy.open(DecodingOptions()) for _ in range(3)]
        got = strategy.decode_chunk(sessions, as_output([[1, 2, 3, 4]] * 3), [False] * 3)
        for hyps in got:
            same(hyps, whole(strategy, as_output, [1, 2, 3, 4]))
        in_use = len(strategy.search.pool)
        assert in_use == 3 * options.get("beam_size", 1), round_
        for session in sessions:
            strategy.close(session)
            strategy.close(session)
        assert len(strategy.search.pool) == 0


@pytest.mark.parametrize("options", SEARCHES)
def test_a_stream_that_heard_nothing(make_script, as_output, options):
    strategy = make_script(1).strategy(**options)
    session = strategy.open(DecodingOptions())
    assert strategy.current(session).best.tokens == []
    strategy.close(session)
    assert strategy.decode_chunk([], as_output([]), []) == []


def test_a_duration_reaches_over_a_whole_chunk(make_script, as_output):
    script = make_script(0, durations=(1, 7))
    script.table.zero_()
    script.table[..., 3] = 5.0
    script.table[..., -1] = 5.0
    strategy = script.strategy()
    session = strategy.open(DecodingOptions())
    for chunk in ([0, 1], [2, 3, 4], [], [5, 6], [7, 8]):
        (hyps,) = strategy.decode_chunk([session], as_output([chunk]), [False])
    assert hyps.best.frames == [0, 7]
