"""A label-synchronous model for tests: a scripted decoder whose text is written into the audio, and a random one.

:func:`word_audio` turns tokens into samples, one encoder frame each; ``toy_script`` reads them back, so that what goes
in must come out. ``toy_attention`` is a small attention decoder with random weights: what it says depends on the audio
and on its whole history, so that a wrong position, a leaking neighbour or a lost key shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.native import save_native
from oasr_core.decoding.autoregressive import AutoregressiveStrategy, Retry, hypotheses
from oasr_core.decoding.base import Hypotheses, Hypothesis, TokenSpan
from oasr_core.decoding.decode_group import Candidate, Row
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.models.base import (
    BaseAsrModel,
    BaseEncoder,
    DecoderKV,
    DecoderMemory,
    DecoderState,
    EncoderBatch,
    EncoderOutput,
)
from oasr_core.models.layers import attention, length_bias
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions

HOP = 640
SAMPLE_RATE = 16000
VOCAB = 64
#: 0 is silence; 1 to 61 are words.
START, END = VOCAB - 2, VOCAB - 1
#: Encoder frames of the longest utterance.
MAX_FRAMES = 64
_SCALE = 128.0
_WIDTH, _HEADS, _LAYERS = 16, 2, 2


def word_audio(tokens: Sequence[int]) -> Tensor:
    """``(640 * len(tokens),)`` float32: samples that spell ``tokens``, 40 ms each.

    0 is silence. A token that stands several times in a row is one that lasts longer.
    """
    return (torch.tensor(tokens, dtype=torch.float32) / _SCALE).repeat_interleave(HOP)


def word(token: int) -> str:
    """The word that a token spells."""
    return "bcdfghklmnprstvz"[token % 16] + "aeio"[token // 16]


def words(tokens: Sequence[int]) -> str:
    """The text of ``tokens`` after collapsing repeats; silence, start and end spell nothing."""
    kept = [token for place, token in enumerate(tokens) if place == 0 or tokens[place - 1] != token]
    return " ".join(word(token) for token in kept if 0 < token < START)


class ToyFrontendOptions(BaseModel):
    """``window_seconds``: the fixed window, ``None`` for features as long as the audio."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window_seconds: float | None = None


class ToyFrontend(FeatureFrontend):
    """One feature per frame of 640 samples: its first sample."""

    oasr_api = "1.0"
    options_cls = ToyFrontendOptions
    options: ToyFrontendOptions
    sample_rate = SAMPLE_RATE
    feature_dim = 1
    frame_seconds = HOP / SAMPLE_RATE

    @property
    def window_seconds(self) -> float | None:
        """As the options say."""
        return self.options.window_seconds

    def num_frames(self, samples: int) -> int:
        """``samples // 640``."""
        return samples // HOP

    def extract(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """``(batch, frames, 1)``; of the whole window where there is one."""
        counts = lengths // HOP
        frames = int(counts.max()) if self.window_seconds is None else round(self.window_seconds / self.frame_seconds)
        features = torch.zeros(waveforms.shape[0], frames, 1)
        for row, waveform, count in zip(features, waveforms, counts.tolist(), strict=True):
            row[:count, 0] = waveform[: count * HOP : HOP]
        return features, counts


class ToyEncoder(BaseEncoder):
    """``hidden``: the token that a frame spells, then a random projection of it."""

    feature_dim = 1
    output_dim = 1 + _WIDTH
    subsampling_rate = 1

    def __init__(self, max_positions: int | None = None) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.project = nn.Embedding(VOCAB, _WIDTH)

    def output_frames(self, feature_frames: int) -> int:
        """As many."""
        return feature_frames

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        """Frame by frame."""
        tokens = (batch.features * _SCALE).round().clamp(0, VOCAB - 1)
        return EncoderOutput(torch.cat([tokens, self.project(tokens[..., 0].long())], dim=2), batch.lengths)


class ScriptDecoder(nn.Module):
    """Says what the frames spell, then the end; frames in a row that are alike are one token, silence is none."""

    kv = DecoderKV(layers=1, kv_heads=1, head_dim=4)
    vocab_size = VOCAB
    max_positions = MAX_FRAMES + 2
    memory_elements = 3 * (MAX_FRAMES + 1)

    def memory(self, hidden: Tensor, lengths: Tensor) -> DecoderMemory:
        """``(requests, 65)`` each: the tokens (then the end), their first frames, and the frames behind their last."""
        script = torch.full((hidden.shape[0], MAX_FRAMES + 1), float(END))
        starts, ends = torch.zeros_like(script), torch.zeros_like(script)
        for row, (tokens, length) in enumerate(zip(hidden[..., 0], lengths.tolist(), strict=True)):
            values, counts = tokens[:length].unique_consecutive(return_counts=True)
            spoken = values != 0
            found = int(spoken.sum())
            behind = counts.cumsum(0)
            script[row, :found] = values[spoken].float()
            starts[row, :found], ends[row, :found] = (behind - counts)[spoken].float(), behind[spoken].float()
        return script, starts, ends

    def step(self, tokens: Tensor, state: DecoderState, memory: DecoderMemory) -> Tensor:
        """``(rows, n, 1)``: the token that follows at each position."""
        script = memory[0].repeat_interleave(tokens.shape[0] // memory[0].shape[0], dim=0)
        idle = torch.zeros(*tokens.shape, 1, 4)
        state.attend(0, idle, idle, idle)  # its history says nothing, and is kept like any other's
        return script.gather(1, state.positions().clamp(max=MAX_FRAMES))[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Nearly one-hot."""
        return nn.functional.one_hot(hidden[..., 0].long(), VOCAB).float() * 12.0


class AttentionDecoder(nn.Module):
    """A transformer decoder of two layers, with random weights."""

    kv = DecoderKV(_LAYERS, _HEADS, _WIDTH // _HEADS)
    vocab_size = VOCAB
    max_positions = MAX_FRAMES
    memory_elements = (MAX_FRAMES + 1) * _WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, _WIDTH)
        self.position = nn.Embedding(MAX_FRAMES, _WIDTH)
        self.query_key_value = nn.ModuleList(nn.Linear(_WIDTH, 3 * _WIDTH) for _ in range(_LAYERS))
        self.cross = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))
        self.mix = nn.ModuleList(nn.Linear(2 * _WIDTH, _WIDTH) for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, VOCAB)

    def memory(self, hidden: Tensor, lengths: Tensor) -> DecoderMemory:
        """``(requests, 64, 16)`` keys, and how many of them there are: ``(requests,)`` int64."""
        keys = hidden.new_zeros(hidden.shape[0], MAX_FRAMES, _WIDTH)
        inside = torch.arange(hidden.shape[1]) < lengths[:, None]
        keys[:, : hidden.shape[1]] = torch.where(inside[..., None], hidden[..., 1:], torch.zeros(()))
        return keys, lengths

    def step(self, tokens: Tensor, state: DecoderState, memory: DecoderMemory) -> Tensor:
        """``(rows, n, 16)``."""
        keys, lengths = memory
        count, (rows, n) = keys.shape[0], tokens.shape
        heads = (_HEADS, _WIDTH // _HEADS)
        heard = keys.view(count, MAX_FRAMES, *heads)
        bias = length_bias(lengths, MAX_FRAMES)
        x: Tensor = self.embed(tokens) + self.position(state.positions().clamp(max=MAX_FRAMES - 1))
        for layer in range(_LAYERS):
            query, key, value = self.query_key_value[layer](x).view(rows, n, 3, *heads).unbind(2)
            said = state.attend(layer, query, key, value).reshape(rows, n, _WIDTH)
            asking = self.cross[layer](x).view(count, -1, *heads)  # hypotheses of one request share its keys
            saw = attention(asking, heard, heard, bias=bias).reshape(rows, n, _WIDTH)
            x = (x + self.mix[layer](torch.cat([said, saw], dim=2))).tanh()
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``(..., 64)`` float32."""
        logits: Tensor = self.head(hidden).float()
        return logits


class ToyModel(BaseAsrModel):
    """The encoder with both decoders."""

    oasr_api = "1.0"
    architecture = "test-autoregressive"
    vocab_size = VOCAB

    def __init__(self, max_positions: int | None = None) -> None:
        super().__init__()
        self.encoder = ToyEncoder(max_positions)
        self.script = ScriptDecoder()
        self.attention = AttentionDecoder()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ToyModel:
        """``max_positions`` of the encoder is the only key."""
        return cls(config.get("max_positions"))

    @property
    def interfaces(self) -> Mapping[str, Any]:
        """``toy_script`` and ``toy_attention``."""
        return {"toy_script": self.script, "toy_attention": self.attention}


class ToyAttentionStrategy(AutoregressiveStrategy):
    """Decodes with the random decoder; it has something to say about any audio."""

    oasr_api = "1.0"
    requires = ("toy_attention",)
    honours = frozenset({"max_new_tokens", "temperature", "seed", "top_k", "top_p"})
    invents_text: ClassVar[bool] = True

    @property
    def end_ids(self) -> frozenset[int]:
        """The end."""
        return frozenset({END})

    def prompt_ceiling(self, options: DecodingOptions) -> int:
        """The start token."""
        return 1

    def rows(self, requests: Sequence[IncrementalRequest], memory: DecoderMemory, frames: Sequence[int]) -> list[Row]:
        """Each begins with the start token."""
        return [self.new_row(request, count, [START]) for request, count in zip(requests, frames, strict=True)]

    def mask(self, logits: Tensor, pairs: Sequence[tuple[Row, Candidate]]) -> None:
        """Silence and start are never said."""
        logits[:, [0, START]] = -torch.inf


class ToyScriptStrategy(ToyAttentionStrategy):
    """Says what the audio spells, and when.

    With ``segment_timestamps`` a full window is taken up to its last pause only, as a family would that begins its next
    window where the last whole sentence ended.
    """

    oasr_api = "1.0"
    requires = ("toy_script",)
    honours = ToyAttentionStrategy.honours | {"word_timestamps", "segment_timestamps"}
    invents_text: ClassVar[bool] = False

    def finish(self, row: Row, memory: DecoderMemory) -> Hypotheses | Retry:
        """Frames from the memory; a segment, and what it consumed, where they are asked for."""
        found = hypotheses(row)
        starts, ends = (tensor[0].long().tolist() for tensor in memory[1:])
        for hypothesis in found.nbest:
            count = len(hypothesis.tokens)
            hypothesis.frames, hypothesis.end_frames = starts[:count], ends[:count]
        if not row.request.options.segment_timestamps:
            return found
        best, end = found.best, row.frames
        count = len(best.tokens)
        behind = [*starts[1:count], row.frames]
        pauses = [place for place in range(count) if ends[place] < behind[place]]
        if row.frames == self.window_frames and pauses:
            count, end = pauses[-1] + 1, ends[pauses[-1]]
            found.nbest = [Hypothesis(best.tokens[:count], starts[:count], score=best.score, end_frames=ends[:count])]
            found.consumed_seconds = end * HOP / SAMPLE_RATE
        found.segments = [TokenSpan(0, count, 0.0, end * HOP / SAMPLE_RATE)]
        return found

    #: Encoder frames of a window that is full.
    window_frames: ClassVar[int] = 32


@contextmanager
def registered() -> Iterator[None]:
    """The model, the frontend ``toy`` and the decode methods ``toy_script`` and ``toy_attention``, on their axes."""
    with ExitStack() as stack:
        stack.enter_context(registry("models").override(ToyModel.architecture, ToyModel))
        stack.enter_context(registry("frontends").override("toy", ToyFrontend))
        stack.enter_context(registry("decode_strategies").override("toy_script", ToyScriptStrategy))
        stack.enter_context(registry("decode_strategies").override("toy_attention", ToyAttentionStrategy))
        yield


def write_toy_bundle(
    directory: Path, *, window_seconds: float | None = None, max_positions: int | None = None, seed: int = 1
) -> Path:
    """A native bundle; ``window_seconds`` makes its frontend a fixed window, ``max_positions`` limits the encoder."""
    table = directory.parent / f"{directory.name}_symbols.txt"
    names = ["<blank>", *(f"▁{word(token)}" for token in range(1, START)), "<sos>", "<eos>"]
    table.write_text("".join(f"{name} {index}\n" for index, name in enumerate(names)), encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        weights = ToyModel(max_positions).state_dict()
    bundle = CheckpointBundle(
        architecture=ToyModel.architecture,
        config={"max_positions": max_positions},
        state_dict=weights,
        tokenizer=TokenizerSpec("symbol_table", {"symbols": table}, {}),
        feature=FeatureSpec("toy", 1.0, {"window_seconds": window_seconds}),
        decoding=DecodingDefaults("toy_script"),
    )
    return save_native(bundle, directory)
