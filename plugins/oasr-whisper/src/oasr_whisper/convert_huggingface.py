"""A Hugging Face Whisper directory to a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.checkpoints.unpickle import load_safetensors, load_torch_weights
from oasr_core.errors import CheckpointError
from oasr_whisper.config import MULTILINGUAL_VOCAB, WhisperConfig, WhisperTokens
from oasr_whisper.features import feature_spec
from oasr_whisper.tokens import alignment_heads, find_tokens, id_list, tokenizer_spec

#: Weights in the order in which they are looked for; an index names the files of a checkpoint in parts.
_WEIGHTS: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
#: Settings that another value of would change the network.
_FIXED: Final[Mapping[str, Any]] = {
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
#: Sizes: our name -> the key of ``config.json``.
_SIZES: Final[Mapping[str, str]] = {
    "vocab_size": "vocab_size",
    "n_mels": "num_mel_bins",
    "dim": "d_model",
    "encoder_layers": "encoder_layers",
    "encoder_heads": "encoder_attention_heads",
    "encoder_ffn_dim": "encoder_ffn_dim",
    "decoder_layers": "decoder_layers",
    "decoder_heads": "decoder_attention_heads",
    "decoder_ffn_dim": "decoder_ffn_dim",
    "max_source_positions": "max_source_positions",
    "max_target_positions": "max_target_positions",
}
#: Parts of a layer that are taken over as they are: our name -> theirs.
_LAYER: Final[Mapping[str, str]] = {
    "self_norm": "self_attn_layer_norm",
    "self_out": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "ffn_in": "fc1",
    "ffn_out": "fc2",
}
_CROSS: Final[Mapping[str, str]] = {
    "cross_norm": "encoder_attn_layer_norm",
    "cross_query": "encoder_attn.q_proj",
    "cross_out": "encoder_attn.out_proj",
}


def convert(peek: CheckpointPeek, checkpoint_name: str | None) -> CheckpointBundle:
    """Read everything; raises ``CheckpointError`` naming the file at fault."""
    config = _mapping(peek, "config.json")
    generation = _mapping(peek, "generation_config.json") if peek.exists("generation_config.json") else {}
    sizes = _sizes(peek, config)
    tokens = _tokens(peek, sizes, config, generation)
    ours = WhisperConfig.parse({**sizes, "tokens": asdict(tokens)}, str(peek.directory / "config.json"))
    name, weights = _load(peek, checkpoint_name)
    return CheckpointBundle(
        architecture="whisper",
        config=ours.model_dump(mode="json"),
        state_dict=_Weights(str(peek.directory / name), weights).rename(ours),
        tokenizer=tokenizer_spec(peek, ours.vocab_size, ours.tokens),
        feature=feature_spec(peek, ours.n_mels, ours.max_source_positions),
        decoding=DecodingDefaults("aed"),
    )


def _sizes(peek: CheckpointPeek, config: Mapping[str, Any]) -> dict[str, Any]:
    where = peek.directory / "config.json"
    missing = [key for key in _SIZES.values() if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}: it is not the configuration of a Whisper model.")
    other = {key: config[key] for key, value in _FIXED.items() if config.get(key, value) != value}
    if other:
        raise CheckpointError(f"{where} has {other}; only {dict(_FIXED)} is served, which every Whisper model has.")
    return {ours: config[theirs] for ours, theirs in _SIZES.items()}


def _tokens(
    peek: CheckpointPeek, sizes: Mapping[str, Any], config: Mapping[str, Any], generation: Mapping[str, Any]
) -> WhisperTokens:
    """Special tokens; what ``generation_config.json`` says goes before what older files have in ``config.json``.

    ``forced_decoder_ids`` are not read: language and task are each request's.
    """
    where = "generation_config.json" if generation else "config.json"
    merged = {**config, **{key: value for key, value in generation.items() if value is not None}}
    heads = alignment_heads(merged.get("alignment_heads"), where, sizes["decoder_layers"], sizes["decoder_heads"])
    multilingual = merged.get("is_multilingual")
    if multilingual is None:
        multilingual = sizes["vocab_size"] >= MULTILINGUAL_VOCAB or bool(merged.get("lang_to_id"))
    return find_tokens(
        peek,
        multilingual=bool(multilingual),
        suppress=id_list(merged, "suppress_tokens", where),
        begin_suppress=id_list(merged, "begin_suppress_tokens", where),
        alignment_heads=heads,
        max_initial_timestamp_index=merged.get("max_initial_timestamp_index"),
    )


def _load(peek: CheckpointPeek, checkpoint_name: str | None) -> tuple[str, dict[str, Tensor]]:
    name = checkpoint_name or next((name for name in _WEIGHTS if peek.exists(name)), _WEIGHTS[0])
    if not name.endswith(".index.json"):
        return name, _load_file(peek, name)
    parts = _mapping(peek, name).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise CheckpointError(f"{peek.directory / name} has no weight_map of tensor names to files.")
    weights: dict[str, Tensor] = {}
    for part in sorted(set(parts.values())):
        weights |= _load_file(peek, part)
    return name, weights


def _load_file(peek: CheckpointPeek, name: str) -> dict[str, Tensor]:
    path = peek.file(name)
    return load_safetensors(path) if name.endswith(".safetensors") else load_torch_weights(path)


def _mapping(peek: CheckpointPeek, name: str) -> dict[str, Any]:
    content = peek.json(name)
    if not isinstance(content, dict):
        raise CheckpointError(f"{peek.directory / name} holds {json.dumps(content)[:40]}, expected a mapping.")
    return content


class _Weights:
    """Tensors of a checkpoint, taken one after the other; what is left over is nobody's."""

    def __init__(self, source: str, tensors: dict[str, Tensor]) -> None:
        self._source = source
        # The bare model (WhisperModel) is saved without the prefix.
        self._left = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    def rename(self, config: WhisperConfig) -> dict[str, Tensor]:
        """Our names; left-overs keep theirs, so that the load report names them."""
        out: dict[str, Tensor] = {}
        for conv in ("conv1", "conv2"):
            out[f"encoder.{conv}.weight"] = frames_side_by_side(self._take(f"encoder.{conv}.weight"))
            out[f"encoder.{conv}.bias"] = self._take(f"encoder.{conv}.bias")
        out["decoder.embedding"] = self._take("decoder.embed_tokens.weight")
        for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
            out[f"{stack}.positions"] = self._take(f"{stack}.embed_positions.weight")
            out |= self._affine(f"{stack}.norm", f"{stack}.layer_norm")
            parts = _LAYER if stack == "encoder" else {**_LAYER, **_CROSS}
            for index in range(layers):
                layer = f"{stack}.layers.{index}"
                out |= self._joined(f"{layer}.self_qkv", [f"{layer}.self_attn.{each}_proj" for each in "qkv"])
                for ours, theirs in parts.items():
                    out |= self._affine(f"{layer}.{ours}", f"{layer}.{theirs}")
        keys_and_values = [
            f"decoder.layers.{index}.encoder_attn.{each}_proj"
            for index in range(config.decoder_layers)
            for each in "kv"
        ]
        out |= self._joined("decoder.cross_kv", keys_and_values)
        self._left.pop("proj_out.weight", None)  # tied to the embedding
        return out | self._left

    def _affine(self, ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.{part}": self._take(f"{theirs}.{part}") for part in ("weight", "bias")}

    def _joined(self, ours: str, theirs: list[str]) -> dict[str, Tensor]:
        """Projections one above the other; keys have no bias."""
        weights = [self._take(f"{name}.weight") for name in theirs]
        biases = [
            weight.new_zeros(weight.shape[0]) if name.endswith("k_proj") else self._take(f"{name}.bias")
            for name, weight in zip(theirs, weights, strict=True)
        ]
        return {f"{ours}.weight": torch.cat(weights), f"{ours}.bias": torch.cat(biases)}

    def _take(self, name: str) -> Tensor:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise CheckpointError(
                f"{self._source} has no tensor {name!r} (with or without 'model.' in front): it does not belong to its "
                "config.json, it is a part of a checkpoint in several files, or it is no speech recognition model."
            )
        return tensor


def frames_side_by_side(kernel: Tensor) -> Tensor:
    """A convolution's ``(out, in, 3)`` as the matrix ``(out, 3 * in)`` that is applied to frames side by side."""
    return kernel.transpose(1, 2).reshape(kernel.shape[0], -1)
