"""The machinery that label-synchronous families share: prompts in, groups stepped under a budget, rows retired.

A family subclasses :class:`AutoregressiveStrategy` and says what its prompts are, which tokens are forbidden when, and
what becomes of a request whose tokens are complete. Everything else (history, memory, groups that merge, sampling,
beams, failures) is here.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from oasr_core.cache.decoder_kv import (
    PAGE,
    DecoderCache,
    DenseDecoderCache,
    MemoryBudget,
    PagedDecoderPool,
    bytes_per_token,
    pages,
)
from oasr_core.decoding.base import DecodeContext, Hypotheses, Hypothesis, Mode, StrategyOptions
from oasr_core.decoding.budget import StepBudget
from oasr_core.decoding.decode_group import Candidate, DecodeGroup, Row
from oasr_core.decoding.incremental import IncrementalRequest, IncrementalStrategy, Progress
from oasr_core.decoding.options import MAX_WIDTH, AutoregressiveOptions
from oasr_core.decoding.sampling import Sampling
from oasr_core.errors import ConfigError, PluginContractError, RequestRefusedError
from oasr_core.models.base import AutoregressiveInterface, DecoderMemory, EncoderOutput
from oasr_core.request import DecodingOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """A request is decoded again from its prompt, in another way; ``note`` becomes the row's."""

    sampling: Sampling
    note: Any = None


class AutoregressiveStrategy(IncrementalStrategy):
    """Generates token by token with a model's :class:`~oasr_core.models.base.AutoregressiveInterface`."""

    options_cls: ClassVar[type[StrategyOptions]] = AutoregressiveOptions

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context)
        options = context.options
        if not isinstance(options, AutoregressiveOptions):
            raise PluginContractError(f"{type(self).__name__}.options_cls must derive from AutoregressiveOptions")
        self._settings = options
        self.head: AutoregressiveInterface = context.model.interfaces[self.requires[0]]
        if options.beam_size >= self.head.vocab_size:
            raise ConfigError(
                f"decode_options beam_size={options.beam_size} is more than the {self.head.vocab_size} tokens of this "
                "model can fill; lower it."
            )
        self._device = context.device or torch.device("cpu")
        self._dtype = context.dtype or torch.float32
        limit = context.kv_budget_bytes
        if limit is not None and context.kv_budget_derived:
            limit = max(limit, self._row_bytes(self.head.max_positions, self.max_width(DecodingOptions())))
        self._budget = MemoryBudget(limit)
        self._pool = self._build_pool(context) if self._is_paged else None
        self._groups: deque[DecodeGroup] = deque()
        self._retries: deque[tuple[Row, DecoderMemory]] = deque()
        #: What ended with its first token, before any step.
        self._early: list[Progress] = []

    # -- what a family says -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a hypothesis."""

    @abstractmethod
    def rows(self, requests: Sequence[IncrementalRequest], memory: DecoderMemory, frames: Sequence[int]) -> list[Row]:
        """Prompts and settings of requests whose audio fills ``frames`` encoder frames."""

    def mask(self, logits: Tensor, pairs: Sequence[tuple[Row, Candidate]]) -> None:
        """Set the logits ``(rows, vocab)`` of what may not follow to minus infinity, in place."""

    def probed(self, rows: Sequence[Row], logits: Tensor) -> None:
        """See the predictions behind the prompt tokens that rows named by ``probe``."""

    def may_revise(self, row: Row) -> bool:
        """Whether :meth:`finish` may take back what the partials of a request have shown."""
        return False

    def finish(self, row: Row, memory: DecoderMemory) -> Hypotheses | Retry:
        """The result of a request whose tokens are complete; ``memory`` is its own row's."""
        return hypotheses(row)

    def prompt_ceiling(self, options: DecodingOptions) -> int:
        """Most tokens that the prompt of such a request can have."""
        return self.head.max_positions

    def sampling(self, options: DecodingOptions) -> Sampling:
        """How a request is decoded: beam search, greedy, or ``n_best`` independent draws."""
        if options.temperature > 0.0:
            return Sampling(options.n_best, False, options.temperature, options.top_k, options.top_p)
        width = self._settings.beam_size
        return Sampling(width, width > 1)

    def max_width(self, options: DecodingOptions) -> int:
        """Most hypotheses that such a request is decoded with at once."""
        return self.sampling(options).width

    # -- helpers of families ------------------------------------------------------------------------------------------

    def new_row(
        self,
        request: IncrementalRequest,
        frames: int,
        prompt: Sequence[int],
        *,
        probe: int | None = None,
        note: Any = None,
    ) -> Row:
        """A row with the settings of its request."""
        options = request.options
        room = self.head.max_positions - len(prompt)
        if room < 1:
            raise RequestRefusedError(
                f"the prompt has {len(prompt)} tokens and the decoder {self.head.max_positions} positions; shorten it."
            )
        row = Row(
            request,
            frames,
            list(prompt),
            self.sampling(options),
            min(options.max_new_tokens or self._settings.max_new_tokens, room),
            self._settings.length_penalty,
            self._settings.patience,
            probe,
            note=note,
        )
        self._seed(row)
        return row

    def scratch(self, rows: int) -> DecoderCache:
        """History for a pass of the family's own."""
        return DenseDecoderCache(self.head.kv, rows, dtype=self._dtype, device=self._device)

    # -- the protocol -------------------------------------------------------------------------------------------------

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse what can never be had: more hypotheses than are searched, more memory than there is."""
        if options.temperature == 0.0 and options.n_best > self._settings.beam_size:
            raise RequestRefusedError(
                f"n_best={options.n_best} needs a beam of as many hypotheses; decode_options beam_size is "
                f"{self._settings.beam_size}."
            )
        if options.n_best > MAX_WIDTH:
            raise RequestRefusedError(f"n_best={options.n_best}: at most {MAX_WIDTH} hypotheses are drawn at once.")
        size = self._ceiling_bytes(options)
        if self._budget.limit is not None and size > self._budget.limit:
            raise RequestRefusedError(
                f"the request may take {size} bytes of decoder memory and the budget is {self._budget.limit}; raise "
                "decode_kv_budget_gib, or lower beam_size or max_new_tokens."
            )

    def reserve(self, request: IncrementalRequest) -> bool:
        """Set aside the bytes of the longest transcript and of the memory."""
        return self._budget.reserve(request.request_id, self._ceiling_bytes(request.options))

    def begin_offline(self, out: EncoderOutput, requests: Sequence[IncrementalRequest]) -> None:
        """Prefill a micro-batch; it joins the running group of its kind."""
        with torch.inference_mode():
            memory = self.head.memory(out.hidden, out.lengths)
            rows = self.rows(requests, memory, out.lengths.tolist())
        self._start(rows, memory)

    def has_pending(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._groups or self._retries or self._early)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        for group in list(self._groups):
            for index, row in enumerate(group.rows):
                if row.request.request_id == request_id:
                    self._drop(group, index)
                    break
        self._retries = deque(item for item in self._retries if item[0].request.request_id != request_id)
        self._early = [progress for progress in self._early if progress.request_id != request_id]
        self._budget.release(request_id)

    def advance(self, budget: StepBudget) -> list[Progress]:
        """Step the groups in turn; a group whose step fails costs its own requests only."""
        ended, self._early = self._early, []
        while (self._groups or self._retries) and budget.take():
            if self._retries:
                self._retry(ended)
                continue
            group = self._groups[0]
            self._groups.rotate(-1)
            try:
                group.step()
            except Exception as error:
                self._fail(group, error, ended)
            else:
                self._retire(group, ended)
        return ended + [self._shown(row) for row in self._unfinished() if len(row.candidates[0].tokens) != row.shown]

    # -- groups -------------------------------------------------------------------------------------------------------

    def _start(self, rows: Sequence[Row], memory: DecoderMemory) -> None:
        """Prefill new groups, all or none, and merge each into the running group of its kind."""
        started: list[DecodeGroup] = []
        try:
            for kind in dict.fromkeys(row.sampling.kind for row in rows):
                index = [place for place, row in enumerate(rows) if row.sampling.kind == kind]
                chosen = memory if len(index) == len(rows) else tuple(tensor[index] for tensor in memory)
                group = DecodeGroup(
                    self.head, [rows[i] for i in index], chosen, self._cache(rows, index), self.end_ids, self.mask
                )
                started.append(group)
                group.prefill(self.probed)
        except Exception:
            for group in started:
                group.release()
            raise
        for group in started:
            self._retire(group, self._early)
            if group.rows:
                self._join(group)

    def _join(self, group: DecodeGroup) -> None:
        """Merge; where memory is short for it the groups go on side by side."""
        mates = (each for each in self._groups if each.kind == group.kind and each.memory.fits(group.memory))
        mate = next(mates, None) if self._settings.merge_groups else None
        if mate is not None:
            try:
                mate.extend(group, self._most_rows())
                return
            except (MemoryError, RuntimeError) as error:  # a RuntimeError: how an allocation fails on the CPU
                logger.warning(
                    "no memory to merge a group of %d into one of %d: %s", len(group.rows), len(mate.rows), error
                )
        self._groups.append(group)

    def _retire(self, group: DecodeGroup, ended: list[Progress]) -> None:
        """Let the rows go that are done, from the back, so that a leaving row's place is taken by one that stays."""
        for index in reversed(range(len(group.rows))):
            row = group.rows[index]
            if not row.done:
                continue
            try:
                if row.error is not None:
                    raise row.error
                memory = group.memory.row(index)
                result = self.finish(row, memory)
                if isinstance(result, Retry):
                    again = self._again(row, result)
                    self._retries.append((again, tuple(tensor.clone() for tensor in memory)))
                else:
                    self._end(Progress(row.request.request_id, result, finished=True), ended)
            except Exception as error:
                self._end(Progress(row.request.request_id, error=error), ended)
            self._drop(group, index)

    def _again(self, row: Row, retry: Retry) -> Row:
        again = self.new_row(row.request, row.frames, row.prompt, probe=row.probe, note=retry.note)
        again.sampling = retry.sampling
        self._seed(again)
        return again

    def _end(self, progress: Progress, ended: list[Progress]) -> None:
        ended.append(progress)
        self._budget.release(progress.request_id)

    def _drop(self, group: DecodeGroup, index: int) -> None:
        if len(group.rows) == 1:
            group.rows.clear()
            group.release()
            if group in self._groups:
                self._groups.remove(group)
        else:
            group.drop(index)

    def _retry(self, ended: list[Progress]) -> None:
        row, memory = self._retries.popleft()
        try:
            self._start([row], memory)
        except Exception as error:
            self._end(Progress(row.request.request_id, error=error), ended)

    def _fail(self, group: DecodeGroup, error: Exception, ended: list[Progress]) -> None:
        self._groups.remove(group)
        group.release()
        for row in group.rows:
            self._end(Progress(row.request.request_id, error=error), ended)

    def _unfinished(self) -> Iterator[Row]:
        return (row for group in self._groups for row in group.rows)

    def _shown(self, row: Row) -> Progress:
        row.shown = len(row.candidates[0].tokens)
        found = hypotheses(row, best_only=True)
        if row.sampling.width == 1 and not self.may_revise(row):
            found.stable_tokens = len(found.best.tokens)
        return Progress(row.request.request_id, found)

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def _is_paged(self) -> bool:
        storage = self._settings.kv_storage
        return storage == "paged" or (storage == "auto" and self._device.type == "cuda")

    def _token_bytes(self) -> int:
        return bytes_per_token(self.head.kv, self._dtype.itemsize)

    def _ceiling(self, options: DecodingOptions) -> int:
        wanted = self.prompt_ceiling(options) + (options.max_new_tokens or self._settings.max_new_tokens)
        return min(wanted, self.head.max_positions)

    def _ceiling_bytes(self, options: DecodingOptions) -> int:
        return self._row_bytes(self._ceiling(options), self.max_width(options))

    def _row_bytes(self, tokens: int, width: int) -> int:
        """Bytes of a request with ``width`` hypotheses of ``tokens`` tokens."""
        history = width * pages(tokens) * PAGE * self._token_bytes()
        return history + self.head.memory_elements * self._dtype.itemsize

    def _most_rows(self) -> int:
        """Requests that slots and budget let in at once."""
        slots, limit = self.context.max_slots, self._budget.limit
        return slots if limit is None else min(slots, limit // self._row_bytes(1, 1))

    def _build_pool(self, context: DecodeContext) -> PagedDecoderPool:
        """Pages for every slot at its longest, or the histories' share of what the budget holds where that is less.

        No requests that fit the budget need more pages: the share of history is largest in the longest request.
        """
        longest = pages(self.head.max_positions)
        count = context.max_slots * longest
        if self._budget.limit is not None:
            share = self._budget.limit * longest // self._row_bytes(self.head.max_positions, 1)
            count = min(count, max(share, longest))
        return PagedDecoderPool(self.head.kv, count, dtype=self._dtype, device=self._device)

    def _cache(self, rows: Sequence[Row], index: Sequence[int]) -> DecoderCache:
        chosen = [rows[i] for i in index]
        if self._pool is not None and chosen[0].sampling.width == 1:
            return self._pool.open([len(row.prompt) + row.max_new for row in chosen])
        return DenseDecoderCache(self.head.kv, len(chosen), dtype=self._dtype, device=self._device)

    def _seed(self, row: Row) -> None:
        if row.sampling.temperature > 0.0:
            row.generator = torch.Generator().manual_seed(row.request.options.seed or 0)


def hypotheses(row: Row, *, best_only: bool = False) -> Hypotheses:
    """The hypotheses of a row as they stand, best first."""
    ranked = row.ranked()[: 1 if best_only else None]
    return Hypotheses(
        [
            Hypothesis(
                list(candidate.tokens),
                token_log_probs=list(candidate.log_probs),
                score=candidate.normalized(row.length_penalty),
            )
            for candidate in ranked
        ],
        reached_cap=ranked[0].reached_cap,
    )
