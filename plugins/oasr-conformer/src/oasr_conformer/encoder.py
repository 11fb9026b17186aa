"""The WeNet encoder: offline padded, offline packed, and chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_conformer.config import EncoderConfig
from oasr_conformer.layers import ConformerLayer, TransformerLayer
from oasr_conformer.layouts import ChunkLayout, Layout, PackedLayout, PaddedLayout
from oasr_conformer.positions import MAX_POSITIONS, PositionTables
from oasr_conformer.subsampling import Subsampling
from oasr_core.errors import ConfigError
from oasr_core.models.base import (
    BaseEncoder,
    ChunkBatch,
    ChunkGeometry,
    EncoderBatch,
    EncoderOutput,
    PagedKV,
    Slot,
    StateSpec,
)
from oasr_core.models.layers import LayerNorm

# Rows of a padded CPU batch are rounded up to this many frames: attention and matrix kernels run at half speed between.
_FRAME_MULTIPLE = 16


class GlobalCmvn(nn.Module):
    """``(x - mean) * istd``; the statistics stay float32 whatever the model is cast to."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.istd: Tensor
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("istd", torch.ones(dim))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GlobalCmvn:
        moved = super()._apply(lambda t: t.to(fn(t).device), recurse)  # type: ignore[no-untyped-call]
        return cast(GlobalCmvn, moved)

    def forward(self, features: Tensor) -> Tensor:
        """``(batch, frames, dim)`` float32 to the same."""
        return (features - self.mean).mul_(self.istd)


class ConformerEncoder(BaseEncoder):
    """Conformer or Transformer of the WeNet family; parameter names are WeNet's until :meth:`fold`."""

    def __init__(self, config: EncoderConfig, input_dim: int, *, cmvn: bool) -> None:
        super().__init__()
        self.config = config
        self.feature_dim = input_dim
        self.global_cmvn = GlobalCmvn(input_dim) if cmvn else None
        self.embed = Subsampling(config.input_layer, input_dim, config.output_size)
        layer = ConformerLayer if config.kind == "conformer" else TransformerLayer
        self.encoders = nn.ModuleList(layer(config, index) for index in range(config.num_blocks))
        self.after_norm = LayerNorm(config.output_size, eps=config.norm_eps) if config.final_norm else None
        limited = config.positions != "no_pos"
        self.positions = PositionTables(
            config.output_size,
            scale_input=limited,
            add_to_input=config.positions == "abs_pos",
            limit=MAX_POSITIONS if limited else None,
        )
        self.subsampling_rate = self.embed.rate
        self.output_dim = config.output_size
        self.min_frames = self.embed.context
        self.max_positions = self.positions.limit
        self.streaming_kind = "paged" if config.streams else "none"
        self._dtype = torch.float32

    def fold(self) -> None:
        """Fold and fuse; the weights are final, cast and on their device."""
        self.embed.fold()
        for layer in self._layers():
            layer.fold()
        self._dtype = self._layers()[0].self_attn.linear_out.bias.dtype

    def _layers(self) -> list[ConformerLayer | TransformerLayer]:
        return cast(list[ConformerLayer | TransformerLayer], list(self.encoders))

    def output_frames(self, feature_frames: int) -> int:
        """See :class:`BaseEncoder`."""
        return self.embed.output_frames(feature_frames)

    # -- offline --------------------------------------------------------------------------------------------------

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        """See :class:`BaseEncoder`."""
        lengths = self.embed.output_lengths(batch.lengths)
        frames = self.embed.output_frames(batch.features.shape[1])
        features = self._normalise(batch.features, batch.lengths)
        if frames == 0:
            return EncoderOutput(features.new_zeros(len(lengths), 0, self.output_dim), lengths)
        # Attention and matrix kernels of the CPU run at half speed for sizes between multiples.
        rows = -(-frames // _FRAME_MULTIPLE) * _FRAME_MULTIPLE if features.device.type == "cpu" else frames
        self.positions.reserve(frames, rows, [layer.self_attn for layer in self._layers()])
        if batch.packed:
            return EncoderOutput(self._packed(features, lengths, frames), lengths)
        return EncoderOutput(self._padded(features, lengths, rows)[:, :frames], lengths)

    def _normalise(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Features after CMVN, zero past each row's length whatever was there, in the model's dtype."""
        x = features.float()
        if self.global_cmvn is not None:
            x = self.global_cmvn(x)
        past = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
        return x.masked_fill(past.unsqueeze(-1), 0.0).to(self._dtype)

    def _padded(self, features: Tensor, lengths: Tensor, rows: int) -> Tensor:
        """``(batch, rows, dim)`` of utterances that are padded to the longest and then to ``rows``."""
        x = self.embed(features)
        x = self.positions.embed(x, slice(0, x.shape[1]))
        x = F.pad(x, (0, 0, 0, rows - x.shape[1])) if rows > x.shape[1] else x
        full = x.device.type == "cpu" and int(lengths.min()) == rows
        return self._run(x, PaddedLayout(lengths, rows, chunk=self._mask_chunk(), full=full))

    def _packed(self, features: Tensor, lengths: Tensor, frames: int) -> Tensor:
        """``(batch, frames, dim)``, computed without padding."""
        counts = lengths.tolist()
        rows = []
        for row, count in enumerate(counts):
            if count:
                needed = (count - 1) * self.subsampling_rate + self.min_frames
                x = self.embed(features[row : row + 1, :needed])
                rows.append(self.positions.embed(x, slice(0, count)))
        hidden = features.new_zeros(len(counts), frames, self.output_dim)
        if not rows:
            return hidden
        packed = torch.cat(rows, dim=1)
        layout = PackedLayout([n for n in counts if n], chunk=self._mask_chunk(), device=packed.device)
        packed = self._run(packed, layout)
        start = 0
        for row, count in enumerate(counts):
            hidden[row, :count] = packed[0, start : start + count]
            start += count
        return hidden

    def _mask_chunk(self) -> int:
        """Chunk of the mask that offline attention uses, 0 for full context."""
        return 0 if self.config.dynamic_chunk else self.config.static_chunk_size

    # -- streaming ------------------------------------------------------------------------------------------------

    def encode_chunk(self, batch: ChunkBatch) -> EncoderOutput:
        """See :class:`BaseEncoder`."""
        x = self.embed(self._normalise(batch.features, batch.valid))
        frames = x.shape[1]
        ends = batch.offsets + batch.out_lengths
        first = batch.uniform
        valid = int(ends.max())
        newest = first if first is not None else int(batch.offsets.max())
        self.positions.reserve(valid, newest + frames, [layer.self_attn for layer in self._layers()])
        positions: Tensor | slice
        fresh: Tensor | None
        if first is not None:
            positions = slice(first, first + frames)
            fresh = None if first else torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)
        else:
            positions = batch.offsets.unsqueeze(1) + torch.arange(frames, device=x.device)
            fresh = (batch.offsets == 0)[:, None, None]
        x = self.positions.embed(x, positions)
        return EncoderOutput(self._run(x, ChunkLayout(batch.state, positions, fresh)), batch.out_lengths)

    def chunk_geometry(self, chunk_size: int) -> ChunkGeometry:
        """See :class:`BaseEncoder`."""
        static = 0 if self.config.dynamic_chunk else self.config.static_chunk_size
        if self.streaming_kind == "none":
            raise ConfigError(
                "conformer: these weights cannot stream: they were trained with full context "
                "(no dynamic or static chunks, or a symmetric convolution). Use offline requests."
            )
        if chunk_size < 1:
            raise ConfigError(f"conformer: chunk_size must be at least 1 encoder frame, got {chunk_size}.")
        if static and chunk_size != static:
            raise ConfigError(
                f"conformer: chunk_size {chunk_size}: these weights were trained for chunks of {static} only."
            )
        window = (chunk_size - 1) * self.subsampling_rate + self.min_frames
        return ChunkGeometry(
            window=window,
            stride=chunk_size * self.subsampling_rate,
            output_frames=chunk_size,
            min_final=self.min_frames,
            masked_final=True,
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys (positions folded in) and values, and the frames that precede each depthwise convolution."""
        config = self.config
        if self.streaming_kind == "none":
            return ()
        head_dim = config.output_size // config.attention_heads
        bias = config.relative_attention and config.positions != "no_pos"
        pages = PagedKV(config.num_blocks, config.attention_heads, head_dim, key_bias=bias)
        if not config.conv_module:
            return (pages,)
        return (pages, Slot("conv", (config.num_blocks, config.conv_kernel - 1, config.output_size), slot_axis=1))

    def _run(self, x: Tensor, layout: Layout) -> Tensor:
        """All layers and the final norm."""
        for layer in self.encoders:
            x = layer(x, layout)
        return x if self.after_norm is None else self.after_norm(x)
