"""Converted models, their reference data, and a driver of streams over the core's state store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oasr_core.cache.store import StreamStateStore
from oasr_core.checkpoints.bundle import CheckpointBundle
from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.models.base import ChunkBatch, EncoderBatch
from oasr_zipformer.converter import IcefallConverter
from oasr_zipformer.encoder import ZipformerEncoder
from oasr_zipformer.model import ZipformerModel


class Streams:
    """Streams of features over one encoder, each cut as its geometry says."""

    def __init__(self, encoder: ZipformerEncoder, chunk_size: int, features: Sequence[Tensor]) -> None:
        self.encoder, self.chunk_size = encoder, chunk_size
        self.geometry = encoder.chunk_geometry(chunk_size)
        self.store = StreamStateStore(
            None, encoder.state_specs, max_streams=len(features), dtype=torch.float32, device=torch.device("cpu")
        )
        flush = torch.full((self.geometry.flush_frames, features[0].shape[1]), self.geometry.flush_value)
        self.features = [torch.cat([each, flush]) for each in features]
        self.starts = [0] * len(features)
        self.outputs: list[list[Tensor]] = [[] for _ in features]
        for name in range(len(features)):
            self.store.allocate(str(name))

    def pending(self, stream: int) -> bool:
        """Whether the stream has a window left."""
        return self.starts[stream] + self.geometry.min_final <= len(self.features[stream])

    def step(self, rows: Sequence[int]) -> None:
        """One window of each of the streams ``rows``, in one forward; what fills up short windows is poison."""
        geometry = self.geometry
        windows = [self.features[row][self.starts[row] : self.starts[row] + geometry.window] for row in rows]
        batch = torch.full((len(rows), geometry.window, windows[0].shape[1]), float("nan"))
        for place, window in enumerate(windows):
            batch[place, : len(window)] = window
        offsets = np.array([len(self.outputs[row]) * self.chunk_size for row in rows])
        counts = np.full(len(rows), self.chunk_size)
        with torch.inference_mode():
            out = self.encoder.encode_chunk(
                ChunkBatch(
                    features=batch,
                    valid=torch.tensor([len(window) for window in windows]),
                    offsets=torch.from_numpy(offsets),
                    out_lengths=torch.from_numpy(counts),
                    state=self.store.cohort([str(row) for row in rows], offsets, counts, self.chunk_size),
                    uniform=int(offsets[0]) if len(set(offsets.tolist())) == 1 else None,
                )
            )
        assert out.hidden.shape[1] == self.chunk_size
        for place, row in enumerate(rows):
            self.outputs[row].append(out.hidden[place])
            self.starts[row] += geometry.stride

    def finish(self, stream: int) -> Tensor:
        """``(chunks, chunk_size, dim)``, the whole output of one stream."""
        while self.pending(stream):
            self.step([stream])
        return torch.stack(self.outputs[stream])

    def slot(self, stream: int, name: str, layer: int | None = None) -> Tensor:
        """A slot of one stream."""
        return self.store.cohort([str(stream)], np.zeros(1), np.zeros(1), 1).read(name, layer)[0]


@pytest.fixture(scope="session")
def streams() -> type[Streams]:
    """The driver."""
    return Streams


@pytest.fixture(scope="session")
def icefall_digits(repo_root) -> Path:
    """The trained icefall digits checkpoint with a part of its test wavs and oracle."""
    return repo_root / "tests" / "data" / "icefall_digits"


@pytest.fixture(scope="session")
def icefall_shared(shared_fixtures) -> Path:
    """The whole collection: all utterances, and checkpoints with random weights."""
    return shared_fixtures / "icefall_digits"


@pytest.fixture(scope="session")
def load() -> Callable[..., tuple[ZipformerModel, CheckpointBundle]]:
    """``load(directory, checkpoint_name=None)``: the prepared model and its bundle."""

    def run(directory: Path, checkpoint_name: str | None = None):
        bundle = IcefallConverter().convert(CheckpointPeek(directory), checkpoint_name=checkpoint_name)
        model, report = load_model(bundle)
        assert not report.dropped
        model.prepare()
        return model, bundle

    return run


@pytest.fixture(scope="session")
def digits(load, icefall_digits) -> ZipformerModel:
    """The trained digits model, prepared."""
    return load(icefall_digits)[0]


@pytest.fixture(scope="session")
def feats(icefall_digits) -> dict[str, Tensor]:
    """Reference features by utterance."""
    return load_file(icefall_digits / "oracle" / "fbank.safetensors")


@pytest.fixture(scope="session")
def offline() -> Callable[..., list[Tensor]]:
    """``offline(model, *utterances, poison=0.0, extra=0)``: each row's valid encoder output, of one padded batch."""

    def run(model: ZipformerModel, *utterances: Tensor, poison: float = 0.0, extra: int = 0) -> list[Tensor]:
        frames = max(map(len, utterances)) + extra
        features = torch.full((len(utterances), frames, utterances[0].shape[1]), poison)
        for row, utterance in enumerate(utterances):
            features[row, : len(utterance)] = utterance
        with torch.inference_mode():
            out = model.encoder.encode(EncoderBatch(features, torch.tensor([len(each) for each in utterances])))
        counts = [model.encoder.output_frames(len(each)) for each in utterances]
        assert out.lengths.tolist() == counts
        return [out.hidden[row, :count] for row, count in enumerate(counts)]

    return run
