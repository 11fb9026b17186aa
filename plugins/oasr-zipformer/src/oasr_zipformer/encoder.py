"""The Zipformer2 encoder: offline padded, and chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.errors import ConfigError
from oasr_core.models.base import (
    BaseEncoder,
    ChunkBatch,
    ChunkGeometry,
    EncoderBatch,
    EncoderOutput,
    Slot,
    StateSpec,
)
from oasr_zipformer.attention import history_parts, position_table
from oasr_zipformer.config import CONVNEXT_REACH, EMBED_CONTEXT, EMBED_RATE, EncoderConfig
from oasr_zipformer.embed import Conv2dSubsampling
from oasr_zipformer.embed import output_frames as embed_frames
from oasr_zipformer.layers import Downsample, DownsampledStack, Stack, ZipformerLayer
from oasr_zipformer.layouts import ChunkLayout, Layout, PaddedLayout, RowEnds, context_mask, slot_names

#: What icefall fills features up with: log(1e-10).
SILENCE = -23.025850929940457
#: Feature frames that a window sees beyond those that it consumes: 7 of the convolutions, 3 ConvNeXt frames of two.
LOOKAHEAD = 7 + EMBED_RATE * CONVNEXT_REACH
#: Feature frames of silence that follow a stream besides, so that its last words come out.
TAIL_FRAMES = 30

_EMBED_SLOT = "embed"
_FIRST_POSITIONS = 512


class ZipformerEncoder(BaseEncoder):
    """icefall's ``Conv2dSubsampling`` and ``Zipformer2``; parameter names are icefall's until :meth:`fold`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder_embed = Conv2dSubsampling(config)
        self.encoders = nn.ModuleList(
            (Stack if stack.downsampling == 1 else DownsampledStack)(stack, config.pos_dim, causal=config.causal)
            for stack in config.stacks
        )
        self.downsample_output = Downsample(config.output_downsampling) if config.output_downsampling > 1 else None
        self.subsampling_rate = EMBED_RATE * config.output_downsampling
        self.feature_dim = config.feature_dim
        self.output_dim = config.output_dim
        self.min_frames = EMBED_CONTEXT
        self.streaming_kind = "slot" if config.causal else "none"
        self._positions = 0
        self._dtype = torch.float32

    def fold(self) -> None:
        """Fold and fuse; the weights are final, cast and on their device."""
        self._dtype = self.encoder_embed.out.weight.dtype
        self.encoder_embed.fold()
        for layer in self._layers():
            layer.fold()

    def _layers(self) -> list[ZipformerLayer]:
        return [layer for stack in self._stacks() for layer in cast(list[ZipformerLayer], list(stack.layers))]

    def _stacks(self) -> list[Stack]:
        return [stack.encoder if isinstance(stack, DownsampledStack) else cast(Stack, stack) for stack in self.encoders]

    def _reserve(self, positions: int) -> None:
        """Make every layer's position table cover ``positions`` keys."""
        if positions <= self._positions:
            return
        self._positions = max(positions, 2 * self._positions, _FIRST_POSITIONS)
        table = position_table(self._positions, self.config.pos_dim, self.encoder_embed.out.bias.device)
        for layer in self._layers():
            layer.self_attn_weights.reserve(self._positions, table)

    def output_frames(self, feature_frames: int) -> int:
        """See :class:`BaseEncoder`."""
        return -(-embed_frames(feature_frames) // self.config.output_downsampling)

    # -- offline --------------------------------------------------------------------------------------------------

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        """See :class:`BaseEncoder`. Packed batches are computed padded, with the same result."""
        factor = self.config.output_downsampling
        lengths = torch.div(batch.lengths - 7, EMBED_RATE, rounding_mode="floor").clamp(min=0)
        out_lengths = torch.div(lengths + factor - 1, factor, rounding_mode="floor")
        frames = embed_frames(batch.features.shape[1])
        if frames == 0:
            return EncoderOutput(
                batch.features.new_zeros(len(lengths), 0, self.output_dim, dtype=self._dtype), out_lengths
            )
        past = torch.arange(batch.features.shape[1], device=lengths.device) >= batch.lengths.unsqueeze(1)
        features = batch.features.float().masked_fill(past.unsqueeze(2), 0.0).to(self._dtype)
        # Reading lengths back would wait for a device; there rows always count as padded.
        shortest = int(lengths.min()) if features.device.type == "cpu" else 0
        x = self.encoder_embed(features, None if shortest == frames else lengths)
        rows = -(-frames // self.config.frame_multiple) * self.config.frame_multiple
        x = F.pad(x, (0, 0, 0, rows - frames))
        self._reserve(rows)
        layouts = {
            rate: PaddedLayout(
                RowEnds(
                    torch.div(lengths + rate - 1, rate, rounding_mode="floor"), rows // rate, full=shortest == rows
                ),
                self._dtype,
            )
            for rate in {1, *(stack.downsampling for stack in self.config.stacks)}
        }
        hidden = self._run(x, [layouts[stack.downsampling] for stack in self.config.stacks], layouts[1].ends)
        return EncoderOutput(hidden[:, : self.output_frames(batch.features.shape[1])], out_lengths)

    # -- streaming ------------------------------------------------------------------------------------------------

    def encode_chunk(self, batch: ChunkBatch) -> EncoderOutput:
        """See :class:`BaseEncoder`. A short last window counts as filled up with silence, as icefall fills it."""
        past = torch.arange(batch.features.shape[1], device=batch.valid.device) >= batch.valid.unsqueeze(1)
        features = batch.features.float().masked_fill(past.unsqueeze(2), SILENCE).to(self._dtype)
        x, kept = self.encoder_embed.chunk(features, batch.state.read(_EMBED_SLOT))
        batch.state.write(_EMBED_SLOT, kept)
        chunk, left = x.shape[1], self.config.left_context_frames
        self._reserve(left + chunk)
        factor = self.config.output_downsampling
        young = batch.uniform is None or batch.uniform * factor < left
        layouts: list[Layout] = []
        for index, stack in enumerate(self.config.stacks):
            rate = stack.downsampling
            mask = context_mask(batch.offsets * factor, left, chunk, rate, self._dtype) if young else None
            layouts.append(ChunkLayout(batch.state, index, stack, frames=chunk // rate, left=left // rate, mask=mask))
        return EncoderOutput(self._run(x, layouts, None), batch.out_lengths)

    def chunk_geometry(self, chunk_size: int) -> ChunkGeometry:
        """See :class:`BaseEncoder`. icefall's ``chunk_size`` counts front-end frames: twice as many."""
        if self.streaming_kind == "none":
            raise ConfigError(
                "zipformer: these weights cannot stream: they were trained with full context (causal=False). "
                "Use offline requests."
            )
        multiple = self.config.frame_multiple // self.config.output_downsampling
        if chunk_size < 1 or chunk_size % multiple:
            raise ConfigError(
                f"zipformer: chunk_size {chunk_size} encoder frames: these weights need a multiple of {multiple}, "
                "since every stack takes a whole number of its frames from a chunk."
            )
        stride = chunk_size * self.subsampling_rate
        return ChunkGeometry(
            window=stride + LOOKAHEAD,
            stride=stride,
            output_frames=chunk_size,
            min_final=1,
            flush_frames=LOOKAHEAD + TAIL_FRAMES,
            flush_value=SILENCE,
            masked_final=True,
            fills_final=True,
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Left context of attention and what precedes the convolutions, a slot each a stack; ConvNeXt's left frames."""
        if self.streaming_kind == "none":
            return ()
        embed = self.encoder_embed
        slots = [Slot(_EMBED_SLOT, (CONVNEXT_REACH, embed.width, embed.channels))]
        for index, stack in enumerate(self.config.stacks):
            attention, convolution = slot_names(index)
            left = self.config.left_context_frames // stack.downsampling
            width = sum(history_parts(stack).values())
            slots.append(Slot(attention, (stack.num_layers, left, width), slot_axis=1))
            slots.append(Slot(convolution, (stack.num_layers, 2, stack.half_kernel, stack.dim), slot_axis=1))
        return tuple(slots)

    # -- both -----------------------------------------------------------------------------------------------------

    def _run(self, x: Tensor, layouts: Sequence[Layout], ends: RowEnds | None) -> Tensor:
        """All stacks and the output's downsampling; ``ends`` of the rows at the front-end's rate, where they differ."""
        outputs: list[Tensor] = []
        for stack, config, layout in zip(self.encoders, self.config.stacks, layouts, strict=True):
            x = _with_channels(x, config.dim)
            if isinstance(stack, DownsampledStack):
                x = stack(x, x if ends is None else ends.hold(x), layout)
            else:
                x = stack(x, layout)
            outputs.append(x)
        x = _widest(outputs)
        if self.downsample_output is None:
            return x
        return self.downsample_output(x if ends is None else ends.hold(x))


def _with_channels(x: Tensor, dim: int) -> Tensor:
    """Cut the last channels, or append zeros."""
    if x.shape[2] >= dim:
        return x[:, :, :dim].contiguous()
    return F.pad(x, (0, dim - x.shape[2]))


def _widest(outputs: list[Tensor]) -> Tensor:
    """Every channel from the latest stack that has it."""
    parts = [outputs[-1]]
    covered = outputs[-1].shape[2]
    for output in reversed(outputs[:-1]):
        if output.shape[2] > covered:
            parts.append(output[:, :, covered:])
            covered = output.shape[2]
    return torch.cat(parts, dim=2)
