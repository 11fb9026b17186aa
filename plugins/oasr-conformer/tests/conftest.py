"""An independent reference for streaming state, and ways to run the encoder with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oasr_conformer.converter import WenetConverter
from oasr_conformer.model import ConformerModel
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.models.base import BaseEncoder, ChunkBatch, PagedKV, Slot

VARIANTS = (
    "v1_batchnorm_noncausal_old_yaml",
    "u2pp_k8_sos2",
    "u2pp_conv2d6",
    "u2pp_conv2d8_nocmvn",
    "transformer_abs_pos",
    "conformer_no_pos_nomacaron",
)


@dataclass
class Stream:
    """State of one stream, kept in the plainest way: lists of frames."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)
    offset: int = 0


class ReferenceCohort:
    """A ``CohortState`` that computes row by row with written-out attention."""

    def __init__(self, encoder: BaseEncoder, streams: list[Stream], counts: list[int], left_frames: int | None) -> None:
        self.streams, self.counts, self.left_frames = streams, counts, left_frames
        self.specs = {spec.name: spec for spec in encoder.state_specs if isinstance(spec, Slot)}
        pages = [spec for spec in encoder.state_specs if isinstance(spec, PagedKV)]
        self.key_bias = pages[0].key_bias

    def attend(self, layer, query, key, value, *, key_bias=None, score_bias=None, scale=None):
        assert (key_bias is not None) == self.key_bias
        assert score_bias is None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out = torch.zeros_like(query)
        for row, (stream, count) in enumerate(zip(self.streams, self.counts, strict=True)):
            bias = torch.zeros(count, query.shape[2]) if key_bias is None else key_bias[row, :count].float()
            keys = self._append(stream.keys, layer, key[row, :count])
            values = self._append(stream.values, layer, value[row, :count])
            biases = self._append(stream.biases, layer, bias)
            scores = torch.einsum("qhd,khd->hqk", query[row].float(), keys.float()) + biases.t()[:, None]
            weights = torch.softmax(scores * scale, dim=-1)
            out[row] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)
            for store in (stream.keys, stream.values, stream.biases):
                if self.left_frames is not None:
                    store[layer] = store[layer][max(len(store[layer]) - self.left_frames, 0) :]
        return out

    @staticmethod
    def _append(store: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        store[layer] = torch.cat([store[layer], new]) if layer in store else new.clone()
        return store[layer]

    def key_positions(self) -> Tensor:
        raise NotImplementedError

    def read(self, name, layer=None):
        spec = self.specs[name]
        rows = [stream.slots.setdefault(name, torch.full(spec.shape, spec.init)) for stream in self.streams]
        return torch.stack([row if layer is None else row[layer] for row in rows])

    def write(self, name, value, layer=None):
        for stream, row in zip(self.streams, value, strict=True):
            if layer is None:
                stream.slots[name] = row.clone()
            else:
                stream.slots[name][layer] = row


def step(encoder, streams, windows, chunk_size, left_chunks):
    """One step of a cohort over feature windows that may be short; returns the valid outputs of each row."""
    geometry = encoder.chunk_geometry(chunk_size)
    features = torch.full((len(streams), geometry.window, windows[0].shape[1]), float("nan"))
    for row, window in enumerate(windows):
        features[row, : len(window)] = window
    valid = torch.tensor([len(window) for window in windows])
    counts = [encoder.output_frames(len(window)) for window in windows]
    offsets = [stream.offset for stream in streams]
    state = ReferenceCohort(encoder, streams, counts, None if left_chunks < 0 else left_chunks * chunk_size)
    batch = ChunkBatch(
        features=features,
        valid=valid,
        offsets=torch.tensor(offsets),
        out_lengths=torch.tensor(counts),
        state=state,
        uniform=offsets[0] if len(set(offsets)) == 1 else None,
    )
    with torch.inference_mode():
        out = encoder.encode_chunk(batch)
    assert out.lengths.tolist() == counts
    for stream, count in zip(streams, counts, strict=True):
        stream.offset += count
    return [out.hidden[row, :count] for row, count in enumerate(counts)]


def windows_of(encoder, features, chunk_size) -> Iterator[Tensor]:
    """The windows that a stream of ``features`` is cut into."""
    geometry = encoder.chunk_geometry(chunk_size)
    for start in range(0, len(features) - geometry.min_final + 1, geometry.stride):
        yield features[start : start + geometry.window]


@pytest.fixture(scope="session")
def stream() -> Callable[..., Tensor]:
    """``stream(encoder, features, chunk_size, left_chunks)``: the whole output, chunk by chunk."""

    def run(encoder: BaseEncoder, features: Tensor, chunk_size: int, left_chunks: int) -> Tensor:
        state = Stream()
        outputs = [
            step(encoder, [state], [window], chunk_size, left_chunks)[0]
            for window in windows_of(encoder, features, chunk_size)
        ]
        return torch.cat(outputs)

    return run


@pytest.fixture(scope="session")
def streaming():
    """The parts of :func:`stream`, for tests that mix streams: ``Stream``, ``step``, ``windows_of``."""

    class Parts:
        stream = Stream
        run_step = staticmethod(step)
        windows = staticmethod(windows_of)

    return Parts


@pytest.fixture(scope="session")
def load() -> Callable[[Path], tuple[ConformerModel, object]]:
    """``load(directory)``: the converted bundle and its prepared model."""

    def run(directory: Path):
        bundle = WenetConverter().convert(CheckpointPeek(directory))
        model = ConformerModel.from_config(bundle.config)
        wanted = model.state_dict()
        model.load_state_dict({name: tensor.clone() for name, tensor in bundle.state_dict.items() if name in wanted})
        model.prepare()
        return model, bundle

    return run


@pytest.fixture(scope="session")
def digits(load, wenet_digits) -> ConformerModel:
    """The trained digits model, prepared."""
    return load(wenet_digits)[0]


@pytest.fixture(params=VARIANTS)
def variant(request, wenet_digits) -> Path:
    """The directory of each variant."""
    return wenet_digits / "variants" / request.param
