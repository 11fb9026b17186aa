"""A model whose transcript is written into its audio: scripted encoders for life-cycle tests.

:func:`marker_audio` turns tokens into samples; the ``marker`` frontend reads one value per frame of 160 samples, and
:class:`MarkerModel` emits the token that the value names. What goes in must come out, in order, nothing added,
nothing lost, whatever the chunking, the neighbours and the recycled memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.native import save_native
from oasr_core.frontend.base import FeatureFrontend, StreamingFraming
from oasr_core.models.base import (
    BaseAsrModel,
    BaseEncoder,
    ChunkBatch,
    ChunkGeometry,
    EncoderBatch,
    EncoderOutput,
    PagedKV,
    Slot,
    StateSpec,
)
from oasr_core.registry import registry

HOP = 160
VOCAB = 16
SUBSAMPLING = 4
RIGHT_CONTEXT = 6
_SCALE = 64.0


def marker_audio(tokens: Sequence[int], *, tail_samples: int = 0) -> Tensor:
    """Samples that spell ``tokens`` (0 is silence), one encoder frame each, in as little audio as gives every frame.

    ``((4 * len(tokens) + 3) * 160 + tail_samples,)`` float32: three frames of overlap follow the last token's four.
    """
    frames = torch.tensor(tokens, dtype=torch.float32).repeat_interleave(SUBSAMPLING) / _SCALE
    overlap = frames[-1:].repeat(RIGHT_CONTEXT + 1 - SUBSAMPLING)
    return torch.cat([torch.cat([frames, overlap]).repeat_interleave(HOP), torch.zeros(tail_samples)])


class MarkerOptions(BaseModel):
    """The marker frontend has one setting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample_rate: int = 16000


class MarkerFraming(StreamingFraming):
    """Frames side by side, whole ones only."""

    span = HOP
    hop = HOP

    def frames(self, samples: int, *, final: bool) -> int:
        """``samples // 160``."""
        return samples // HOP

    def start(self, frame: int) -> int:
        """``frame * 160``."""
        return frame * HOP


class MarkerFrontend(FeatureFrontend):
    """One feature per frame: its first sample, so that a shifted frame grid shows."""

    oasr_api = "1.0"
    options_cls = MarkerOptions
    framing = MarkerFraming()
    sample_rate = 16000
    feature_dim = 1
    frame_seconds = 0.01

    def num_frames(self, samples: int) -> int:
        """``samples // 160``."""
        return samples // HOP

    def extract(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """``(batch, frames, 1)``."""
        counts = lengths // HOP
        frames = waveforms[:, : int(counts.max()) * HOP].reshape(waveforms.shape[0], -1, HOP)[..., :1]
        inside = torch.arange(frames.shape[1]) < counts[:, None]
        return torch.where(inside[..., None], frames, torch.zeros(())), counts

    def compute_frames(self, frames: Tensor) -> Tensor:
        """``(n, 160)`` to ``(n, 1)``."""
        return frames[:, :1].clone()


class MarkerEncoder(BaseEncoder):
    """Four frames to one, with three frames of overlap like a WeNet front-end; remembers nothing it says it forgets.

    The paged history holds every emitted token as a value; a frame's hidden state is the token it reads, minus the
    difference between the history that attention returns and the history that was put in, so that a leak or loss
    changes the transcript.
    """

    feature_dim = 1
    output_dim = 2
    subsampling_rate = SUBSAMPLING
    min_frames = RIGHT_CONTEXT + 1
    streaming_kind = "paged"

    def __init__(self, max_positions: int | None = None) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.anchor = nn.Parameter(torch.zeros(1))

    def output_frames(self, feature_frames: int) -> int:
        """``((T - 1) // 2 - 1) // 2``, WeNet's 4x front-end."""
        return max(((feature_frames - 1) // 2 - 1) // 2, 0)

    def chunk_geometry(self, chunk_size: int) -> ChunkGeometry:
        """WeNet's windows."""
        window = (chunk_size - 1) * SUBSAMPLING + RIGHT_CONTEXT + 1
        return ChunkGeometry(
            window=window,
            stride=chunk_size * SUBSAMPLING,
            output_frames=chunk_size,
            min_final=RIGHT_CONTEXT + 1,
            masked_final=True,
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """A paged history and a running sum."""
        return (PagedKV(layers=1, kv_heads=1, head_dim=8), Slot("sum", (1,)))

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        """Read every fourth frame."""
        lengths = torch.tensor([self.output_frames(int(n)) for n in batch.lengths])
        return EncoderOutput(self._read(batch.features, int(lengths.max()) if len(lengths) else 0), lengths)

    def encode_chunk(self, batch: ChunkBatch) -> EncoderOutput:
        """The same over a window, with the mean of the visible history checked against a running sum."""
        frames = self.output_frames(batch.features.shape[1])
        hidden = self._read(batch.features, frames)
        inside = torch.arange(frames) < batch.out_lengths[:, None]
        values = torch.where(inside, hidden[..., 0], torch.zeros((), dtype=hidden.dtype))
        spread = values[..., None, None].expand(-1, -1, 1, 8).contiguous()
        uniform = torch.zeros_like(spread)
        seen = batch.state.attend(0, uniform, uniform, spread)[:, 0, 0, 0].float()
        total = batch.state.read("sum")[:, 0].float() + values.float().sum(1)
        batch.state.write("sum", total[:, None].to(hidden.dtype))
        count = (batch.state.key_positions() >= 0).sum(1)
        bounded = count < batch.offsets + batch.out_lengths  # part of the history was evicted: nothing to compare with
        drift = torch.where(bounded, torch.zeros(()), seen - total / count)
        hidden = hidden + torch.where(drift.abs() > 1e-2, torch.ones(()), torch.zeros(()))[:, None, None].to(
            hidden.dtype
        )
        return EncoderOutput(hidden, batch.out_lengths)

    def _read(self, features: Tensor, frames: int) -> Tensor:
        picked = features[:, : frames * SUBSAMPLING : SUBSAMPLING] * _SCALE
        return torch.cat([picked, torch.ones_like(picked)], dim=2)


class _MarkerCtc:
    blank_id = 0
    vocab_size = VOCAB

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Nearly one-hot posteriors."""
        tokens = hidden[..., 0].float().round().clamp(0, VOCAB - 1).long()
        return torch.log_softmax(nn.functional.one_hot(tokens, VOCAB).float() * 8, dim=-1)


class MarkerModel(BaseAsrModel):
    """The marker encoder with a CTC interface."""

    oasr_api = "1.0"
    architecture = "test-marker"
    vocab_size = VOCAB

    def __init__(self, max_positions: int | None = None) -> None:
        super().__init__()
        self.encoder = MarkerEncoder(max_positions)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MarkerModel:
        """``max_positions`` is the only key."""
        return cls(config.get("max_positions"))

    @property
    def interfaces(self) -> Mapping[str, Any]:
        """``ctc``."""
        return {"ctc": _MarkerCtc()}


@contextmanager
def registered() -> Iterator[None]:
    """The marker model and frontend, on the axes for as long as the context lasts."""
    with ExitStack() as stack:
        stack.enter_context(registry("models").override(MarkerModel.architecture, MarkerModel))
        stack.enter_context(registry("frontends").override("marker", MarkerFrontend))
        yield


def write_marker_bundle(directory: Path, *, max_positions: int | None = None, chunk_size: int = 4) -> Path:
    """A native bundle of the marker model; tokens read as letters (``1`` is ``a``)."""
    symbols = directory.parent / "marker_symbols.txt"
    names = ["<blank>", *(chr(ord("a") + i) for i in range(VOCAB - 1))]
    symbols.write_text("".join(f"{name} {i}\n" for i, name in enumerate(names)))
    bundle = CheckpointBundle(
        architecture=MarkerModel.architecture,
        config={"max_positions": max_positions},
        state_dict=MarkerModel(max_positions).state_dict(),
        tokenizer=TokenizerSpec("symbol_table", {"symbols": symbols}, {}),
        feature=FeatureSpec("marker", 1.0, {}),
        decoding=DecodingDefaults("ctc", {}, chunk_size=chunk_size),
    )
    save_native(bundle, directory)
    return directory


def spell(tokens: Sequence[int]) -> str:
    """The text of ``tokens`` after collapsing repeats and dropping silence."""
    kept = [token for place, token in enumerate(tokens) if place == 0 or tokens[place - 1] != token]
    return "".join(chr(ord("a") + token - 1) for token in kept if token)
