"""Error rates of transcripts, their confidence interval, and percentiles (torch-free)."""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Metric = Literal["wer", "cer"]

#: The apostrophe, its typographic forms and the modifier letter; inside of a word they are not a border.
_APOSTROPHES = frozenset("'\u2018\u2019\u02bc")


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Errors of a hypothesis, or the sum over many, against ``reference`` units (words or characters)."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    reference: int = 0

    @property
    def errors(self) -> int:
        """All errors together."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """Errors per reference unit; ``None`` without a reference unit."""
        return self.errors / self.reference if self.reference else None

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        return ErrorCounts(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.reference + other.reference,
        )


def normalise_text(text: str) -> str:
    """The form in which transcripts are compared: NFKC, case-folded, without punctuation, single spaces.

    Apostrophes vanish (``don't`` is ``dont``); any other punctuation (Unicode categories P*) becomes a space, so that
    ``well-known`` is two words. Symbols such as ``+`` and ``€`` stay.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = "".join(_without_punctuation(char) for char in folded)
    return " ".join(unicodedata.normalize("NFC", kept).split())  # a mark may have moved next to its letter


def _without_punctuation(char: str) -> str:
    if char in _APOSTROPHES:
        return ""
    return " " if unicodedata.category(char).startswith("P") else char


def text_units(text: str, metric: Metric) -> list[str]:
    """What is counted: the words between whitespace, or for ``cer`` the characters that are no whitespace."""
    return text.split() if metric == "wer" else [char for char in text if not char.isspace()]


def count_errors(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> ErrorCounts:
    """Errors of an alignment with the fewest of them; among several such, of one with the most substitutions."""
    n, m = len(reference), len(hypothesis)
    ids: dict[Hashable, int] = {}
    ref, hyp = (
        np.array([ids.setdefault(unit, len(ids)) for unit in units], dtype=np.int64)
        for units in (reference, hypothesis)
    )
    # Any error costs `unit`, an insertion or deletion 1 more. No alignment has `unit` of those, so the total splits
    # into the number of errors and the number of insertions and deletions, without tracing the alignment back.
    unit = n + m + 1
    gap = unit + 1
    along = np.arange(m + 1, dtype=np.int64) * gap
    row = along
    for i in range(n):
        arrived = row + gap  # a deletion
        arrived[1:] = np.minimum(arrived[1:], row[:-1] + np.where(hyp == ref[i], 0, unit))
        row = np.minimum.accumulate(arrived - along) + along  # then any number of insertions
    errors, gaps = divmod(int(row[-1]), unit)
    insertions = (gaps + m - n) // 2
    return ErrorCounts(errors - gaps, gaps - insertions, insertions, n)


def bootstrap_interval(
    errors: Sequence[int], references: Sequence[int], *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the corpus error rate, resampling utterances; the same for the same ``seed``.

    ``errors[i]`` and ``references[i]`` are the counts of utterance ``i``. ``None`` without a reference unit.
    """
    if len(errors) != len(references) or not 0.0 < confidence < 1.0 or resamples < 1:
        raise ValueError(
            f"{len(errors)} errors, {len(references)} references, confidence {confidence}, {resamples} resamples: "
            "expected as many errors as references, a confidence inside (0, 1) and at least one resample"
        )
    counts = np.array([errors, references], dtype=np.int64)
    if not counts[1].sum():
        return None
    random = np.random.default_rng(seed)
    sums = np.array([counts[:, random.integers(len(errors), size=len(errors))].sum(axis=1) for _ in range(resamples)])
    drawn = sums[sums[:, 1] > 0]  # a resample may consist of utterances without a reference unit
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [tail, 100.0 - tail])
    return float(low), float(high)


def percentiles(values: Sequence[float], points: Sequence[int] = (50, 90, 99)) -> dict[str, float] | None:
    """``{"p50": ..., "p90": ..., "p99": ...}``, linear between neighbours; ``None`` without values."""
    if not values:
        return None
    found: npt.NDArray[np.float64] = np.percentile(np.asarray(values, dtype=np.float64), points)
    return {f"p{point}": float(value) for point, value in zip(points, found, strict=True)}
