"""Reads WeNet's ``train.yaml`` of any age into OASR's terms (torch-free).

Every key either reaches the network, is known to matter in training only, or must have the one value that is served.
Anything else is refused, so that no key that changes the mathematics is passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from oasr_core.errors import CheckpointError, did_you_mean

_ENCODERS = {
    "conformer": "conformer",
    "transformer": "transformer",
    # Contrastive training with two masks over one set of weights; the weights are those of a plain encoder.
    "dual_conformer": "conformer",
    "dual_transformer": "transformer",
}
_MODELS = ("asr_model", "ctl_model")
# Top-level keys that only other families have.
_FAMILY_KEYS = {"predictor": "a transducer", "paraformer": "Paraformer", "lfmmi_dir": "a k2 LF-MMI model"}
_DECODERS = ("transformer", "bitransformer")

_TRAINING_ONLY = frozenset(
    {"dropout_rate", "positional_dropout_rate", "attention_dropout_rate", "self_attention_dropout_rate"}
    | {"src_attention_dropout_rate", "gradient_checkpointing", "use_sdpa", "use_dynamic_left_chunk"}
    # Sizes of experts, which count only with the mlp_type that is refused below.
    | {"n_expert", "n_expert_activated"}
)
# Key -> the values that are served.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "normalize_before": (True,),
    "concat_after": (False,),
    "positionwise_conv_kernel_size": (1,),
    "layer_norm_type": ("layer_norm",),
    "mlp_type": ("position_wise_feed_forward",),
    "mlp_bias": (True,),
}
_ENCODER_FIXED: Mapping[str, tuple[Any, ...]] = {**_FIXED, "conv_bias": (True,), "conv_inner_factor": (2,)}
_DECODER_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "input_layer": ("embed",),
    "use_output_layer": (True,),
    "src_attention": (True,),
    "tie_word_embedding": (False,),
    **{f"{prefix}{part}_bias": (True,) for prefix in ("", "src_") for part in ("query", "key", "value")},
}
_TRANSFORMER_KEYS = {
    "output_size": "output_size",
    "attention_heads": "attention_heads",
    "linear_units": "linear_units",
    "num_blocks": "num_blocks",
    "input_layer": "input_layer",
    "pos_enc_layer_type": "positions",
    "activation_type": "activation",
    "use_dynamic_chunk": "dynamic_chunk",
    "static_chunk_size": "static_chunk_size",
    "query_bias": "query_bias",
    "key_bias": "key_bias",
    "value_bias": "value_bias",
    "norm_eps": "norm_eps",
    "final_norm": "final_norm",
}
_CONFORMER_KEYS = {
    **_TRANSFORMER_KEYS,
    "macaron_style": "macaron",
    "use_cnn_module": "conv_module",
    "cnn_module_kernel": "conv_kernel",
    "causal": "conv_causal",
    "cnn_module_norm": "conv_norm",
    "conv_norm_eps": "conv_norm_eps",
}
_DECODER_KEYS = {
    "attention_heads": "attention_heads",
    "linear_units": "linear_units",
    "num_blocks": "num_blocks",
    "r_num_blocks": "reverse_num_blocks",
    "activation_type": "activation",
    "norm_eps": "norm_eps",
}
_SERVED = {
    "pos_enc_layer_type": ("rel_pos", "abs_pos", "no_pos"),
    "selfattention_layer_type": ("rel_selfattn", "selfattn"),
    "activation_type": ("swish", "relu", "gelu"),
    "input_layer": ("conv2d", "conv2d6", "conv2d8", "linear"),
    "cnn_module_norm": ("layer_norm", "batch_norm"),
}


def refuse(what: str, got: object, served: Collection[object]) -> CheckpointError:
    """The refusal of a value that belongs to another model family or is not served."""
    allowed = ", ".join(map(repr, served))
    return CheckpointError(
        f"train.yaml: {what} is {got!r}, which the conformer plugin does not serve (served: {allowed}). "
        "Use a plugin that serves this model family."
    )


def network_config(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The bundle's ``config`` from a ``train.yaml`` and the shapes of the checkpoint's tensors."""
    _refuse_families(config, tensors)
    vocab_size = config.get("vocab_size", config.get("output_dim", tensors.get("ctc.ctc_lo.bias", (0,))[0]))
    special = section(config, "tokenizer_conf").get("special_tokens") or {}
    model_conf = section(config, "model_conf")
    network: dict[str, Any] = {
        "input_dim": config.get("input_dim", 80),
        "vocab_size": vocab_size,
        "cmvn": cmvn_file(config) is not None or "encoder.global_cmvn.mean" in tensors,
        "blank_id": section(config, "ctc_conf").get("ctc_blank_id", 0),
        "sos_id": special.get("<sos>", vocab_size - 1),
        "eos_id": special.get("<eos>", vocab_size - 1),
        "encoder": _encoder(config, tensors),
        "decoder": _decoder(config, tensors),
    }
    if network["decoder"] is not None and network["decoder"]["kind"] == "bitransformer":
        network["reverse_weight"] = model_conf.get("reverse_weight", 0.0)
    return network


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping inside of the configuration, empty where it is absent or null."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"train.yaml: {name} must be a mapping, got {value!r}.")
    return value


def cmvn_file(config: Mapping[str, Any]) -> str | None:
    """The CMVN file that the configuration names, in the form of any release; ``None`` for no CMVN."""
    if "cmvn" in config:
        return section(config, "cmvn_conf").get("cmvn_file") if config["cmvn"] else None
    return config.get("cmvn_file")


def cmvn_is_json(config: Mapping[str, Any]) -> bool:
    """Whether the CMVN file is WeNet's JSON (else Kaldi text)."""
    owner = section(config, "cmvn_conf") if "cmvn" in config else config
    return bool(owner.get("is_json_cmvn", True))


def _refuse_families(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what WeNet stores in the same format but is another model."""
    if config.get("model") is not None and config["model"] not in _MODELS:
        raise refuse("model", config["model"], _MODELS)
    if config.get("encoder") not in _ENCODERS:
        raise refuse("encoder", config.get("encoder"), tuple(_ENCODERS))
    for key, family in _FAMILY_KEYS.items():
        if config.get(key):
            raise CheckpointError(f"train.yaml: the key {key!r} makes this {family}, which this plugin does not serve.")
    if config.get("ctc", "ctc") != "ctc":
        raise refuse("ctc", config["ctc"], ("ctc",))
    model_conf = section(config, "model_conf")
    if model_conf.get("lfmmi_dir"):
        raise CheckpointError("train.yaml: model_conf.lfmmi_dir makes this a k2 LF-MMI model, which is not served.")
    if model_conf.get("apply_non_blank_embedding"):
        raise refuse("model_conf.apply_non_blank_embedding", True, (False,))
    adapter = next((name for name in tensors if ".lora_" in name), None)
    if adapter is not None:
        raise CheckpointError(f"the checkpoint has LoRA weights ({adapter}), which are not served: merge them first.")


def _encoder(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    kind = _ENCODERS[config["encoder"]]
    conf = section(config, "encoder_conf")
    keys = _CONFORMER_KEYS if kind == "conformer" else _TRANSFORMER_KEYS
    also = ("selfattention_layer_type", "n_kv_head", "head_dim")
    network = _take(conf, "encoder_conf", keys, _ENCODER_FIXED, also)
    defaults = {"positions": "rel_pos", "activation": "swish", "macaron": True, "conv_module": True}
    if kind == "transformer":
        defaults = {"positions": "abs_pos", "activation": "relu", "macaron": False, "conv_module": False}
    network = {"kind": kind, **defaults, **network}
    heads, size = network.get("attention_heads", 4), network.get("output_size", 256)
    _expect(conf, "encoder_conf", {"n_kv_head": (None, heads), "head_dim": (None, size // heads)})
    attention = conf.get("selfattention_layer_type", "rel_selfattn" if kind == "conformer" else "selfattn")
    if network["positions"] == "no_pos":  # releases differ in what they built: the weights tell
        network["relative_attention"] = "encoder.encoders.0.self_attn.linear_pos.weight" in tensors
    else:
        network["relative_attention"] = attention == "rel_selfattn"
    if not network["conv_module"]:
        network.update({"conv_causal": False, "conv_kernel": 15})
    return network


def _decoder(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    kind = config.get("decoder", "bitransformer")
    if kind is None or not any(name.startswith("decoder.") for name in tensors):
        return None
    if kind not in _DECODERS:
        raise refuse("decoder", kind, _DECODERS)
    conf = section(config, "decoder_conf")
    network = _take(conf, "decoder_conf", _DECODER_KEYS, _DECODER_FIXED, ("n_kv_head", "head_dim"))
    heads, size = network.get("attention_heads", 4), section(config, "encoder_conf").get("output_size", 256)
    _expect(conf, "decoder_conf", {"n_kv_head": (None, heads), "head_dim": (None, size // heads)})
    if kind == "transformer":
        network.pop("reverse_num_blocks", None)
    return {"kind": kind, **network}


def _take(
    conf: Mapping[str, Any],
    name: str,
    keys: Mapping[str, str],
    fixed: Mapping[str, tuple[Any, ...]],
    also: tuple[str, ...],
) -> dict[str, Any]:
    """The keys of one section that shape the network, renamed; refuses unknown keys and values that are not served."""
    _expect(conf, name, fixed)
    if name == "encoder_conf":
        _expect(conf, name, _SERVED)
    else:
        _expect(conf, name, {"activation_type": _SERVED["activation_type"]})
    known = {*keys, *fixed, *also, *_TRAINING_ONLY}
    for key in conf:
        if key not in known:
            raise CheckpointError(
                f"train.yaml: {name}.{key} is unknown to the conformer plugin, so it cannot be told whether it changes "
                f"the network.{did_you_mean(str(key), known)}"
            )
    return {ours: conf[theirs] for theirs, ours in keys.items() if theirs in conf}


def _expect(conf: Mapping[str, Any], name: str, served: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in served.items():
        if key in conf and conf[key] not in values:
            raise refuse(f"{name}.{key}", conf[key], values)
