"""The step that all batched runtimes share: ready streams of any age become one ``encode_chunk``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from oasr_core.cache.attention import IntArray
from oasr_core.errors import PluginContractError
from oasr_core.models.base import ChunkBatch, CohortState, EncoderOutput
from oasr_core.streaming.base import StreamChunk, StreamingEncoderBackend


class CohortBackend(StreamingEncoderBackend):
    """Batches every ready stream into one forward; a subclass says where a cohort's state comes from."""

    @abstractmethod
    def cohort_state(self, stream_ids: Sequence[str], offsets: IntArray, counts: IntArray, frames: int) -> CohortState:
        """The state of this step's rows: encoder frames so far, frames that the step gives, frames of a full window."""

    def commit(self, stream_ids: Sequence[str], state: CohortState) -> None:
        """Called after the forward, where state does not live in the store."""

    def order_of(self, stream_id: str) -> int:
        """Rows of a cohort are sorted by this; by the store's row, consecutive rows are read in place."""
        return self.store.row(stream_id)

    def forward_step(self, chunks: Sequence[StreamChunk]) -> EncoderOutput:
        """Windows of one width share a forward; a short last window is padded to full width where that is exact."""
        padded = self.geometry.fills_final or (self.pad_final and self.geometry.masked_final)
        if padded or len({chunk.features.shape[0] for chunk in chunks}) == 1:
            width = self.geometry.window if padded else chunks[0].features.shape[0]
            return self._forward(chunks, width)
        return self._forward_by_width(chunks)

    def _forward_by_width(self, chunks: Sequence[StreamChunk]) -> EncoderOutput:
        groups: dict[int, list[int]] = {}
        for place, chunk in enumerate(chunks):
            groups.setdefault(chunk.features.shape[0], []).append(place)
        parts = {width: self._forward([chunks[i] for i in places], width) for width, places in groups.items()}
        frames = max(part.hidden.shape[1] for part in parts.values())
        sample = next(iter(parts.values())).hidden
        hidden = sample.new_zeros(len(chunks), frames, sample.shape[2])
        lengths = torch.zeros(len(chunks), dtype=torch.int64, device=sample.device)
        for width, places in groups.items():
            hidden[places, : parts[width].hidden.shape[1]] = parts[width].hidden
            lengths[places] = parts[width].lengths
        return EncoderOutput(hidden, lengths)

    def _forward(self, chunks: Sequence[StreamChunk], width: int) -> EncoderOutput:
        order = sorted(range(len(chunks)), key=lambda i: self.order_of(chunks[i].stream_id))
        ordered = [chunks[i] for i in order]
        names = [chunk.stream_id for chunk in ordered]
        valid = np.array([chunk.features.shape[0] for chunk in ordered], dtype=np.int64)
        offsets = np.array([chunk.offset for chunk in ordered], dtype=np.int64)
        counts = np.array([self.step_frames(int(frames)) for frames in valid], dtype=np.int64)
        features = torch.zeros(len(chunks), width, ordered[0].features.shape[1], device=self.device)
        for row, chunk in enumerate(ordered):
            features[row, : valid[row]] = chunk.features
        state = self.cohort_state(names, offsets, counts, self.step_frames(width))
        lengths = torch.from_numpy(counts).to(self.device, non_blocking=True)
        out = self.encoder.encode_chunk(
            ChunkBatch(
                features=features,
                valid=torch.from_numpy(valid).to(self.device, non_blocking=True),
                offsets=torch.from_numpy(offsets).to(self.device, non_blocking=True),
                out_lengths=lengths,
                state=state,
                uniform=int(offsets[0]) if (offsets == offsets[0]).all() else None,
            )
        )
        if int(counts.max()) > out.hidden.shape[1]:
            raise PluginContractError(
                f"{type(self.encoder).__name__}.encode_chunk gave {out.hidden.shape[1]} frames where its geometry "
                f"promises {int(counts.max())}."
            )
        self.commit(names, state)
        if order == list(range(len(chunks))):
            return EncoderOutput(out.hidden, lengths)
        back = torch.from_numpy(np.argsort(order)).to(self.device)
        return EncoderOutput(out.hidden[back], lengths[back])
