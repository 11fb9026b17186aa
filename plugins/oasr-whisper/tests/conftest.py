"""Tiny Whisper checkpoints in both layouts, a plain implementation of the network, and a writer of ``model.bin``."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_whisper.ctranslate2 import CTranslate2Converter
from oasr_whisper.huggingface import WhisperConverter

DIM, HEADS, FFN, MELS, POSITIONS = 16, 2, 24, 5, 50
LANGUAGES = ("en", "de", "haw")
TEXT = [*"abcdefgh", "\u0120a"]
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
TOKENS = [*TEXT, *SPECIAL]
VOCAB = len(TOKENS) + 51
#: CTranslate2's ids of types.
TYPE_IDS = {
    torch.float32: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.float16: 4,
    torch.bfloat16: 5,
}


def hf_config(**changes) -> dict:
    """``config.json`` of a model with two encoder and three decoder layers."""
    return {
        "model_type": "whisper",
        "activation_function": "gelu",
        "scale_embedding": False,
        "vocab_size": VOCAB,
        "num_mel_bins": MELS,
        "d_model": DIM,
        "encoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": FFN,
        "decoder_layers": 3,
        "decoder_attention_heads": HEADS,
        "decoder_ffn_dim": FFN,
        "max_source_positions": POSITIONS,
        "max_target_positions": 12,
    } | changes


def hf_weights(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under Hugging Face's names, norms and biases included."""
    torch.manual_seed(seed)
    dim, shapes = config["d_model"], {}
    for conv, channels in (("conv1", config["num_mel_bins"]), ("conv2", dim)):
        shapes |= {f"encoder.{conv}.weight": (dim, channels, 3), f"encoder.{conv}.bias": (dim,)}
    shapes["encoder.embed_positions.weight"] = (config["max_source_positions"], dim)
    shapes["decoder.embed_positions.weight"] = (config["max_target_positions"], dim)
    shapes["decoder.embed_tokens.weight"] = (config["vocab_size"], dim)
    for stack in ("encoder", "decoder"):
        norms = ["layer_norm"]
        for index in range(config[f"{stack}_layers"]):
            layer, ffn = f"layers.{index}", config[f"{stack}_ffn_dim"]
            attentions = ["self_attn"] if stack == "encoder" else ["self_attn", "encoder_attn"]
            norms += [f"{layer}.final_layer_norm", *(f"{layer}.{each}_layer_norm" for each in attentions)]
            for each in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{stack}.{layer}.{each}.{part}.weight"] = (dim, dim)
                    if part != "k_proj":
                        shapes[f"{stack}.{layer}.{each}.{part}.bias"] = (dim,)
            shapes |= {f"{stack}.{layer}.fc1.weight": (ffn, dim), f"{stack}.{layer}.fc1.bias": (ffn,)}
            shapes |= {f"{stack}.{layer}.fc2.weight": (dim, ffn), f"{stack}.{layer}.fc2.bias": (dim,)}
        for norm in norms:
            shapes |= {f"{stack}.{norm}.weight": (dim,), f"{stack}.{norm}.bias": (dim,)}
    return {f"model.{name}": torch.randn(shape) * 0.5 for name, shape in shapes.items()}


def write_tokenizer(directory: Path) -> None:
    """A ``tokenizer.json`` that ends before the timestamps, as OpenAI's do."""
    added = [{"id": len(TEXT) + index, "content": token, "special": True} for index, token in enumerate(SPECIAL)]
    vocab = {token: index for index, token in enumerate(TEXT)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    content = {"version": "1.0", "added_tokens": added, "model": model, "decoder": {"type": "ByteLevel"}}
    (directory / "tokenizer.json").write_text(json.dumps(content))


GENERATION = {
    "is_multilingual": True,
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3],
    "alignment_heads": [[2, 1], [1, 0]],
    "max_initial_timestamp_index": 40,
    "forced_decoder_ids": [[1, None], [2, 99]],
}


class HuggingFaceFiles:
    """A directory in Hugging Face layout; ``write`` replaces a part of it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config = hf_config()
        self.weights = hf_weights(self.config)
        write_tokenizer(directory)
        self.write()

    def write(self, *, generation: dict | None = GENERATION, **config) -> Path:
        self.config |= config
        (self.path / "config.json").write_text(json.dumps(self.config))
        (self.path / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (self.path / "generation_config.json").write_text(json.dumps(generation))
        save_file(self.weights, self.path / "model.safetensors")
        return self.path

    def convert(self, checkpoint_name: str | None = None):
        return WhisperConverter().convert(CheckpointPeek(self.path), checkpoint_name=checkpoint_name)


def ct2_variables(config: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under CTranslate2's names, with the scalars that a converter writes."""
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    zeros = torch.zeros(config["d_model"])
    out = {
        "decoder/embeddings/weight": weights["decoder.embed_tokens.weight"],
        "decoder/activation": torch.tensor(3, dtype=torch.int8),
        "decoder/pre_norm": torch.tensor(1, dtype=torch.int8),
        "decoder/scale_embeddings": torch.tensor(0, dtype=torch.int8),
        "decoder/alibi_use_positive_positions": torch.tensor(1, dtype=torch.int8),
    }

    def norm(theirs, ours):
        out[f"{theirs}/gamma"], out[f"{theirs}/beta"] = weights[f"{ours}.weight"], weights[f"{ours}.bias"]

    def linear(theirs, *ours):
        out[f"{theirs}/weight"] = torch.cat([weights[f"{each}.weight"] for each in ours])
        out[f"{theirs}/bias"] = torch.cat([weights.get(f"{each}.bias", zeros) for each in ours])

    for conv in ("conv1", "conv2"):
        linear(f"encoder/{conv}", f"encoder.{conv}")
    for stack in ("encoder", "decoder"):
        out[f"{stack}/num_heads"] = torch.tensor(config[f"{stack}_attention_heads"], dtype=torch.int16)
        out[f"{stack}/position_encodings/encodings"] = weights[f"{stack}.embed_positions.weight"]
        norm(f"{stack}/layer_norm", f"{stack}.layer_norm")
        for index in range(config[f"{stack}_layers"]):
            theirs, ours = f"{stack}/layer_{index}", f"{stack}.layers.{index}"
            norm(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
            linear(f"{theirs}/self_attention/linear_0", *(f"{ours}.self_attn.{each}_proj" for each in "qkv"))
            linear(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            if stack == "decoder":
                norm(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
                linear(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
                linear(f"{theirs}/attention/linear_1", *(f"{ours}.encoder_attn.{each}_proj" for each in "kv"))
                linear(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
            norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            linear(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            linear(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
    return out


def write_ct2(path: Path, variables: dict[str, Tensor], *, version=6, spec="WhisperSpec", aliases=None) -> None:
    """``model.bin`` in a binary version; aliases need version 3."""

    def text(value: str) -> bytes:
        raw = value.encode() + b"\0"
        return struct.pack("<H", len(raw)) + raw

    out = struct.pack("<I", version)
    if version >= 2:
        out += text(spec) + struct.pack("<I", 3)
    out += struct.pack("<I", len(variables))
    for name, tensor in variables.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        out += text(name) + struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        if version >= 4:
            out += struct.pack("<BI", TYPE_IDS[tensor.dtype], len(raw))
        else:
            out += struct.pack("<BI", tensor.element_size(), tensor.numel())
        out += raw
    if version >= 3:
        out += struct.pack("<I", len(aliases or {}))
        for alias, target in (aliases or {}).items():
            out += text(alias) + text(target)
    path.write_bytes(out)


class CTranslate2Files:
    """A directory in CTranslate2 layout with the weights of :class:`HuggingFaceFiles`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config = hf_config()
        self.weights = hf_weights(self.config)
        self.variables = ct2_variables(self.config, self.weights)
        listing = [*TOKENS, *(f"<|{index * 0.02:.2f}|>" for index in range(51))]
        (directory / "vocabulary.json").write_text(json.dumps(listing))
        stated = {"alignment_heads": [[2, 1], [1, 0]], "lang_ids": [11, 12, 13]}
        stated |= {"suppress_ids": [1, 2], "suppress_ids_begin": [3]}
        (directory / "config.json").write_text(json.dumps(stated))
        self.write()

    def write(self, **how) -> Path:
        write_ct2(self.path / "model.bin", self.variables, **how)
        return self.path

    def convert(self, checkpoint_name: str | None = None):
        return CTranslate2Converter().convert(CheckpointPeek(self.path), checkpoint_name=checkpoint_name)


class Reference:
    """Whisper in plain torch, from Hugging Face's names: no fused projections, no state, no batching of requests."""

    def __init__(self, config: dict, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}

    def _linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-5)

    def _attention(self, x, source, name, heads, causal):
        q, k, v = (
            self._linear(each, f"{name}.{part}_proj").unflatten(-1, (heads, -1)).transpose(0, 1)
            for each, part in ((x, "q"), (source, "k"), (source, "v"))
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        context = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self._linear(context, f"{name}.out_proj"), scores

    def _ffn(self, x, name):
        hidden = F.gelu(self._linear(self._norm(x, f"{name}.final_layer_norm"), f"{name}.fc1"))
        return x + self._linear(hidden, f"{name}.fc2")

    def encode(self, features: Tensor) -> Tensor:
        """``(frames, mels)`` to ``(frames / 2, dim)``."""
        x = features.T[None]
        for conv, stride in (("conv1", 1), ("conv2", 2)):
            weight, bias = self.weights[f"encoder.{conv}.weight"], self.weights[f"encoder.{conv}.bias"]
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        x = x[0].T + self.weights["encoder.embed_positions.weight"]
        for index in range(self.config["encoder_layers"]):
            name = f"encoder.layers.{index}"
            y = self._norm(x, f"{name}.self_attn_layer_norm")
            x = x + self._attention(y, y, f"{name}.self_attn", self.config["encoder_attention_heads"], False)[0]
            x = self._ffn(x, name)
        return self._norm(x, "encoder.layer_norm")

    def decode(self, tokens: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """``(n,)`` ids to logits ``(n, vocab)`` and cross-attention scores ``(layers, heads, n, frames)``."""
        embedding, heads = self.weights["decoder.embed_tokens.weight"], self.config["decoder_attention_heads"]
        x = embedding[tokens] + self.weights["decoder.embed_positions.weight"][: len(tokens)]
        scores = []
        for index in range(self.config["decoder_layers"]):
            name = f"decoder.layers.{index}"
            y = self._norm(x, f"{name}.self_attn_layer_norm")
            x = x + self._attention(y, y, f"{name}.self_attn", heads, True)[0]
            y = self._norm(x, f"{name}.encoder_attn_layer_norm")
            added, cross = self._attention(y, encoded, f"{name}.encoder_attn", heads, False)
            scores.append(cross)
            x = self._ffn(x + added, name)
        return self._norm(x, "decoder.layer_norm") @ embedding.T, torch.stack(scores)


@pytest.fixture
def hf(tmp_path) -> HuggingFaceFiles:
    """A tiny multilingual model in Hugging Face layout."""
    directory = tmp_path / "hf"
    directory.mkdir()
    return HuggingFaceFiles(directory)


@pytest.fixture
def ct2(tmp_path) -> CTranslate2Files:
    """The same model in CTranslate2 layout."""
    directory = tmp_path / "ct2"
    directory.mkdir()
    return CTranslate2Files(directory)


@pytest.fixture(scope="session")
def write_model_bin():
    """``write_model_bin(path, variables, version=6, spec="WhisperSpec", aliases=None)``."""
    return write_ct2


@pytest.fixture(scope="session")
def load():
    """``load(bundle)``: the prepared fp32 model, all of whose tensors the bundle has."""

    def run(bundle, dtype=torch.float32):
        model, report = load_model(bundle)
        assert not report.dropped
        model = model.to(dtype)
        model.prepare()
        return model

    return run


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The plain implementation of the tiny model."""
    return Reference(hf_config(), hf_weights(hf_config()))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, load):
    """The tiny model, prepared."""
    return load(HuggingFaceFiles(tmp_path_factory.mktemp("tiny")).convert())
