"""Endpointing: where a segment of a stream ends. Rules are data; an endpoint reports and commits, it resets nothing.

An endpoint makes the tokens so far a finished segment with absolute times. Encoder, predictor, beam and context state
go on untouched, so the words of a stream are the same with endpointing on and off. Only tokens that no later partial
can take back are committed, so a committed segment is final.

Source of the default rules: Kaldi ``online2/online-endpoint.h``, in the three-rule form of sherpa-onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from oasr_core.decoding.base import Hypotheses


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
    """A finished segment: tokens ``[first, last)`` of the best hypothesis, and its span in encoder frames."""

    first: int
    last: int
    start_frame: int
    end_frame: int


class Endpointer:
    """The endpoints of one stream."""

    def __init__(self, rules: Sequence[EndpointRule], frame_seconds: float) -> None:
        """``frame_seconds`` are the seconds per encoder frame."""
        self._rules = rules
        self._frame_seconds = frame_seconds
        self._first = 0
        self._start_frame = 0

    @property
    def committed_tokens(self) -> int:
        """Tokens that belong to finished segments."""
        return self._first

    def update(self, hyps: Hypotheses, frames: int) -> Commit | None:
        """Whether a segment ends here: ``hyps`` are cumulative, ``frames`` the encoder frames decoded so far.

        A rule of silence waits until everything said in the segment is stable. A rule of length cuts behind the last
        stable token, so that a token is never divided.
        """
        tokens = len(hyps.best.tokens)
        if not any(self._holds(rule, hyps, tokens, frames) for rule in self._rules):
            return None
        last = min(hyps.stable_tokens, tokens)
        silent = hyps.trailing_silence_frames * self._frame_seconds
        by_length = any(rule.min_segment_length > 0 for rule in self._rules if self._holds(rule, hyps, tokens, frames))
        if last < tokens and not by_length:
            return None
        return self._commit(hyps, last, frames, silent)

    def finish(self, hyps: Hypotheses, frames: int) -> Commit | None:
        """What is left at the end of the stream, if anything was said."""
        tokens = len(hyps.best.tokens)
        return self._commit(hyps, tokens, frames, 0.0) if tokens > self._first else None

    def _holds(self, rule: EndpointRule, hyps: Hypotheses, tokens: int, frames: int) -> bool:
        silence = min(hyps.trailing_silence_frames, frames - self._start_frame) * self._frame_seconds
        length = (frames - self._start_frame) * self._frame_seconds
        return (
            (tokens > self._first or not rule.must_contain_token)
            and silence >= rule.min_trailing_silence
            and length >= rule.min_segment_length
        )

    def _commit(self, hyps: Hypotheses, last: int, frames: int, silent: float) -> Commit | None:
        start = self._start_frame
        stays = hyps.best.frames[last:] if hyps.best.frames is not None else []
        end = stays[0] if stays else frames  # the next segment begins with the first token that stays
        commit = Commit(self._first, last, start, end)
        self._first, self._start_frame = last, end
        return commit if commit.last > commit.first else None
