"""The contract of the ``oasr.decode_strategies`` axis.

A strategy says which model interfaces it requires; the engine checks that once, at construction. It works on
whole micro-batches (offline) and on all streams of a step together (streaming), and returns token-level
:class:`Hypotheses`; words, texts and confidences are made from them in one place, ``oasr_core.outputs``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch

    from oasr_core.models.base import BaseAsrModel, EncoderOutput
    from oasr_core.request import DecodingOptions
    from oasr_core.tokenizers.base import Tokenizer

Mode = Literal["offline", "streaming"]
Consumes = Literal["log_probs", "hidden", "both"]


class StrategyOptions(BaseModel):
    """Base of a strategy's ``options_cls`` and ``request_options_cls``: explicit, typed, documented fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoOptions(StrategyOptions):
    """A strategy without options."""


@dataclass
class Hypothesis:
    """One transcript in token ids.

    ``frames[i]`` is the encoder frame, counted from the start of the utterance, in which token ``i`` was first emitted
    (the first frame of its run); ``token_log_probs[i]`` its log posterior; ``score`` the log score that ranks
    hypotheses. ``end_frames[i]`` is the first frame behind token ``i`` where the strategy knows it.
    """

    tokens: list[int]
    frames: list[int] | None = None
    token_log_probs: list[float] | None = None
    score: float = 0.0
    context_score: float = 0.0
    end_frames: list[int] | None = None


@dataclass(frozen=True)
class TokenSpan:
    """A segment of a hypothesis: tokens ``first`` to ``last`` (exclusive), said from ``start`` to ``end`` seconds."""

    first: int
    last: int
    start: float
    end: float


@dataclass
class Hypotheses:
    """The n best of one request, best first, never empty, and the silence that follows its last token.

    The first ``stable_tokens`` tokens of the best hypothesis are common to all that can still win, so no later partial
    takes them back; the count never shrinks. ``segments`` are those that the model itself marks in the best one
    (``None``: it marks none), ``consumed_seconds`` how much of the audio they account for (``None``: all of it), and
    ``temperature`` the last one that was tried, at which the best was found unless none gave a good result.
    ``language_prob`` is that of a detected ``language``. ``reached_final`` says, for a search in a graph, whether the
    best path ends in one of its final states.
    """

    nbest: list[Hypothesis]
    trailing_silence_frames: int = 0
    stable_tokens: int = 0
    language: str | None = None
    language_prob: float | None = None
    reached_final: bool | None = None
    no_speech_prob: float | None = None
    segments: list[TokenSpan] | None = None
    consumed_seconds: float | None = None
    temperature: float | None = None
    reached_cap: bool = False
    unencoded_hotwords: list[str] = field(default_factory=list)

    @property
    def best(self) -> Hypothesis:
        """The first of them."""
        return self.nbest[0]


@dataclass
class DecodeContext:
    """What a strategy is built with."""

    model: BaseAsrModel
    tokenizer: Tokenizer
    options: StrategyOptions = field(default_factory=NoOptions)
    #: Where and in which precision the model runs; ``None``: on the CPU, in float32.
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    #: Requests that an incremental strategy may have in flight, and the bytes that they may take (``None``: no limit).
    #: A budget that was derived from free memory is raised to one request, so that a tight device still admits work.
    max_slots: int = 32
    kv_budget_bytes: int | None = None
    kv_budget_derived: bool = False


class Session:
    """Per-stream decoding state; a strategy subclasses it freely."""


class DecodeStrategy(ABC):
    """Turns encoder outputs into hypotheses."""

    #: Names of the model interfaces that must be offered.
    requires: ClassVar[tuple[str, ...]] = ()
    #: Which forward is run: with ``log_probs`` the fused CTC head, with ``hidden`` the encoder alone.
    consumes: ClassVar[Consumes] = "log_probs"
    #: Modes that the strategy serves.
    modes: ClassVar[tuple[Mode, ...]] = ("offline", "streaming")
    #: Fields of ``DecodingOptions`` that this strategy honours; others, when set, are refused at admission by name.
    honours: ClassVar[frozenset[str]] = frozenset()
    #: Whether the family writes text over audio without speech, so that ``silence_gate="auto"`` keeps it away.
    invents_text: ClassVar[bool] = False
    options_cls: ClassVar[type[StrategyOptions]] = NoOptions
    request_options_cls: ClassVar[type[StrategyOptions]] = NoOptions

    def __init__(self, context: DecodeContext) -> None:
        self.context = context

    @property
    def output_tokenizer(self) -> Tokenizer:
        """What makes text of the hypotheses' ids: the model's tokenizer, unless a strategy has ids of its own."""
        return self.context.tokenizer

    def validate(self, options: DecodingOptions, mode: Mode) -> None:  # noqa: B027 - an optional hook
        """Raise ``RequestRefusedError`` for a combination of request options that cannot be honoured."""

    @abstractmethod
    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Decode a micro-batch; row ``i`` of ``out`` belongs to ``options[i]``."""

    def open(self, options: DecodingOptions) -> Session:
        """Begin the decoding state of one stream."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def decode_chunk(self, sessions: Sequence[Session], out: EncoderOutput, last: Sequence[bool]) -> list[Hypotheses]:
        """Advance all streams of a step by their chunk; returns cumulative hypotheses, one per session."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def current(self, session: Session) -> Hypotheses:
        """The cumulative hypotheses of a stream as they stand (used when a stream ends without a further chunk)."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def close(self, session: Session) -> None:  # noqa: B027 - an optional hook
        """Release the state of a stream (finished, failed or aborted)."""
