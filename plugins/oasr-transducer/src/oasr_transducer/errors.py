"""What a transducer's numbers can be refused for."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.errors import OasrError


class InvalidLogitsError(OasrError, ValueError):
    """Joint network outputs that give no posteriors; ``rows`` are the batch rows at fault."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)

    @classmethod
    def of(cls, rows: Sequence[int]) -> InvalidLogitsError:
        """The error of ``rows``."""
        return cls(
            f"Transducer logits of batch row(s) {list(rows)} are NaN, +inf or all -inf; finite values, and -inf for "
            "some labels, are allowed. The encoder or the joint network overflowed or its weights are not finite: "
            "check the checkpoint, or run it with dtype='float32'.",
            rows,
        )
