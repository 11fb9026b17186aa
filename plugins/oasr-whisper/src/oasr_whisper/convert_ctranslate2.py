"""A CTranslate2 Whisper directory to a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError
from oasr_whisper.config import WhisperConfig
from oasr_whisper.convert_huggingface import frames_side_by_side
from oasr_whisper.ct2_file import Ct2File, Variable, open_ct2
from oasr_whisper.ctranslate2 import WHISPER_SPEC
from oasr_whisper.features import feature_spec
from oasr_whisper.tokens import alignment_heads, find_tokens, id_list, tokenizer_spec

_TORCH: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
}
#: Scalars that another value of would change the network; what a file does not say is as Whisper has it.
_FIXED: Final[Mapping[str, tuple[int, str]]] = {
    "decoder/activation": (3, "exact GELU"),
    "encoder/activation": (3, "exact GELU"),
    "decoder/scale_embeddings": (0, "embeddings that are not scaled"),
    "decoder/pre_norm": (1, "norms in front of each part"),
    "encoder/pre_norm": (1, "norms in front of each part"),
}
#: Parts of a layer: our name -> theirs.
_LAYER: Final[Mapping[str, str]] = {
    "self_norm": "self_attention/layer_norm",
    "self_qkv": "self_attention/linear_0",
    "self_out": "self_attention/linear_1",
    "ffn_norm": "ffn/layer_norm",
    "ffn_in": "ffn/linear_0",
    "ffn_out": "ffn/linear_1",
}
_CROSS: Final[Mapping[str, str]] = {
    "cross_norm": "attention/layer_norm",
    "cross_query": "attention/linear_0",
    "cross_out": "attention/linear_2",
}


def convert(peek: CheckpointPeek, checkpoint_name: str) -> CheckpointBundle:
    """Read everything; raises ``CheckpointError`` naming the file at fault."""
    file = open_ct2(peek.file(checkpoint_name))
    if file.spec != WHISPER_SPEC:
        raise CheckpointError(
            f"{file.path} holds a model of CTranslate2's {file.spec or 'version 1 format'}, expected {WHISPER_SPEC}: "
            "it is no Whisper model."
        )
    weights = _Weights(file)
    sizes = _sizes(file, weights)
    stated = peek.json("config.json") if peek.exists("config.json") else {}
    if not isinstance(stated, dict):
        raise CheckpointError(f"{peek.directory / 'config.json'} is not a mapping.")
    tokens = find_tokens(
        peek,
        multilingual=None,
        suppress=id_list(stated, "suppress_ids", "config.json"),
        begin_suppress=id_list(stated, "suppress_ids_begin", "config.json"),
        alignment_heads=alignment_heads(
            stated.get("alignment_heads"), "config.json", sizes["decoder_layers"], sizes["decoder_heads"]
        ),
    )
    config = WhisperConfig.parse({**sizes, "tokens": asdict(tokens)}, str(file.path))
    return CheckpointBundle(
        architecture="whisper",
        config=config.model_dump(mode="json"),
        state_dict=_state_dict(weights, config),
        tokenizer=tokenizer_spec(peek, config.vocab_size, tokens),
        feature=feature_spec(peek, config.n_mels, config.max_source_positions),
        decoding=DecodingDefaults("aed"),
    )


class _Weights:
    """Variables as tensors, dequantised where they have a scale."""

    def __init__(self, file: Ct2File) -> None:
        self._file = file

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """A variable's shape; ``CheckpointError`` where it is missing or has another rank."""
        shape = self._find(name).shape
        if len(shape) != rank:
            raise CheckpointError(f"{self._file.path}: {name!r} has the shape {shape}, expected rank {rank}.")
        return shape

    def take(self, name: str) -> Tensor:
        """``q / scale`` in float32 for a quantised variable, any other in its own type."""
        tensor = self._raw(self._find(name))
        scale = self._file.variables.get(f"{name}_scale")
        if scale is not None:
            return self._dequantised(name, tensor, self._raw(scale))
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self._file.path}: {name!r} holds integers, but there is no {name}_scale.")
        return tensor

    def affine(self, ours: str, theirs: str) -> dict[str, Tensor]:
        """Weight and bias of a layer, or gamma and beta of a norm, under our name."""
        parts = ("gamma", "beta") if theirs.endswith("layer_norm") else ("weight", "bias")
        taken = (self.take(f"{theirs}/{part}") for part in parts)
        return {f"{ours}.{part}": tensor for part, tensor in zip(("weight", "bias"), taken, strict=True)}

    def _dequantised(self, name: str, tensor: Tensor, scale: Tensor) -> Tensor:
        # int8 has one scale a row, int16 one for all.
        if scale.dim() > 1 or (scale.dim() == 1 and len(scale) not in (1, len(tensor))):
            raise CheckpointError(
                f"{self._file.path}: {name!r} of shape {tuple(tensor.shape)} has scales of shape {tuple(scale.shape)}; "
                "expected one, or one for each row."
            )
        if not bool((scale != 0).all()):
            raise CheckpointError(f"{self._file.path}: {name}_scale has zeros, the weights cannot be restored.")
        return tensor.float() / scale.float().reshape(-1, *[1] * (tensor.dim() - 1))

    def _find(self, name: str) -> Variable:
        variable = self._file.variables.get(name)
        if variable is None:
            raise CheckpointError(
                f"{self._file.path} has no variable {name!r} (spec revision {self._file.revision}): "
                "it is a variant of the model that is not known."
            )
        return variable

    def _raw(self, variable: Variable) -> Tensor:
        if not variable.size:
            return torch.empty(variable.shape, dtype=_TORCH[variable.dtype])
        return torch.frombuffer(self._file.content(variable), dtype=_TORCH[variable.dtype]).view(variable.shape)


def _sizes(file: Ct2File, weights: _Weights) -> dict[str, Any]:
    """Every dimension, from shapes and scalars: the format has no configuration of sizes."""
    for name, (expected, meaning) in _FIXED.items():
        value = file.scalar(name)
        if value not in (None, expected):
            raise CheckpointError(f"{file.path}: {name} is {value}, expected {expected} ({meaning}).")
    vocab_size, dim = weights.shape("decoder/embeddings/weight", 2)
    sizes = {"vocab_size": vocab_size, "dim": dim, "n_mels": weights.shape("encoder/conv1/weight", 3)[1]}
    for stack, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        heads = file.scalar(f"{stack}/num_heads")
        if heads is None:
            raise CheckpointError(f"{file.path} has no scalar '{stack}/num_heads', so its heads are not known.")
        sizes[f"{stack}_heads"] = int(heads)
        sizes[f"{stack}_layers"] = _layers(file, stack)
        sizes[f"{stack}_ffn_dim"] = weights.shape(f"{stack}/layer_0/ffn/linear_0/weight", 2)[0]
        sizes[positions] = weights.shape(f"{stack}/position_encodings/encodings", 2)[0]
    return sizes


def _layers(file: Ct2File, stack: str) -> int:
    start = f"{stack}/layer_"
    return len({name.split("/")[1] for name in file.variables if name.startswith(start) and name[len(start)].isdigit()})


def _state_dict(weights: _Weights, config: WhisperConfig) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for conv in ("conv1", "conv2"):
        out |= weights.affine(f"encoder.{conv}", f"encoder/{conv}")
        out[f"encoder.{conv}.weight"] = frames_side_by_side(out[f"encoder.{conv}.weight"])
    out["decoder.embedding"] = weights.take("decoder/embeddings/weight")
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        out[f"{stack}.positions"] = weights.take(f"{stack}/position_encodings/encodings")
        out |= weights.affine(f"{stack}.norm", f"{stack}/layer_norm")
        parts = _LAYER if stack == "encoder" else {**_LAYER, **_CROSS}
        for index in range(layers):
            for ours, theirs in parts.items():
                out |= weights.affine(f"{stack}.layers.{index}.{ours}", f"{stack}/layer_{index}/{theirs}")
    cross = [weights.affine("cross", f"decoder/layer_{i}/attention/linear_1") for i in range(config.decoder_layers)]
    for part in ("weight", "bias"):
        out[f"decoder.cross_kv.{part}"] = torch.cat([layer[f"cross.{part}"] for layer in cross])
    return out
