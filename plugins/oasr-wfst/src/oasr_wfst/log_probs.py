"""From the encoder's output to the rows that are searched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oasr_core.errors import OasrError, PluginContractError
from oasr_core.models.base import EncoderOutput
from oasr_wfst.tokens import Floats


class InvalidLogProbsError(OasrError, ValueError):
    """Log posteriors that are none: NaN or positive infinity."""


def posteriors_of(out: EncoderOutput, count: int) -> torch.Tensor:
    """The log posteriors ``(count, frames, labels)``; ``PluginContractError`` where there are none, or other rows."""
    if out.log_probs is None:
        raise PluginContractError(
            "Strategy 'ctc_wfst' consumes log_probs, but the encoder output has none; run the forward with the CTC "
            "head."
        )
    if len(out.log_probs) != count:
        raise PluginContractError(
            f"Strategy 'ctc_wfst' was given {count} requests and log_probs of {len(out.log_probs)} rows; they must be "
            "equal."
        )
    return out.log_probs.detach()


def rows_of(out: EncoderOutput, count: int) -> list[Floats]:
    """Log posteriors ``(frames, labels)`` of each of ``count`` rows, without the padding, on the host.

    Raises what :func:`posteriors_of` and :func:`refuse_invalid` raise.
    """
    batch = posteriors_of(out, count).to("cpu", torch.float32)
    rows = [np.ascontiguousarray(batch[row, : int(length)].numpy()) for row, length in enumerate(out.lengths.tolist())]
    refuse_invalid(rows)
    return rows


def refuse_invalid(rows: Sequence[Floats]) -> None:
    """Raise ``InvalidLogProbsError`` where any of ``rows``, each ``(frames, ...)``, is none, naming row and frame."""
    for index, row in enumerate(rows):
        # A maximum is NaN where any value is, and needs no array of flags.
        if row.size and not row.max() < np.inf:
            frame = int(np.flatnonzero(~(row.max(axis=1) < np.inf))[0])
            raise InvalidLogProbsError(
                f"CTC log posteriors of batch row {index} are NaN or +inf, first in frame {frame}; finite values or "
                "-inf are allowed. The encoder overflowed or its weights are not finite: check the checkpoint, or run "
                "it with dtype='float32'."
            )
