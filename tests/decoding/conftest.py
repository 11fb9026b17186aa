"""Scores of phrases by their definition, without an automaton; a small family that generates token by token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from oasr_core.cache.decoder_kv import DenseDecoderCache
from oasr_core.decoding.autoregressive import AutoregressiveStrategy, Retry, hypotheses
from oasr_core.decoding.base import DecodeContext
from oasr_core.decoding.budget import StepBudget
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.decoding.options import AutoregressiveOptions
from oasr_core.decoding.sampling import Sampling
from oasr_core.models.base import DecoderKV, EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer


@pytest.fixture(scope="session")
def by_definition():
    """``by_definition(tokens, phrases) -> (completed, pending)``: every occurrence; the longest open beginning."""

    def score(tokens, phrases):
        boosts = {tuple(phrase): boost for phrase, boost in phrases}
        boosts = {phrase: boost for phrase, boost in boosts.items() if phrase and boost}
        tokens = tuple(tokens)
        completed = sum(
            boost * len(phrase)
            for phrase, boost in boosts.items()
            for start in range(len(tokens))
            if tokens[start : start + len(phrase)] == phrase
        )
        for start in range(len(tokens)):
            rest = tokens[start:]
            open_ones = [b for phrase, b in boosts.items() if len(phrase) > len(rest) and phrase[: len(rest)] == rest]
            if open_ones:
                return completed, max(open_ones) * len(rest)
        return completed, 0.0

    return score


class ToyHead:
    """A random decoder of two layers; the memory is the mean of the frames. ``broken_at`` counts steps to failure."""

    kv = DecoderKV(layers=2, kv_heads=2, head_dim=4)
    vocab_size = 23
    max_positions = 64
    memory_elements = 8
    dim, heads = 8, 4

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return torch.randn(*shape, generator=generator)

        self.tokens = weight(self.vocab_size, self.dim)
        self.positions = weight(self.max_positions, self.dim)
        self.query = weight(2, self.dim, self.heads * 4) / 3
        self.key_value = weight(2, self.dim, 2 * 2 * 4) / 3
        self.out = weight(2, self.heads * 4, self.dim) / 3
        self.project = weight(self.dim, self.vocab_size)
        self.steps = 0
        self.broken_at = None

    def memory(self, hidden, lengths):
        inside = torch.arange(hidden.shape[1])[None, :, None] < lengths[:, None, None]
        return (torch.where(inside, hidden, 0.0).sum(1) / lengths[:, None],)

    def step(self, tokens, state, memory):
        self.steps += 1
        if self.broken_at is not None and self.steps >= self.broken_at:
            raise RuntimeError("the decoder is broken")
        rows, count = tokens.shape
        x = self.tokens[tokens] + self.positions[state.positions()]
        x = x + memory[0].repeat_interleave(rows // len(memory[0]), 0)[:, None]
        for layer in range(2):
            query = (x @ self.query[layer]).view(rows, count, self.heads, 4)
            key, value = (x @ self.key_value[layer]).view(rows, count, 2, 2, 4).unbind(2)
            x = torch.tanh(x + state.attend(layer, query, key, value).reshape(rows, count, -1) @ self.out[layer])
        return x

    def logits(self, hidden):
        return (hidden @ self.project).float()


class ToyStrategy(AutoregressiveStrategy):
    """Prompts are the numbers in the request's prompt; token 0 ends, token 1 is forbidden, and the end comes not first.

    A request with the task "again" is decoded once more, by three draws; one with the task "spoil" cannot be finished.
    """

    oasr_api = "1.0"
    requires = ("toy",)
    honours = frozenset({"prompt", "temperature", "seed", "max_new_tokens", "task"})
    options_cls = AutoregressiveOptions
    beam_of_one = False

    @property
    def end_ids(self):
        return frozenset((0,))

    def sampling(self, options):
        return Sampling(1, True) if self.beam_of_one else super().sampling(options)

    def max_width(self, options):
        return max(super().max_width(options), 3 if options.task == "again" else 1)

    def prompt_ceiling(self, options):
        return len((options.prompt or "2").split())

    def rows(self, requests, memory, frames):
        self.seen = {}
        return [
            self.new_row(request, count, [int(word) for word in (request.options.prompt or "2").split()], probe=0)
            for request, count in zip(requests, frames, strict=True)
        ]

    def mask(self, logits, pairs):
        logits[:, 1] = -torch.inf
        first = [index for index, (_, candidate) in enumerate(pairs) if not candidate.tokens]
        logits[first, 0] = -torch.inf

    def probed(self, rows, logits):
        for row, values in zip(rows, logits, strict=True):
            self.seen[row.request.request_id] = values.argmax().item()

    def finish(self, row, memory):
        if row.request.options.task == "spoil":
            raise ValueError("nobody can finish this")
        if row.request.options.task == "again" and row.note is None:
            return Retry(Sampling(3, False, 1.0), "second")
        found = hypotheses(row)
        found.language = row.note
        return found


class Toy:
    """Requests of the toy family: inputs, results alone, results together."""

    Strategy = ToyStrategy

    def strategy(self, head=None, *, slots=32, budget=None, **options):
        """A strategy on a random decoder."""
        model = SimpleNamespace(interfaces={"toy": head or ToyHead()})
        context = DecodeContext(model, ByteTokenizer(), AutoregressiveOptions(**options), max_slots=slots)
        context.kv_budget_bytes = budget
        return ToyStrategy(context)

    def head(self, seed=0):
        """A random decoder."""
        return ToyHead(seed)

    def requests(self, count, seed=0, **options):
        """Requests with prompts of several lengths, and what an encoder made of their audio."""
        rng = random.Random(seed)
        lengths = [rng.randint(1, 6) for _ in range(count)]
        hidden = torch.randn(count, 6, 8, generator=torch.Generator().manual_seed(seed)) * 2
        made = []
        for index in range(count):
            prompt = " ".join(str(rng.randint(2, 22)) for _ in range(rng.randint(1, 20)))
            values = {"prompt": prompt, "max_new_tokens": rng.randint(1, 30), "seed": index, **options}
            made.append(IncrementalRequest(f"r{index}", DecodingOptions(**values)))
        return EncoderOutput(hidden, torch.tensor(lengths)), made

    def part(self, out, rows):
        """Some rows of an encoder output, as a micro-batch of their own."""
        return EncoderOutput(out.hidden[rows], out.lengths[rows])

    def drain(self, strategy, steps=1):
        """Everything that a strategy still has to tell, by request id: terminal progress, and all partials."""
        ended, partials = {}, {}
        while strategy.has_pending():
            for progress in strategy.advance(StepBudget(steps)):
                if progress.finished or progress.error is not None:
                    assert progress.request_id not in ended
                    ended[progress.request_id] = progress
                else:
                    assert progress.request_id not in ended
                    partials.setdefault(progress.request_id, []).append(progress.hypotheses)
        return ended, partials

    def alone(self, out, requests, **options):
        """Tokens and scores of each request when nobody else is there."""
        found = {}
        for index, request in enumerate(requests):
            strategy = self.strategy(**options)
            strategy.begin_offline(self.part(out, [index]), [request])
            found |= self.told(self.drain(strategy)[0])
        return found

    def told(self, ended):
        """Tokens of all hypotheses, the best score, and whether the cap was reached."""
        return {
            name: (
                [hypothesis.tokens for hypothesis in progress.hypotheses.nbest],
                round(progress.hypotheses.best.score, 3),
                progress.hypotheses.reached_cap,
            )
            for name, progress in ended.items()
        }

    def next_logits(self, head, memory, prompt, tokens):
        """Logits behind a prompt and tokens, computed from their beginning, without any history."""
        cache = DenseDecoderCache(head.kv, 1, dtype=torch.float32, device=torch.device("cpu"))
        sequence = torch.tensor([[*prompt, *tokens]])
        logits = head.logits(head.step(sequence, cache.begin(sequence.shape[1]), memory))[0, -1]
        logits[1] = -torch.inf
        if not tokens:
            logits[0] = -torch.inf
        return logits


@pytest.fixture(scope="session")
def toy():
    """The toy family."""
    return Toy()
