"""What bounds a prefix beam search."""

from __future__ import annotations

import math
from typing import NamedTuple

from oasr_ctc.options import CtcOptions

_NO_CAP = 2**62


class Limits(NamedTuple):
    """The numbers that both implementations of the search read.

    ``threshold`` is a log posterior of ``blank``; ``width`` labels are found in each frame, and with ``only_labels`` no
    other is considered; prefixes of ``max_length`` tokens are not extended.
    """

    blank: int
    threshold: float
    width: int
    only_labels: bool
    max_length: int

    @classmethod
    def of(cls, options: CtcOptions, blank_id: int) -> Limits:
        """The limits that ``options`` ask for.

        Without ``first_beam_size`` the labels found are enough for an exact search without hotwords: the candidates
        that the ``beam_size`` best labels give one prefix outrank what the other labels could give, but for blank,
        which gives none, and the prefix's last token, which may give an improbable one.
        """
        posterior = options.blank_threshold
        threshold = math.inf if posterior >= 1.0 else math.log(posterior) if posterior > 0.0 else -math.inf
        return cls(
            blank=blank_id,
            threshold=threshold,
            width=options.first_beam_size or options.beam_size + 2,
            only_labels=options.first_beam_size is not None,
            max_length=options.max_seq_len or _NO_CAP,
        )

    def within(self, vocab: int, penalised: int) -> Limits:
        """For a vocabulary, and hotwords of which ``penalised`` tokens may lower a score and be outranked for that."""
        width = self.width if self.only_labels else self.width + penalised
        return self._replace(width=min(width, vocab))
