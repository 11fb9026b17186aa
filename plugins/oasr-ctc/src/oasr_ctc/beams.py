"""What prefix beam search remembers of its streams: records of prefixes and of emitted tokens."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# Arrays of records, of the dtypes below; their fields are attributes in compiled code, which no type checker knows.
Prefixes: TypeAlias = Any
Emissions: TypeAlias = Any

#: A prefix in a beam. Every field has eight bytes, so that a device can take the records as a matrix.
PREFIX = np.dtype(
    [
        ("hash", np.int64),  # of its tokens: who has equal tokens has an equal hash
        ("parent_hash", np.int64),  # of its tokens but the last
        ("last", np.int64),  # its last token, -1 where there is none
        ("length", np.int64),  # tokens
        ("emission_blank", np.int64),  # last token on the best alignment that ends in blank, -1: none
        ("emission_nonblank", np.int64),  # the same of the best alignment that ends in the last token
        ("spoken", np.int64),  # last frame that is not blank on the best alignment that ends in blank, -1: none
        ("state", np.int64),  # of the context graph
        ("blank", np.float64),  # log of the summed probability of the alignments that end in blank
        ("nonblank", np.float64),  # the same of those that end in the last token
        ("best_blank", np.float64),  # log probability of the best alignment that ends in blank
        ("best_nonblank", np.float64),  # the same of the best that ends in the last token
        ("kept", np.float64),  # context score of completed phrases
        ("pending", np.float64),  # context score of the phrase that is being matched
    ]
)

#: A token on an alignment. Later ones have higher indices than those that they follow.
EMISSION = np.dtype(
    [
        ("parent", np.int32),  # the token before it on that alignment, -1: none
        ("token", np.int32),
        ("frame", np.int32),  # in which it is first emitted, from the start of the utterance
        ("log_prob", np.float32),  # the larger of its log posteriors in that frame and in the next
    ]
)


def empty_prefix() -> Prefixes:
    """The only prefix of a stream that has said nothing: a record of ``PREFIX``."""
    prefix = np.zeros((), PREFIX)
    prefix["last"] = prefix["emission_blank"] = prefix["emission_nonblank"] = prefix["spoken"] = -1
    prefix["nonblank"] = prefix["best_nonblank"] = -np.inf
    return prefix
