"""Which tokens may come next."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_whisper.options import AedOptions
from oasr_whisper.rules import TokenRules

INF = math.inf


@pytest.fixture(scope="module")
def ids(whisper_tokens):
    return whisper_tokens()


@pytest.fixture(scope="module")
def allowed(ids):
    """``allowed(generated, timed, logits=zeros, **options) -> set`` of ids that may follow."""

    def ask(generated, timed, logits=None, **options):
        vocab = ids.timestamp_begin + 51
        logits = torch.zeros(1, vocab) if logits is None else logits.clone()[None]
        rules = TokenRules(ids, AedOptions(**options), vocab, torch.device("cpu"))
        rules.apply(logits, [generated], [timed])
        return {index for index, value in enumerate(logits[0].tolist()) if value > -INF}

    return ask


@pytest.fixture(scope="module")
def wordy(ids):
    """Logits by which text is far more probable than times."""
    logits = torch.zeros(ids.timestamp_begin + 51)
    logits[ids.timestamp_begin :] = -20.0
    return logits


def test_lists_of_the_checkpoint(ids, allowed):
    everything = set(range(ids.timestamp_begin + 51))
    assert everything - allowed([5], timed=False) == {*ids.suppress}
    assert everything - allowed([], timed=False) == {*ids.suppress, *ids.begin_suppress}
    assert everything - allowed([], timed=False, suppress_blank=False) == {*ids.suppress}
    assert everything - allowed([5], timed=False, suppress_tokens=(7, 10**6)) == {7}
    assert everything == allowed([5], timed=False, suppress_tokens=())


def test_the_first_timestamp_is_early(ids, allowed):
    begin = ids.timestamp_begin
    assert allowed([], timed=True) == set(range(begin, begin + 51))
    assert allowed([], timed=True, max_initial_timestamp=0.1) == set(range(begin, begin + 6))
    assert allowed([], timed=True, max_initial_timestamp=0.0) == {begin}


def test_text_follows_the_first_timestamp(ids, allowed):
    text = allowed([ids.timestamp_begin + 4], timed=True)
    assert text == set(range(ids.timestamp_begin)) - {*ids.suppress, ids.no_timestamps}
    assert ids.eot in text


def test_behind_text_comes_text_or_a_later_timestamp(ids, allowed, wordy):
    begin = ids.timestamp_begin
    said = [begin + 4, 5, 6]
    assert allowed(said, timed=True, logits=wordy) == (
        set(range(begin)) - {*ids.suppress, ids.no_timestamps} | set(range(begin + 5, begin + 51))
    )
    assert allowed(said, timed=True) == set(range(begin + 5, begin + 51)), "together they outweigh any one text token"


def test_a_timestamp_behind_text_is_one_of_a_pair_or_the_last(ids, allowed, wordy):
    begin = ids.timestamp_begin
    said = [begin, 5, begin + 9]
    assert allowed(said, timed=True, logits=wordy) == (
        set(range(ids.eot, begin)) - {*ids.suppress, ids.no_timestamps} | set(range(begin + 9, begin + 51))
    )


def test_behind_a_pair_comes_text(ids, allowed):
    begin = ids.timestamp_begin
    assert allowed([begin, 5, begin + 9, begin + 9], timed=True) == (
        set(range(begin)) - {*ids.suppress, ids.no_timestamps}
    )


def test_at_the_last_timestamp_a_segment_can_end(ids, allowed, wordy):
    begin = ids.timestamp_begin
    assert begin + 50 in allowed([begin, 5, begin + 50], timed=True, logits=wordy)
    assert all(token < begin for token in allowed([begin, 5, begin + 50, begin + 50, 6], timed=True, logits=wordy))


def test_logits_that_are_no_numbers_stay_so(ids):
    logits = torch.full((2, ids.timestamp_begin + 51), math.nan)
    rules = TokenRules(ids, AedOptions(), logits.shape[1], torch.device("cpu"))
    rules.apply(logits, [[], [ids.timestamp_begin]], [True, True])
    assert logits[:, ids.timestamp_begin - 20].isnan().any()


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_rows_do_not_see_each_other(whisper_tokens, data):
    ids = whisper_tokens()
    vocab = ids.timestamp_begin + 51
    rules = TokenRules(ids, AedOptions(), vocab, torch.device("cpu"))
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 4
    token = st.integers(0, 10) | st.integers(ids.timestamp_begin, vocab - 1)
    generated = data.draw(st.lists(st.lists(token, max_size=4), min_size=4, max_size=4))
    timed = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    together = logits.clone()
    rules.apply(together, generated, timed)
    for row in range(4):
        alone = logits[row : row + 1].clone()
        rules.apply(alone, generated[row : row + 1], timed[row : row + 1])
        assert torch.equal(alone[0], together[row])
        assert (alone > -INF).any()
