"""What goes in and comes out: request options, word timings, outputs (torch-free, JSON-serialisable)."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from oasr_core.errors import RequestRefusedError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from oasr_core.audio import StreamResampler
    from oasr_core.frontend.streaming import FeatureStream

FinishReason = Literal["stop", "length", "abort", "error"]


class Hotword(BaseModel):
    """A phrase that the decoder should prefer, or avoid where ``boost`` is negative."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    phrase: str = Field(pattern=r"\S", description="Text, as the model writes it; encoded by the engine's tokenizer.")
    boost: float | None = Field(
        None, allow_inf_nan=False, description="Added to the log score for each token; None: the engine's default."
    )


def _as_hotword(value: Any) -> Any:
    return Hotword(phrase=value) if isinstance(value, str) else value


#: Phrases: each a string, or a mapping with ``phrase`` and ``boost``.
Hotwords = tuple[Annotated[Hotword, BeforeValidator(_as_hotword)], ...]


class DecodingOptions(BaseModel):
    """What one request asks of the decoder. A strategy refuses, by name, what it cannot honour."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_best: int = Field(1, ge=1, description="Hypotheses wanted in the output.")
    word_timestamps: bool = Field(False, description="Fill RequestOutput.words.")
    segment_timestamps: bool = Field(False, description="Have the model write the times of its segments.")
    max_new_tokens: int | None = Field(None, ge=1, description="Cap of generated tokens (448 where it applies).")
    temperature: float = Field(0.0, ge=0.0, le=100.0, description="Sampling temperature: 0 (greedy), or from 0.01 on.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Seed of what is sampled; None: 0.")
    top_k: int = Field(0, ge=0, description="Sample among the k best, 0 for all.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Sample within this probability mass.")
    prompt: str | None = Field(None, description="Text that conditions the decoder.")
    context_tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="Ids that were said before this audio, timestamps included; they follow the prompt's text."
    )
    task: str | None = Field(None, description="transcribe or translate.")
    language: str | None = Field(None, description="Primary language subtag, lower case.")
    endpointing: bool | None = Field(None, description="Report ends of segments; None: as the engine is configured.")
    hotwords: Hotwords = Field((), description="Phrases to prefer: strings, or mappings with phrase and boost.")
    extra: dict[str, Any] = Field(default_factory=dict, description="A strategy's own per-request options.")

    @field_validator("temperature")
    @classmethod
    def _not_near_zero(cls, value: float) -> float:
        if 0.0 < value < 0.01:
            raise ValueError("is 0 (greedy) or at least 0.01")
        return value

    def __init__(self, **values: Any) -> None:
        """Raises ``RequestRefusedError`` for an unknown option or a value out of range."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise RequestRefusedError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """All findings of a validation in one readable message."""
    lines = []
    for finding in error.errors():
        name = ".".join(str(part) for part in finding["loc"])
        if finding["type"] == "extra_forbidden":
            known = DecodingOptions.model_fields if len(finding["loc"]) == 1 else Hotword.model_fields
            hint = did_you_mean(str(finding["loc"][-1]), known)
            lines.append(f"unknown option {name!r}; known: {', '.join(known)}.{hint}")
        else:
            lines.append(f"{name}: {finding['msg'].removeprefix('Value error, ')} (got {finding['input']!r})")
    return "invalid decoding options: " + "; ".join(lines)


@dataclass(frozen=True, slots=True)
class WordTiming:
    """One word of the final text; seconds from the start of the audio."""

    word: str
    start: float
    end: float
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of the transcript; seconds from the start of the audio."""

    text: str
    start: float
    end: float
    words: tuple[WordTiming, ...] | None = None


@dataclass(slots=True)
class RequestOutput:
    """State of a request's transcript after a step.

    ``text`` is cumulative. ``tokens`` holds the ids of each of the n best hypotheses, ``scores`` their log scores.
    The first ``stable_prefix_chars`` characters of ``text`` are never taken back, and never become fewer.
    ``timestamps`` are the start seconds of the best hypothesis' tokens. ``words`` is ``None`` when not asked for.
    ``language_prob`` is that of a detected ``language``. ``reached_final`` says, for a search in a graph, whether the
    best path ends in one of its final states (``None``: no graph, or not at the end yet). ``unencoded_hotwords`` are
    the phrases that the tokenizer cannot encode, which had no effect. ``consumed_seconds`` is how much of the audio the
    text accounts for where the model may stop short of its end (``None``: all of it), and in partials of a long request
    how much is dealt with; ``temperature`` the last one that was tried, where the decoder tries several.
    """

    request_id: str
    text: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finished: bool = False
    is_segment_final: bool = False
    stable_prefix_chars: int = 0
    segments: list[Segment] = field(default_factory=list)
    words: list[WordTiming] | None = None
    timestamps: list[float] | None = None
    confidence: float | None = None
    nbest_texts: list[str] = field(default_factory=list)
    language: str | None = None
    language_prob: float | None = None
    reached_final: bool | None = None
    no_speech_prob: float | None = None
    unencoded_hotwords: list[str] = field(default_factory=list)
    consumed_seconds: float | None = None
    temperature: float | None = None
    finish_reason: FinishReason | None = None
    error_stage: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for ``json.dumps``."""
        return asdict(self)


class RequestState(Enum):
    """Life of a request inside the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine; tensors are held, never touched, by the layers that know no torch.

    ``audio`` is the canonical waveform of an offline request; a stream's samples wait in ``audio_chunks`` until the
    step takes them. ``num_samples`` counts samples at the model's rate, ``num_frames`` the feature frames that they
    give, ``cost`` what batching compares (the window of a fixed-window frontend, else ``num_frames``).
    """

    request_id: str
    streaming: bool
    decoding: DecodingOptions
    priority: int = 0
    audio: Tensor | None = None
    audio_chunks: deque[Tensor] = field(default_factory=deque)
    audio_final: bool = False
    num_samples: int = 0
    num_frames: int = 0
    cost: int = 0
    arrival: int = 0
    arrival_time: float = 0.0
    state: RequestState = RequestState.WAITING
    resampler: StreamResampler | None = None
    features: FeatureStream | None = None
    offset: int = 0
    chunks_decoded: int = 0
    #: False for a window of a long request, whose partials nobody would see.
    shows_partials: bool = True

    @property
    def has_pending_audio(self) -> bool:
        """Whether queued audio, or the end of the audio, has not reached the features yet."""
        return bool(self.audio_chunks) or (
            self.audio_final and self.features is not None and not self.features.finished
        )
