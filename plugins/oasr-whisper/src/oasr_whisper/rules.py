"""Which tokens may come next: the checkpoint's lists, and the grammar of timestamps.

The rules are those of OpenAI's ``ApplyTimestampRules``, which CTranslate2 shares: timestamps come in pairs (the end of
a segment and the beginning of the next), except for the first and before the end; they never decrease, and no segment
ends where it begins; and where all timestamps together are more probable than any text token, one of them is next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oasr_core.staging import to_device
from oasr_whisper.config import TIMESTAMP_SECONDS, WhisperTokens
from oasr_whisper.options import AedOptions

#: ``<|0.00|>`` to ``<|30.00|>``
TIMESTAMPS = 1501


class TokenRules:
    """Masks logits of hypotheses that are ``tokens`` long, counted behind the prompt."""

    def __init__(self, tokens: WhisperTokens, options: AedOptions, vocab_size: int, device: torch.device) -> None:
        """Ids of the options and the checkpoint outside of the vocabulary mask nothing."""
        self._tokens = tokens
        self._device = device
        self._always = _ids(options.suppress_tokens, tokens.suppress, vocab_size, device)
        begin = tokens.begin_suppress if options.suppress_blank else ()
        self._at_first = _ids(None, begin, vocab_size, device)
        self._count = min(TIMESTAMPS, vocab_size - tokens.timestamp_begin)
        seconds = options.max_initial_timestamp
        self._max_initial = (
            tokens.max_initial_timestamp_index if seconds is None else round(seconds / TIMESTAMP_SECONDS)
        )
        self._steps = torch.arange(self._count, device=device)

    def apply(self, logits: Tensor, generated: Sequence[Sequence[int]], timed: Sequence[bool]) -> None:
        """Set what may not follow to minus infinity, in place.

        ``logits`` ``(rows, vocab)`` float32; ``generated`` the tokens of each row so far, ``timed`` whether the row has
        timestamps.
        """
        if len(self._always):
            logits.index_fill_(1, self._always, -torch.inf)
        first = [row for row, tokens in enumerate(generated) if not tokens]
        if first and len(self._at_first):
            logits[to_device(first, torch.int64, self._device)[:, None], self._at_first] = -torch.inf
        if any(timed):
            self._apply_grammar(logits, generated, timed)

    def _apply_grammar(self, logits: Tensor, generated: Sequence[Sequence[int]], timed: Sequence[bool]) -> None:
        bounds = [
            (True, *self._bounds(tokens), not tokens) if flag else (False, False, 0, self._count, False)
            for tokens, flag in zip(generated, timed, strict=True)
        ]
        table = to_device(bounds, torch.int64, self._device)
        rows, text_ends, low, high, opens = table[:, :, None].unbind(1)
        rows, text_ends, opens = rows > 0, text_ends > 0, opens > 0
        begin = self._tokens.timestamp_begin
        logits[:, self._tokens.no_timestamps].masked_fill_(rows[:, 0], -torch.inf)
        if any(bound[1] for bound in bounds):
            logits[:, : self._tokens.eot].masked_fill_(text_ends, -torch.inf)
        stamps = logits[:, begin : begin + self._count]
        stamps.masked_fill_((self._steps < low) | (self._steps >= high), -torch.inf)
        text = logits[:, :begin]
        likelier = stamps.logsumexp(dim=1, keepdim=True) > text.amax(dim=1, keepdim=True)
        text.masked_fill_(rows & (likelier | opens), -torch.inf)

    def _bounds(self, tokens: Sequence[int]) -> tuple[bool, int, int]:
        """Whether text is over, and the range of timestamps, in steps from ``<|0.00|>``, that may follow ``tokens``."""
        if not tokens:
            return False, 0, min(self._max_initial + 1, self._count)
        begin = self._tokens.timestamp_begin
        latest = next((token - begin for token in reversed(tokens) if token >= begin), -1)
        if tokens[-1] < begin:
            return False, latest + 1, self._count
        if len(tokens) == 1 or tokens[-2] >= begin:
            return False, 0, 0
        return True, latest, self._count


def _ids(wanted: Sequence[int] | None, otherwise: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    chosen = otherwise if wanted is None else wanted
    return torch.tensor(sorted({token for token in chosen if token < vocab_size}), dtype=torch.int64, device=device)
