"""Turns a recognised icefall directory into a :class:`CheckpointBundle`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.unpickle import load_safetensors, load_torch_weights
from oasr_core.errors import CheckpointError
from oasr_zipformer.averaging import plain_average, running_average
from oasr_zipformer.config import ZipformerConfig
from oasr_zipformer.icefall_config import Options, chunk_defaults, network_config, vocabulary
from oasr_zipformer.icefall_families import ZIPFORMER2, bare_name, recognise
from oasr_zipformer.icefall_files import (
    average_of,
    choose_tokens,
    choose_weights,
    explicit_options,
    sentencepiece_model,
    training_options,
)
from oasr_zipformer.model import ZipformerModel

if TYPE_CHECKING:
    from oasr_core.checkpoints.peek import CheckpointPeek

#: icefall trains on samples in [-1, 1].
_AUDIO_SCALE = 1.0


def convert(peek: CheckpointPeek, checkpoint_name: str | None) -> CheckpointBundle:
    """Read the weights named ``checkpoint_name`` (or the average that it names) and everything around them."""
    weights, name = _read(peek, checkpoint_name)
    source = peek.directory / name
    _refuse_others(weights, source)
    trained = training_options(source)
    options = Options.merge(trained, explicit_options(peek, name), str(source))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    tokens, symbols = choose_tokens(peek, vocabulary(shapes, str(source)))
    unk_id = symbols.index("<unk>") if "<unk>" in symbols else None
    config = ZipformerConfig.parse(network_config(shapes, options, unk_id=unk_id), str(source))
    weights = {_our_name(name): tensor for name, tensor in weights.items()}
    _check_shapes(config, weights, source)
    return CheckpointBundle(
        architecture=ZipformerModel.architecture,
        config=config.model_dump(mode="json"),
        state_dict=weights,
        tokenizer=_tokenizer(peek, tokens, config),
        feature=_features(config, trained),
        decoding=_decoding(config, options),
        source=str(source),
        converter="icefall",
    )


def _read(peek: CheckpointPeek, checkpoint_name: str | None) -> tuple[dict[str, Tensor], str]:
    """Weights without the prefix of parallel training, and the file that they (or the last of them) come from."""
    average = average_of(peek, checkpoint_name)
    if average is None:
        name = choose_weights(peek, checkpoint_name)
        path = peek.file(name)
        weights = load_safetensors(path) if name.endswith(".safetensors") else load_torch_weights(path)
    else:
        names, plain = average
        name = names[-1]
        paths = [peek.file(each) for each in names]
        weights = plain_average(paths) if plain else running_average(*paths)
    return {bare_name(key): tensor for key, tensor in weights.items()}, name


def _refuse_others(weights: Mapping[str, Tensor], source: Path) -> None:
    family = recognise(weights)
    if family is ZIPFORMER2:
        return
    if family is None:
        raise CheckpointError(
            f"{source} does not have the tensors of icefall's Zipformer2 ({', '.join(ZIPFORMER2.signs)}); it has "
            f"{', '.join(list(weights)[:4])} and so on."
        )
    raise CheckpointError(f"{source} is icefall's {family.name}, which is not served. {family.refusal}")


def _our_name(name: str) -> str:
    """icefall keeps the front-end beside the encoder; here it belongs to it."""
    return f"encoder.{name}" if name.startswith("encoder_embed.") else name


def _check_shapes(config: ZipformerConfig, weights: Mapping[str, Tensor], source: Path) -> None:
    """Every tensor of the network that the dimensions describe must be there in its shape, and no layer beyond."""
    with torch.device("meta"):
        expected = ZipformerModel(config).state_dict()
    for name, tensor in expected.items():
        if name not in weights:
            raise CheckpointError(f"{source}: tensor {name} {tuple(tensor.shape)} is missing: the file is incomplete.")
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {tuple(weights[name].shape)}, but a Zipformer2 of these dimensions "
                f"has {tuple(tensor.shape)}: it is a variant that is not known."
            )
    for name in weights:
        beyond = name.startswith(("encoder.", "ctc_output.", "joiner.", "decoder.")) and name not in expected
        if beyond and not name.endswith(".bypass_scale"):
            raise CheckpointError(
                f"{source}: tensor {name} is not part of a Zipformer2 of these dimensions: it is a variant that is not "
                "known."
            )


def _tokenizer(peek: CheckpointPeek, tokens: str, config: ZipformerConfig) -> TokenizerSpec:
    files = {"symbols": peek.file(tokens)}
    model = sentencepiece_model(peek, tokens)
    if model is not None:
        files["sentencepiece"] = peek.file(model)
    options: dict[str, Any] = {}
    if config.blank_id != 0:
        options["special_ids"] = [config.blank_id]
    return TokenizerSpec("symbol_table", files, options)


def _features(config: ZipformerConfig, trained: Mapping[str, Any]) -> FeatureSpec:
    """lhotse's filter banks, as icefall's recipes compute them."""
    options = {
        "sample_rate": 16000,
        "num_mel_bins": config.encoder.feature_dim,
        "high_freq": -400.0,
        "snip_edges": False,
        "dither": 0.0,
    }
    if isinstance(trained.get("sample_rate"), int):
        options["sample_rate"] = trained["sample_rate"]
    return FeatureSpec(kind="fbank", audio_scale=_AUDIO_SCALE, options=options)


def _decoding(config: ZipformerConfig, options: Options) -> DecodingDefaults:
    """The transducer where there is one; chunks in encoder frames."""
    method = "ctc" if config.transducer is None else "transducer"
    encoder = config.encoder
    if not encoder.causal:
        return DecodingDefaults(decode_method=method)
    chunk, left = chunk_defaults(options, encoder.frame_multiple)
    return DecodingDefaults(
        decode_method=method,
        chunk_size=chunk // encoder.output_downsampling,
        num_left_chunks=left // chunk,
    )
