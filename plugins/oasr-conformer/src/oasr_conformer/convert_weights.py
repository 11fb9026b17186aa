"""Turns a recognised WeNet directory into a :class:`CheckpointBundle`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oasr_conformer.config import ConformerConfig
from oasr_conformer.model import ConformerModel
from oasr_conformer.wenet_config import cmvn_file, cmvn_is_json, network_config, section
from oasr_conformer.wenet_features import feature_spec
from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, TokenizerSpec
from oasr_core.checkpoints.unpickle import load_torch_weights
from oasr_core.errors import CheckpointError

if TYPE_CHECKING:
    from oasr_core.checkpoints.peek import CheckpointPeek

_UNIT_TABLES = ("units.txt", "words.txt", "lang_char.txt", "dict.txt")
_DEFAULT_CHUNK_SIZE = 16


def convert(peek: CheckpointPeek, config: Mapping[str, Any], checkpoint_name: str) -> CheckpointBundle:
    """Read the weights named ``checkpoint_name`` and everything around them."""
    path = peek.file(checkpoint_name)
    weights = dict(load_torch_weights(path))
    network = network_config(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    parsed = ConformerConfig.parse(network, f"{peek.path}/train.yaml")
    if parsed.cmvn and "encoder.global_cmvn.mean" not in weights:
        weights.update(_read_cmvn(peek, config, parsed.input_dim))
    _check_shapes(parsed, weights, path)
    encoder = parsed.encoder
    chunk_size = None
    if encoder.streams:
        chunk_size = encoder.static_chunk_size if not encoder.dynamic_chunk else _DEFAULT_CHUNK_SIZE
    return CheckpointBundle(
        architecture=ConformerModel.architecture,
        config=parsed.model_dump(mode="json"),
        state_dict=weights,
        tokenizer=_tokenizer(peek, config, parsed),
        feature=feature_spec(config),
        decoding=DecodingDefaults(decode_method="ctc", chunk_size=chunk_size, num_left_chunks=-1),
        source=str(path),
        converter="wenet",
    )


def _check_shapes(config: ConformerConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """Compare every tensor with what the configuration asks for; blocks beyond the configured number count as well."""
    with torch.device("meta"):
        expected = ConformerModel(config).state_dict()
    for name, tensor in expected.items():
        if name in weights and weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {tuple(weights[name].shape)}, but train.yaml asks for "
                f"{tuple(tensor.shape)}: weights and configuration do not belong together."
            )
        if name not in weights:
            raise CheckpointError(f"{path}: tensor {name} {tuple(tensor.shape)} is missing; train.yaml asks for it.")
    for name in weights:
        block = _block(name)
        if block and not any(other.startswith(block) for other in expected):
            raise CheckpointError(
                f"{path}: tensor {name} belongs to a block that train.yaml does not have "
                f"(num_blocks {config.encoder.num_blocks}): weights and configuration do not belong together."
            )


def _block(name: str) -> str | None:
    """``encoder.encoders.3.`` of a tensor in a numbered block."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part in ("encoders", "decoders") and parts[index + 1].isdigit():
            return ".".join(parts[: index + 2]) + "."
    return None


# -- tokenizer ------------------------------------------------------------------------------------------------------


def _tokenizer(peek: CheckpointPeek, config: Mapping[str, Any], network: ConformerConfig) -> TokenizerSpec:
    conf = section(config, "tokenizer_conf")
    table = _first_file(peek, [conf.get("symbol_table_path"), *_UNIT_TABLES])
    if table is None:
        raise CheckpointError(
            f"{peek.path}: no unit table beside train.yaml (looked for {', '.join(_UNIT_TABLES)}); "
            "copy the table that the model was trained with into the directory."
        )
    units = sum(1 for line in peek.text(table.name).split("\n") if line.strip())
    if units != network.vocab_size:
        raise CheckpointError(f"{table} has {units} units, but the model has {network.vocab_size} outputs.")
    files = {"symbols": table}
    models = [name for name in peek.files() if name.endswith(".model") and "/" not in name]
    model = _first_file(peek, [conf.get("bpe_path"), *(models if len(models) == 1 else [])])
    if model is not None:
        files["sentencepiece"] = model
    options: dict[str, Any] = {}
    if network.blank_id != 0:
        options["special_ids"] = sorted({network.blank_id, network.sos_id, network.eos_id})
    if conf.get("connect_symbol"):
        options["connect_symbol"] = conf["connect_symbol"]
    return TokenizerSpec("symbol_table", files, options)


def _first_file(peek: CheckpointPeek, names: list[Any]) -> Path | None:
    """The first of ``names`` that lies beside ``train.yaml``; paths are those of the training machine."""
    for name in names:
        base = Path(str(name)).name if name else ""
        if base and peek.exists(base):
            return peek.file(base)
    return None


# -- CMVN -----------------------------------------------------------------------------------------------------------


def _read_cmvn(peek: CheckpointPeek, config: Mapping[str, Any], dim: int) -> dict[str, Tensor]:
    """Statistics of the file, for checkpoints that do not carry them."""
    name = str(cmvn_file(config))
    path = peek.resolve_inside(name)
    try:
        read = _json_cmvn if cmvn_is_json(config) else _kaldi_cmvn
        means, squares, count = read(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        form = "WeNet's JSON" if cmvn_is_json(config) else "Kaldi text"
        raise CheckpointError(f"{path} holds no CMVN statistics in {form}: {error}.") from error
    if len(means) != dim or len(squares) != dim or count <= 0:
        raise CheckpointError(f"{path} has statistics of {len(means)} values, but input_dim is {dim}.")
    mean = torch.tensor(means, dtype=torch.float64) / count
    variance = torch.tensor(squares, dtype=torch.float64) / count - mean.square()
    return {
        "encoder.global_cmvn.mean": mean.float(),
        "encoder.global_cmvn.istd": variance.clamp(min=1e-20).rsqrt().float(),
    }


def _json_cmvn(text: str) -> tuple[list[float], list[float], float]:
    """Sums, sums of squares and frame count of ``{"mean_stat": .., "var_stat": .., "frame_num": ..}``."""
    stats = json.loads(text)
    return stats["mean_stat"], stats["var_stat"], float(stats["frame_num"])


def _kaldi_cmvn(text: str) -> tuple[list[float], list[float], float]:
    """The same of Kaldi's text matrix: one row of sums and the frame count, one row of sums of squares and a zero."""
    inside = text[text.index("[") + 1 : text.rindex("]")]
    rows = [[float(value) for value in line.split()] for line in inside.splitlines() if line.strip()]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise ValueError(f"expected two rows of equal length, got {[len(row) for row in rows]}")
    return rows[0][:-1], rows[1][:-1], rows[0][-1]
