"""What a model and its encoder declare and compute: the contract of the ``oasr.models`` axis.

A model offers *interfaces* by name (``ctc``, ``transducer``, ``aed_scorer``, ...); a decode strategy requires
some of them. An encoder declares its streaming state as data (:class:`PagedKV`, :class:`Slot`); the core owns
the memory and hands a :class:`CohortState` to :meth:`BaseEncoder.encode_chunk`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

StreamingKind = Literal["paged", "slot", "stateful", "none"]


@dataclass(frozen=True)
class PagedKV:
    """Growing attention history: one key and one value per layer, head and encoder frame, block-addressed.

    ``key_bias`` adds one score per key and head to what is kept (content and position terms that do not depend
    on the query). ``window`` is a *trained* attention window in encoder frames (``None``: the operator's
    ``num_left_chunks`` decides); ``prefilled`` makes the whole window zero-filled history at admission.
    """

    layers: int
    kv_heads: int
    head_dim: int
    key_bias: bool = False
    window: int | None = None
    prefilled: bool = False


@dataclass(frozen=True)
class Slot:
    """One fixed-extent tensor per stream.

    ``shape`` is the shape for a single stream; the store inserts the slot dimension at ``slot_axis``. ``dtype``
    ``None`` means the model's dtype. A slot is filled with ``init`` when a stream is admitted.
    """

    name: str
    shape: tuple[int, ...]
    slot_axis: int = 0
    dtype: torch.dtype | None = None
    init: float = 0.0


StateSpec = PagedKV | Slot


@dataclass(frozen=True)
class ChunkGeometry:
    """How a stream is cut, in feature frames (``output_frames`` in encoder frames).

    The first window is ``first_window`` frames, each later one ``window`` frames, and the cursor advances by
    ``stride`` each time. A last window shorter than ``min_final`` yields nothing. Where ``masked_final`` holds, a
    short last window may be padded to full size and masked with an exact result; where ``fills_final`` holds, it counts
    as filled up, and every window gives ``output_frames``. ``flush_frames`` frames of value ``flush_value`` follow
    the last real frame where the encoder's receptive field needs them.
    """

    window: int
    stride: int
    output_frames: int
    first_window: int | None = None
    min_final: int = 1
    flush_frames: int = 0
    flush_value: float = 0.0
    masked_final: bool = False
    fills_final: bool = False


@dataclass
class EncoderBatch:
    """An offline micro-batch.

    ``features`` ``(batch, frames, feature_dim)`` float, ``lengths`` ``(batch,)`` int64 in feature frames. Frames past
    a row's length may hold anything, NaN included, and must not change any result. ``packed`` asks for a forward
    without padding (one gapless row with isolated segments).
    """

    features: Tensor
    lengths: Tensor
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)
    packed: bool = False


class CohortState(Protocol):
    """The streaming state of the rows of one :class:`ChunkBatch`, as the encoder sees it."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        score_bias: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Append this chunk's keys and values and attend over retained history plus the chunk.

        ``query`` ``(batch, chunk, heads, head_dim)``; ``key``, ``value`` ``(batch, chunk, kv_heads, head_dim)``;
        ``key_bias`` ``(batch, chunk, heads)`` is added *before* the multiplication by ``scale`` (default
        ``head_dim ** -0.5``) and kept with the keys; ``score_bias`` ``(batch, heads, chunk, keys)``, in the order of
        :meth:`key_positions`, likewise. Returns ``(batch, chunk, heads, head_dim)``.
        """
        ...

    def key_positions(self) -> Tensor:
        """``(batch, keys)`` int64: the encoder-frame position of each key that :meth:`attend` sees, -1 where masked."""
        ...

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """The cohort's rows of slot ``name``, batch first; with ``layer`` the slot's leading axis is indexed by it."""
        ...

    def write(self, name: str, value: Tensor, layer: int | None = None) -> None:
        """Replace what :meth:`read` returns."""
        ...


@dataclass
class ChunkBatch:
    """One streaming step of a cohort: streams of any age side by side.

    ``features`` ``(batch, window, feature_dim)``; ``valid`` ``(batch,)`` int64 real feature frames of each row (a
    short last window is padded); ``offsets`` ``(batch,)`` int64 encoder frames produced before this step;
    ``out_lengths`` ``(batch,)`` int64 encoder frames that this step produces (:meth:`BaseEncoder.output_frames`).
    ``uniform`` is the common offset where all rows have the same age, else ``None`` (a host-side fact that saves a
    device read).
    """

    features: Tensor
    valid: Tensor
    offsets: Tensor
    out_lengths: Tensor
    state: CohortState
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)
    uniform: int | None = None


@dataclass
class EncoderOutput:
    """What an encoder returns.

    ``hidden`` ``(batch, frames, dim)``, ``lengths`` ``(batch,)`` int64 valid encoder frames; ``log_probs``
    ``(batch, frames, vocab)`` float32 where a strategy consumes them. Frames past a row's length are garbage.
    """

    hidden: Tensor
    lengths: Tensor
    log_probs: Tensor | None = None


class BaseEncoder(nn.Module, ABC):
    """Features in, hidden states out, offline and (where ``streaming_kind`` says so) chunk by chunk."""

    #: Feature frames per encoder frame.
    subsampling_rate: int
    #: Width of a feature frame.
    feature_dim: int
    #: Width of ``hidden``.
    output_dim: int
    #: Fewest feature frames that give one encoder frame.
    min_frames: int = 1
    #: Largest number of encoder frames of one utterance or stream, ``None`` without a limit.
    max_positions: int | None = None
    #: Which streaming backend drives these weights.
    streaming_kind: StreamingKind = "none"

    @abstractmethod
    def output_frames(self, feature_frames: int) -> int:
        """Number of encoder frames for an utterance (or a window) of ``feature_frames`` frames; 0 if too short."""

    @abstractmethod
    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        """Offline forward. Rows never see each other or their padding."""

    def encode_chunk(self, batch: ChunkBatch) -> EncoderOutput:
        """Streaming forward of one chunk for each row of the cohort."""
        raise NotImplementedError(f"{type(self).__name__} has streaming_kind={self.streaming_kind!r}")

    def chunk_geometry(self, chunk_size: int) -> ChunkGeometry:
        """Windows for ``chunk_size`` encoder frames per step; raises ``ConfigError`` for a size it cannot serve."""
        raise NotImplementedError(f"{type(self).__name__} has streaming_kind={self.streaming_kind!r}")

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """What one stream carries from chunk to chunk."""
        return ()


@runtime_checkable
class CtcInterface(Protocol):
    """Interface ``ctc``: frame-wise label posteriors."""

    blank_id: int
    vocab_size: int

    def log_probs(self, hidden: Tensor) -> Tensor:
        """``(batch, frames, dim)`` to ``(batch, frames, vocab)`` float32 log posteriors."""
        ...


@runtime_checkable
class AedScorerInterface(Protocol):
    """Interface ``aed_scorer``: teacher-forced scores of given hypotheses, left to right and right to left."""

    sos_id: int
    eos_id: int
    #: Trained weight of the right-to-left decoder, 0.0 where there is none.
    reverse_weight: float

    def score(self, hidden: Tensor, lengths: Tensor, hyps: Tensor, hyp_lengths: Tensor, *, reverse: bool) -> Tensor:
        """Log-softmax outputs of one decoder.

        ``hidden`` ``(batch, frames, dim)``; ``hyps`` ``(batch, tokens)`` int64 decoder inputs that begin with sos,
        already reversed where ``reverse``; ``hyp_lengths`` ``(batch,)``. Returns ``(batch, tokens, vocab)`` float32.
        """
        ...


@runtime_checkable
class TransducerPredictor(Protocol):
    """The prediction network of a transducer, one token at a time; its batched state is opaque to the search.

    ``step`` changes no state in place, so that hypotheses may share one.
    """

    #: Start symbols that count as tokens where scores are normalised by length.
    context_size: int

    def init(self, batch: int) -> Any:
        """The state of ``batch`` rows before their first token; stepping blank from it begins an utterance."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """``tokens`` ``(batch,)`` int64 to the output ``(batch, dim)`` behind them, and the state that follows."""
        ...

    def select(self, state: Any, rows: Tensor) -> Any:
        """The rows ``rows`` ``(n,)`` int64 of a state; a row may be taken several times."""
        ...

    def concat(self, states: Sequence[Any]) -> Any:
        """States of several batches as the state of one."""
        ...


@runtime_checkable
class TransducerJoiner(Protocol):
    """The joint network of a transducer; what depends on one side alone is computed once, by the projections."""

    def project_encoder(self, hidden: Tensor) -> Tensor:
        """``(..., encoder_dim)`` to ``(..., joint_dim)``."""
        ...

    def project_predictor(self, out: Tensor) -> Tensor:
        """``(..., predictor_dim)`` to ``(..., joint_dim)``."""
        ...

    def joint(self, encoder: Tensor, predictor: Tensor) -> Tensor:
        """Projections ``(..., joint_dim)``, whose leading dimensions broadcast, to logits ``(..., vocab)`` float32.

        The search applies log_softmax. With durations the logits are ``(..., vocab + durations)``, labels first.
        """
        ...


@runtime_checkable
class TransducerInterface(Protocol):
    """Interface ``transducer``: a predictor and a joiner, and how the model was trained to emit.

    ``unk_id`` is a label that, like blank, advances a frame and says nothing (``None``: there is none);
    ``max_sym_per_frame`` the most tokens that one frame may emit unless the user says otherwise; ``durations`` the
    frames that a token-and-duration transducer may advance by, ``None`` for any other.
    """

    blank_id: int
    unk_id: int | None
    #: Labels, blank included; durations are none.
    vocab_size: int
    max_sym_per_frame: int
    durations: tuple[int, ...] | None
    predictor: TransducerPredictor
    joiner: TransducerJoiner


@dataclass(frozen=True)
class DecoderKV:
    """Self-attention history of an autoregressive decoder: one key and one value per layer, head and token."""

    layers: int
    kv_heads: int
    head_dim: int


class DecoderState(Protocol):
    """The self-attention history of the rows of one decoder step, as the network sees it; the core owns the memory."""

    def positions(self) -> Tensor:
        """``(rows, tokens)`` int64: the position of each of this step's tokens in its own row."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append this step's keys and values; attend causally over each row's own history, this step included.

        ``query`` ``(rows, tokens, heads, head_dim)``; ``key``, ``value`` ``(rows, tokens, kv_heads, head_dim)``; scores
        are scaled by ``head_dim ** -0.5``. Returns ``(rows, tokens, heads, head_dim)``.
        """
        ...


#: What an autoregressive decoder keeps of the audio: tensors with one entry per request on their first axis.
DecoderMemory = tuple[Tensor, ...]


@runtime_checkable
class AutoregressiveInterface(Protocol):
    """What every label-synchronous decoder offers: a step over tokens, history and memory.

    ``memory`` holds one entry per request and ``tokens`` ``width`` consecutive rows per request (``width`` is
    ``len(tokens) // len(memory[0])``), so that hypotheses of one request share what was computed from its audio.
    """

    kv: DecoderKV
    vocab_size: int
    #: Positions of the decoder: prompt and generated tokens together.
    max_positions: int
    #: Elements, in the model's dtype, that one request's memory takes.
    memory_elements: int

    def memory(self, hidden: Tensor, lengths: Tensor) -> DecoderMemory:
        """Encoder output ``(requests, frames, dim)``, ``lengths`` ``(requests,)`` to what decoding needs of it."""
        ...

    def step(self, tokens: Tensor, state: DecoderState, memory: DecoderMemory) -> Tensor:
        """Feed ``tokens`` ``(rows, n)`` int64; returns the hidden states ``(rows, n, dim)`` behind them."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``(..., dim)`` hidden states to ``(..., vocab)`` float32."""
        ...


@runtime_checkable
class AedInterface(AutoregressiveInterface, Protocol):
    """Interface ``aed``: an attention decoder over encoder frames, whose attention tells where a token was said."""

    def cross_scores(self, tokens: Tensor, memory: DecoderMemory) -> Tensor:
        """One teacher-forced pass over ``tokens`` ``(rows, n)`` int64, each row from its first position.

        Returns ``(rows, heads, n, frames)`` float32: the scaled scores, before softmax, of the cross-attention heads
        that align tokens with frames.
        """
        ...


class BaseAsrModel(nn.Module, ABC):
    """A whole network: an encoder and the interfaces that decode strategies require."""

    #: Registry key of the class; equal to ``CheckpointBundle.architecture``.
    architecture: ClassVar[str]
    #: Globs of checkpoint tensors that are known and rightly left unused.
    expected_unused: ClassVar[tuple[str, ...]] = ()
    #: Glob of tensors -> the capability that is lost where a checkpoint has them and the model drops them.
    capability_drop_hints: ClassVar[Mapping[str, str]] = {}

    encoder: BaseEncoder

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseAsrModel:
        """Build the network for a bundle's ``config`` (weights are loaded afterwards)."""

    @property
    @abstractmethod
    def interfaces(self) -> Mapping[str, Any]:
        """Interface name -> object with that interface's surface."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of output units."""

    def prepare(self) -> None:
        """Called once after weights are loaded, cast and moved, before the first forward (fold, prepack, tables)."""
