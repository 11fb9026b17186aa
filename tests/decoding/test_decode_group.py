"""One batched step: how hypotheses begin, grow and end, and how rows come and go."""

from __future__ import annotations

import math

import pytest
import torch

from oasr_core.cache.decoder_kv import DenseDecoderCache
from oasr_core.decoding.decode_group import Candidate, DecodeGroup, MemoryRows, Row
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.decoding.sampling import Sampling
from oasr_core.models.base import DecoderKV
from oasr_core.request import DecodingOptions

END = 0
INF = math.inf


class Script:
    """A decoder whose posteriors are a table: the prompt's first token -> tokens so far -> posteriors of 5 tokens.

    Its hidden state is the row's own sequence of tokens, read back from the history, so that a row that is moved
    wrongly says the wrong thing.
    """

    kv = DecoderKV(1, 1, 1)
    vocab_size = 5
    max_positions = 100
    memory_elements = 1

    def __init__(self, table):
        self.table = table

    def step(self, tokens, state, memory):
        values = tokens[:, :, None, None].float()
        # Uniform attention averages the tokens; times their count it is their sum, as digits of one number.
        weight = 10.0 ** -state.positions()[:, :, None, None].float()
        average = state.attend(0, torch.zeros_like(values), torch.zeros_like(values), values * weight)
        return average[..., 0] * (state.positions()[:, :, None] + 1)

    def logits(self, hidden):
        rows = []
        for value in hidden[..., 0].reshape(-1).tolist():
            digits = f"{value:.5f}".replace(".", "").rstrip("0")
            rows.append(torch.tensor(self.table.get(digits, [1.0, 0, 0, 0, 0])).log())
        return torch.stack(rows)


def row(prompt, sampling, max_new=9, patience=1.0, penalty=1.0):
    request = IncrementalRequest(str(prompt), DecodingOptions())
    return Row(request, 1, prompt, sampling, max_new, length_penalty=penalty, patience=patience)


def group(table, rows):
    cache = DenseDecoderCache(Script.kv, len(rows), dtype=torch.float32, device=torch.device("cpu"))
    memory = (torch.zeros(len(rows), 1),)
    return DecodeGroup(Script(table), rows, memory, cache, frozenset((END,)), lambda logits, pairs: None)


def run(table, rows):
    """Decode to the end; rows leave when they are done, as a group needs."""
    made = group(table, list(rows))
    made.prefill(lambda rows, logits: None)
    while True:
        for index in reversed(range(len(made.rows))):
            if made.rows[index].done:
                made.drop(index)
        if not made.rows:
            return
        made.step()


def test_greedy_ends_with_the_end_token_whose_posterior_counts():
    table = {"4": [0.1, 0.9, 0, 0, 0], "41": [0.3, 0, 0.7, 0, 0], "412": [0.8, 0.2, 0, 0, 0]}
    found = row([4], Sampling())
    run(table, [found])
    (best,) = found.ranked()
    assert best.tokens == [1, 2]
    assert best.log_probs == pytest.approx([math.log(0.9), math.log(0.7)], abs=1e-6)
    assert best.score == pytest.approx(math.log(0.9 * 0.7 * 0.8), abs=1e-6)
    assert best.normalized(1.0) == pytest.approx(best.score / 2)
    assert (best.ended, best.reached_cap) == (True, False)


def test_greedy_stops_at_the_cap():
    found = row([4], Sampling(), max_new=2)
    run({"4": [0, 1, 0, 0, 0], "41": [0, 1, 0, 0, 0], "411": [0, 1, 0, 0, 0]}, [found])
    (best,) = found.ranked()
    assert (best.tokens, best.reached_cap, best.score) == ([1, 1], True, 0.0)


BEAM = {
    "4": [0.0, 0.5, 0.4, 0.1, 0.0],
    "41": [0.35, 0.3, 0.2, 0.15, 0.0],
    "42": [0.9, 0.1, 0.0, 0.0, 0.0],
    "43": [0.5, 0.5, 0.0, 0.0, 0.0],
    "411": [0.6, 0.4, 0.0, 0.0, 0.0],
    "412": [1.0, 0.0, 0.0, 0.0, 0.0],
}


def test_a_beam_finds_the_more_probable_whole():
    found = row([4], Sampling(2, True))
    run(BEAM, [found])
    assert [each.tokens for each in found.ranked()] == [[2], [1]]
    assert found.ranked()[0].score == pytest.approx(math.log(0.4 * 0.9), abs=1e-6)
    assert found.ranked()[0].log_probs == pytest.approx([math.log(0.4)], abs=1e-6)


def test_patience_searches_on_after_the_first_ends():
    found = row([4], Sampling(2, True), patience=2.0)
    run(BEAM, [found])
    assert [each.tokens for each in found.ended] == [[2], [1], [1, 2], [1, 1]]


def test_the_least_patience_waits_for_one_end():
    found = row([4], Sampling(2, True), patience=0.1)
    run(BEAM, [found])
    assert found.ranked()[0].tokens == [2]


def test_several_tokens_that_end_leave_a_beam_its_width():
    table = {"4": [0.3, 0.25, 0.22, 0.13, 0.1], "43": [0, 1, 0, 0, 0], "44": [1, 0, 0, 0, 0]}
    found = row([4], Sampling(2, True), patience=2.0)
    made = group(table, [found])
    made._end_ids = frozenset((0, 1, 2))
    made.prefill(lambda rows, logits: None)
    assert [candidate.last for candidate in found.candidates] == [3, 4]
    made.step()
    assert found.done
    assert [each.tokens for each in found.ended] == [[], [], [3], [4]]


@pytest.mark.parametrize("max_new", [1, 6])
def test_what_is_forbidden_is_no_hypothesis(max_new):
    table = {"4": [0, 1, 0, 0, 0], "41": [1, 0, 0, 0, 0]}
    found = row([4], Sampling(3, True), max_new=max_new)
    run(table, [found])
    assert [each.tokens for each in found.ranked()] == [[1]]
    assert found.ranked()[0].score == 0.0


def test_the_length_penalty_orders_the_ended():
    short, long = (Candidate([1], score=-1.0), Candidate([1, 2, 3], score=-1.5))
    found = row([4], Sampling(2, True), penalty=0.0)
    found.ended = [long, short]
    assert found.ranked() == [short, long]
    found.length_penalty = 1.0
    assert found.ranked() == [long, short]
    assert Candidate(score=-2.0).normalized(1.0) == -2.0


def test_a_beam_at_its_cap_ends_with_its_best():
    found = row([4], Sampling(2, True), max_new=1)
    run(BEAM, [found])
    assert found.done
    assert [(each.tokens, each.reached_cap) for each in found.ranked()] == [([1], True), ([2], True)]


def test_rows_of_a_beam_keep_their_own_histories():
    """Hypotheses change places at every step; what each says afterwards depends on its whole past."""
    table = {
        "4": [0, 0.5, 0.5, 0, 0],
        "41": [0, 0, 0.1, 0.9, 0],
        "42": [0, 0.99, 0.01, 0, 0],
        "421": [0, 0.5, 0, 0.5, 0],
        "413": [0, 0.01, 0.99, 0, 0],
        "4132": [1.0, 0, 0, 0, 0],
        "4211": [1.0, 0, 0, 0, 0],
        "4213": [1.0, 0, 0, 0, 0],
        "3": [0, 0, 1.0, 0, 0],
        "32": [1.0, 0, 0, 0, 0],
    }
    first, second = row([3], Sampling(2, True)), row([4], Sampling(2, True))
    run(table, [first, second])
    assert first.ranked()[0].tokens == [2]
    assert second.ranked()[0].tokens == [1, 3, 2]


def test_prompts_of_any_length_share_a_prefill_and_one_prediction_is_shown():
    table = {"4": [0.2, 0.8, 0, 0, 0], "42": [0, 0, 0, 1.0, 0], "423": [1.0, 0, 0, 0, 0], "41": [1.0, 0, 0, 0, 0]}
    rows = [row([4], Sampling()), row([4, 2], Sampling())]
    rows[1].probe = 0
    shown = []
    made = group(table, rows)
    made.prefill(lambda rows, logits: shown.append((rows, logits.exp())))
    assert [each.candidates[0].tokens for each in rows] == [[1], [3]]
    ((asked, posteriors),) = shown
    assert asked == [rows[1]]
    assert posteriors[0].tolist() == pytest.approx([0.2, 0.8, 0, 0, 0])


def test_a_row_leaves_and_the_last_takes_its_place():
    table = {
        "1": [0, 1.0, 0, 0, 0],
        "2": [0, 0, 1.0, 0, 0],
        "3": [0, 0, 0, 1.0, 0],
        "11": [0, 1.0, 0, 0, 0],
        "22": [0, 0, 1.0, 0, 0],
        "33": [0, 0, 0, 1.0, 0],
        "333": [0, 0, 0, 1.0, 0],
        "222": [0, 0, 1.0, 0, 0],
    }
    rows = [row([digit], Sampling()) for digit in (1, 2, 3)]
    made = group(table, list(rows))
    made.prefill(lambda rows, logits: None)
    made.drop(0)
    assert made.rows == [rows[2], rows[1]]
    made.step()
    assert [each.candidates[0].tokens for each in made.rows] == [[3, 3], [2, 2]]
    other = group(table, [rows[0]])
    other.prefill(lambda rows, logits: None)
    made.extend(other, 8)
    assert other.rows == []
    made.step()
    assert [each.candidates[0].tokens for each in made.rows] == [[3, 3, 3], [2, 2, 2], [1, 1]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2, True), Sampling(2, False, 1.0)])
def test_posteriors_that_are_no_numbers_are_an_error_of_their_row(sampling):
    table = {"4": [math.nan] * 5, "3": [0, 0, 1.0, 0, 0], "32": [0.9, 0.1, 0, 0, 0], "321": [1.0, 0, 0, 0, 0]}
    good, bad = row([3], sampling), row([4], sampling)
    made = group(table, [bad, good])
    made.prefill(lambda rows, logits: None)
    assert bad.done
    assert isinstance(bad.error, FloatingPointError)
    made.drop(0)
    for _ in range(3):
        if not good.done:
            made.step()
    assert good.error is None
    assert good.ranked()[0].tokens[0] == 2


def test_memory_rows_come_and_go():
    values = torch.arange(3.0)[:, None]
    memory = MemoryRows((values.clone(), values.clone() * 10))
    memory.drop(0)
    assert [tensor[:, 0].tolist() for tensor in memory.view] == [[2.0, 1.0], [20.0, 10.0]]
    other = MemoryRows((torch.full((4, 1), 7.0), torch.full((4, 1), 70.0)))
    memory.grow(other.count, 8)
    memory.extend(other)
    assert memory.view[0][:, 0].tolist() == [2.0, 1.0, 7.0, 7.0, 7.0, 7.0]
    assert memory.row(1)[1].tolist() == [[10.0]]
    memory.drop(5)
    assert (memory.count, len(memory.view[0])) == (5, 5)
    assert MemoryRows(()).view == ()


@pytest.mark.parametrize(("most", "capacity"), [(3, 5), (6, 6), (32, 8)])
def test_spare_memory_is_kept_for_as_many_rows_as_there_can_be(most, capacity):
    memory = MemoryRows((torch.zeros(4, 1),))
    memory.grow(1, most)
    assert len(memory._tensors[0]) == capacity
