"""Endpointing: where a segment of a stream ends. Rules are data; an endpoint reports, it resets nothing by itself.

An endpoint makes what has been said so far a finished segment with absolute times. Encoder, predictor, beam and context
state go on untouched, so the words of a stream are the same with endpointing on and off.

Source of the default rules: Kaldi ``online2/online-endpoint.h``, in the three-rule form that sherpa-onnx documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field

from oasr_core.decoding.base import Hypotheses, Hypothesis


class EndpointRule(BaseModel):
    """A segment ends when all of a rule's conditions hold; seconds of audio."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    must_contain_token: bool = Field(True, description="Only after something has been decoded in the segment.")
    min_trailing_silence: float = Field(0.0, ge=0, description="Seconds without a token at the end.")
    min_segment_length: float = Field(0.0, ge=0, description="Seconds since the segment began.")


DEFAULT_RULES: tuple[EndpointRule, ...] = (
    EndpointRule(must_contain_token=False, min_trailing_silence=2.4),
    EndpointRule(must_contain_token=True, min_trailing_silence=1.2),
    EndpointRule(must_contain_token=True, min_segment_length=20.0),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """A finished segment: tokens ``[first, last)`` of the best hypothesis, all before encoder frame ``end_frame``."""

    first: int
    last: int
    end_frame: int


class Endpointer:
    """The endpoints of one stream."""

    def __init__(self, rules: Sequence[EndpointRule], frame_seconds: float) -> None:
        """``frame_seconds`` are the seconds per encoder frame."""
        self._rules = rules
        self._frame_seconds = frame_seconds
        self._start_frame = 0
        #: First encoder frame behind each finished segment that has words.
        self.boundaries: list[int] = []

    def update(self, hyps: Hypotheses, frames: int) -> Commit | None:
        """Whether a segment with words ends here: ``hyps`` are cumulative, ``frames`` encoder frames decoded so far.

        After silence everything said is committed. A rule of length alone cuts in front of the newest token that may
        still change, or behind the last token: never inside one.
        """
        best = hyps.best
        first = tokens_before(best, self._start_frame)
        holding = [rule for rule in self._rules if self._holds(rule, hyps, first, frames)]
        if not holding:
            return None
        silent = any(rule.min_trailing_silence > 0 for rule in holding)
        last = len(best.tokens)
        if not silent and best.frames is not None and first < hyps.stable_tokens < last:
            last = hyps.stable_tokens
        end = frames if last == len(best.tokens) or best.frames is None else best.frames[last]
        commit = Commit(first, last, end) if last > first else None
        self._start_frame = end
        if commit is not None:
            self.boundaries.append(end)
        return commit

    def _holds(self, rule: EndpointRule, hyps: Hypotheses, first: int, frames: int) -> bool:
        length = frames - self._start_frame
        silence = min(hyps.trailing_silence_frames, length)
        return (
            (len(hyps.best.tokens) > first or not rule.must_contain_token)
            and silence * self._frame_seconds >= rule.min_trailing_silence
            and length * self._frame_seconds >= rule.min_segment_length
        )


def tokens_before(hypothesis: Hypothesis, frame: int) -> int:
    """How many tokens were emitted before ``frame`` (all of them where the strategy gives no frames)."""
    if frame == 0:
        return 0
    if hypothesis.frames is None:
        return len(hypothesis.tokens)
    return sum(emitted < frame for emitted in hypothesis.frames)


def part(hypothesis: Hypothesis, first: int, last: int) -> Hypothesis:
    """Tokens ``[first, last)`` of a hypothesis with their frames and posteriors; it has no score of its own."""
    frames, log_probs = hypothesis.frames, hypothesis.token_log_probs
    return Hypothesis(
        hypothesis.tokens[first:last],
        None if frames is None else frames[first:last],
        None if log_probs is None else log_probs[first:last],
    )


def cut(hypothesis: Hypothesis, boundaries: Sequence[int]) -> list[Hypothesis]:
    """The parts of a hypothesis between ``boundaries`` (encoder frames); parts without tokens are left out."""
    edges = [0, *(tokens_before(hypothesis, frame) for frame in boundaries), len(hypothesis.tokens)]
    return [part(hypothesis, first, last) for first, last in pairwise(edges) if last > first]


def joined(prefix: Hypothesis, hyps: Hypotheses, base_frame: int) -> Hypotheses:
    """Hypotheses of a decoder that was reset at ``base_frame``, behind what it had said before."""
    return Hypotheses(
        [_behind(prefix, hyp, base_frame) for hyp in hyps.nbest],
        trailing_silence_frames=hyps.trailing_silence_frames,
        stable_tokens=len(prefix.tokens) + hyps.stable_tokens,
        language=hyps.language,
        no_speech_prob=hyps.no_speech_prob,
        reached_cap=hyps.reached_cap,
        unencoded_hotwords=hyps.unencoded_hotwords,
    )


def _behind(prefix: Hypothesis, hyp: Hypothesis, base_frame: int) -> Hypothesis:
    frames = log_probs = None
    if prefix.frames is not None and hyp.frames is not None:
        frames = [*prefix.frames, *(frame + base_frame for frame in hyp.frames)]
    if prefix.token_log_probs is not None and hyp.token_log_probs is not None:
        log_probs = [*prefix.token_log_probs, *hyp.token_log_probs]
    return Hypothesis([*prefix.tokens, *hyp.tokens], frames, log_probs, prefix.score + hyp.score)
