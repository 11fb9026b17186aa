"""The slot and the stateful runtime, shown with one small recurrent encoder in both dresses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.native import save_native
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import PluginContractError
from oasr_core.models.base import (
    BaseAsrModel,
    BaseEncoder,
    ChunkBatch,
    ChunkGeometry,
    EncoderBatch,
    EncoderOutput,
    Slot,
)
from oasr_core.registry import registry
from oasr_core.testing.invariance import assert_equal, run_offline, run_streaming

DIM, VOCAB, CHUNK_FRAMES = 12, 9, 8


class RecurrentEncoder(BaseEncoder):
    """A GRU over pairs of frames; three frames of look-ahead are asked for by a flush of silence in the features."""

    feature_dim = 80
    output_dim = DIM
    subsampling_rate = 2
    min_frames = 2
    kind = "slot"

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(160, DIM, batch_first=True)
        self.streaming_kind = self.kind

    def output_frames(self, feature_frames: int) -> int:
        return feature_frames // 2

    def chunk_geometry(self, chunk_size: int) -> ChunkGeometry:
        width = 2 * chunk_size
        return ChunkGeometry(window=width, stride=width, output_frames=chunk_size, min_final=2, masked_final=True)

    @property
    def state_specs(self):
        return (Slot("hidden", (1, DIM), slot_axis=1, init=0.25),)

    def _run(self, features: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pairs = features[:, : features.shape[1] // 2 * 2].reshape(features.shape[0], -1, 160)
        return self.cell(pairs.to(self.cell.weight_ih_l0.dtype) / 20, hidden)

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        hidden = torch.full((1, batch.features.shape[0], DIM), 0.25)
        return EncoderOutput(self._run(batch.features.nan_to_num(), hidden)[0], batch.lengths // 2)

    def encode_chunk(self, batch: ChunkBatch) -> EncoderOutput:
        out, last = self._run(batch.features, batch.state.read("hidden").transpose(0, 1).contiguous())
        batch.state.write("hidden", last.transpose(0, 1))
        return EncoderOutput(out, batch.out_lengths)


class StatefulRecurrentEncoder(RecurrentEncoder):
    """The same network without a declaration."""

    kind = "stateful"

    @property
    def state_specs(self):
        return ()

    def initial_streaming_state(self) -> Tensor:
        return torch.full((1, DIM), 0.25)

    def stack_streaming_states(self, states) -> Tensor:
        return torch.stack(list(states), dim=1)

    def unstack_streaming_states(self, state: Tensor) -> list[Tensor]:
        return [row.clone() for row in state.unbind(1)]

    def encode_chunk(self, batch: ChunkBatch) -> EncoderOutput:
        out, batch.state.value = self._run(batch.features, batch.state.value)
        return EncoderOutput(out, batch.out_lengths)


class ForgetfulEncoder(StatefulRecurrentEncoder):
    unstack_streaming_states = None


class RecurrentModel(BaseAsrModel):
    oasr_api = "1.0"
    architecture = "test-slot"
    encoder_cls = RecurrentEncoder
    vocab_size = VOCAB

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.encoder_cls()
        self.head = nn.Linear(DIM, VOCAB)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RecurrentModel:
        return cls()

    @property
    def interfaces(self) -> Mapping[str, Any]:
        class Ctc:
            blank_id = 0
            vocab_size = VOCAB
            log_probs = staticmethod(lambda hidden: torch.log_softmax(6 * self.head(hidden).float(), -1))

        return {"ctc": Ctc()}


class StatefulModel(RecurrentModel):
    oasr_api = "1.0"
    architecture = "test-stateful"
    encoder_cls = StatefulRecurrentEncoder


class ForgetfulModel(RecurrentModel):
    oasr_api = "1.0"
    architecture = "test-forgetful"
    encoder_cls = ForgetfulEncoder


MODELS = {cls.architecture: cls for cls in (RecurrentModel, StatefulModel, ForgetfulModel)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("recurrent")
    symbols = root / "symbols.txt"
    symbols.write_text("<blank> 0\n" + "".join(f"{chr(96 + i)} {i}\n" for i in range(1, VOCAB)))
    torch.manual_seed(3)
    weights = RecurrentModel().state_dict()
    with ExitStack() as stack:
        for name, cls in MODELS.items():
            stack.enter_context(registry("models").override(name, cls))
            bundle = CheckpointBundle(
                name,
                {},
                weights,
                TokenizerSpec("symbol_table", {"symbols": symbols}),
                FeatureSpec("fbank", 32768.0),
                DecodingDefaults("ctc", {"search": "greedy"}, chunk_size=CHUNK_FRAMES),
            )
            save_native(bundle, root / name)
        yield root


def build(folders, name, **settings):
    config = {"ckpt_dir": folders / name, "device": "cpu", "dtype": "float32", "gc_freeze": False, **settings}
    return ASREngine(EngineConfig(**config))


@pytest.fixture(scope="module")
def clips():
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(n, generator=generator) for n in (16_000, 4_321, 30_000, 9_999, 700, 22_222)]


@pytest.mark.parametrize("name", ["test-slot", "test-stateful"])
def test_streaming_equals_offline_in_any_company(folders, clips, name):
    with build(folders, name, max_batch_size=1) as alone:
        want = [run_offline(alone, [clip])[0] for clip in clips]
    assert any(observation.output.text for observation in want)
    generator = random.Random(0)
    for batch in (1, 2, 8):
        with build(folders, name, max_batch_size=batch) as engine:
            got = run_streaming(engine, clips, lambda *_: generator.choice([100, 2_560, 7_000]), stagger=1)
            assert_equal(got, want, what=f"{name} batch {batch}")
            assert engine._parts.runner.backend.store.num_streams == 0


def test_a_slot_only_encoder_has_no_pool(folders):
    with build(folders, "test-slot", max_batch_size=3) as engine:
        store = engine._parts.runner.backend.store
        assert store.free_blocks is None
        assert not store.at_capacity(10**9, 16)
        assert store.bytes == (3 + 1) * DIM * 4


def test_stateful_states_are_forgotten(folders, clips):
    with build(folders, "test-stateful") as engine:
        engine.transcribe(clips, streaming=True)
        stream = engine.add_streaming_request()
        engine.feed_chunk(stream, clips[0])
        engine.step()
        assert list(engine._parts.runner.backend._states) == [stream]
        engine.abort_request(stream)
        engine.step()
        assert engine._parts.runner.backend._states == {}


def test_a_missing_method_is_named_at_construction(folders):
    with pytest.raises(PluginContractError, match="lacks unstack_streaming_states"):
        build(folders, "test-forgetful")
