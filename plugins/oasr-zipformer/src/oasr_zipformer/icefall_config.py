"""Reads the network's dimensions off a Zipformer2 checkpoint's shapes and training options (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oasr_core.errors import CheckpointError, did_you_mean

Shapes = Mapping[str, tuple[int, ...]]

#: icefall's defaults for what shapes show only as products.
_HEAD_DIMS = {"query_head_dim": 32, "value_head_dim": 12, "pos_head_dim": 4}
#: Decoded with unless training says otherwise, in front-end frames (50 Hz): icefall's usual choice.
_DEFAULT_CHUNK, _DEFAULT_LEFT = 16, 128

_PER_STACK = (
    "num_encoder_layers",
    "downsampling_factor",
    "encoder_dim",
    "feedforward_dim",
    "num_heads",
    *_HEAD_DIMS,
    "cnn_module_kernel",
)
_KNOWN = (
    *_PER_STACK,
    "pos_dim",
    "causal",
    "chunk_size",
    "left_context_frames",
    "feature_dim",
    "decoder_dim",
    "joiner_dim",
    "context_size",
    "blank_id",
)


@dataclass(frozen=True)
class Options:
    """icefall's training options, as far as they shape the network."""

    values: Mapping[str, Any]
    source: str

    @classmethod
    def merge(cls, trained: Mapping[str, Any], explicit: Mapping[str, Any], source: str) -> Options:
        """``trained`` come with the checkpoint (others beside them are ignored), ``explicit`` from a file and win."""
        for key in explicit:
            if key not in _KNOWN:
                raise CheckpointError(
                    f"{source}: unknown key {key!r}; known: {', '.join(_KNOWN)}.{did_you_mean(str(key), _KNOWN)}"
                )
        return cls({**{key: trained[key] for key in _KNOWN if key in trained}, **explicit}, source)

    def integers(self, key: str) -> list[int] | None:
        """A list-valued option, which icefall keeps as ``"16,32,-1"``; ``None`` where it is not stated."""
        value = self.values.get(key)
        if value is None:
            return None
        parts: Sequence[Any] = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            parts = [parts]
        try:
            return [int(part) for part in parts]
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self.source}: {key} must be integers, got {value!r}.") from error

    def stack(self, key: str, index: int, count: int) -> int | None:
        """The value of a per-stack option; a single value holds for all stacks."""
        values = self.integers(key)
        if values is None:
            return None
        if len(values) not in (1, count):
            raise CheckpointError(f"{self.source}: {key} has {len(values)} values for {count} stacks.")
        return values[0] if len(values) == 1 else values[index]


def network_config(shapes: Shapes, options: Options, *, unk_id: int | None) -> dict[str, Any]:
    """The bundle's ``config``; ``CheckpointError`` where neither shapes nor options decide, or where they disagree."""
    encoder = _encoder(shapes, options)
    vocab_size = vocabulary(shapes, options.source)
    transducer = None
    if "joiner.output_linear.weight" in shapes and "decoder.embedding.weight" in shapes:
        conv = shapes.get("decoder.conv.weight")
        transducer = {
            "decoder_dim": shapes["decoder.embedding.weight"][1],
            "joiner_dim": shapes["joiner.output_linear.weight"][1],
            "context_size": 1 if conv is None else conv[-1],
        }
        for key, value in transducer.items():
            _agree(options, key, options.values.get(key), value)
    return {
        "vocab_size": vocab_size,
        "blank_id": options.values.get("blank_id", 0),
        "unk_id": unk_id,
        "ctc": "ctc_output.1.weight" in shapes,
        "transducer": transducer,
        "encoder": encoder,
    }


def vocabulary(shapes: Shapes, source: str) -> int:
    """Number of output units."""
    for name in ("ctc_output.1.weight", "joiner.output_linear.weight"):
        if name in shapes:
            return shapes[name][0]
    raise CheckpointError(f"{source}: the checkpoint has neither ctc_output.1.weight nor joiner.output_linear.weight.")


def chunk_defaults(options: Options, multiple: int) -> tuple[int, int]:
    """``(chunk_size, left_context_frames)`` in front-end frames.

    icefall's usual values where training allowed them, else the smallest chunk and the longest context of training.
    ``multiple``: front-end frames that a chunk has to be a multiple of.
    """
    chunks = [size for size in options.integers("chunk_size") or [_DEFAULT_CHUNK] if size > 0]
    lefts = [frames for frames in options.integers("left_context_frames") or [_DEFAULT_LEFT] if frames > 0]
    chunks = [size for size in chunks if size % multiple == 0] or [-(-_DEFAULT_CHUNK // multiple) * multiple]
    chunk = _DEFAULT_CHUNK if _DEFAULT_CHUNK in chunks else min(chunks)
    return chunk, _DEFAULT_LEFT if _DEFAULT_LEFT in lefts or not lefts else max(lefts)


def _encoder(shapes: Shapes, options: Options) -> dict[str, Any]:
    count = _count(shapes, "encoder.encoders.")
    stacks = [_stack(shapes, options, index, count) for index in range(count)]
    first = _prefix(shapes, 0)
    causal = f"{first}0.conv_module1.depthwise_conv.causal_conv.weight" in shapes
    _agree(options, "causal", options.values.get("causal"), causal)
    channels = [_shape(shapes, f"encoder_embed.conv.{place}.weight")[0] for place in (0, 4, 7)]
    factor = shapes.get("encoder.downsample_output.bias", (1,))[0]
    _, left = chunk_defaults(options, 1)
    return {
        "feature_dim": _feature_dim(shapes, options, channels[2]),
        "embed_channels": channels,
        "pos_dim": _shape(shapes, f"{first}0.self_attn_weights.linear_pos.weight")[1],
        "causal": causal,
        "output_downsampling": factor,
        "left_context_frames": left,
        "stacks": stacks,
    }


def _stack(shapes: Shapes, options: Options, index: int, count: int) -> dict[str, Any]:
    prefix = _prefix(shapes, index)
    layer = f"{prefix}0."
    kernel = shapes.get(f"{layer}conv_module1.depthwise_conv.chunkwise_conv.weight") or _shape(
        shapes, f"{layer}conv_module1.depthwise_conv.weight"
    )
    seen = {
        "num_encoder_layers": _count(shapes, prefix),
        "downsampling_factor": shapes.get(f"encoder.encoders.{index}.downsample.bias", (1,))[0],
        "encoder_dim": _shape(shapes, f"{layer}norm.bias")[0],
        "feedforward_dim": _shape(shapes, f"{layer}feed_forward2.in_proj.weight")[0],
        "cnn_module_kernel": kernel[-1],
        **_heads(shapes, options, index, count, layer),
    }
    for key, value in seen.items():
        _agree(options, f"{key} of stack {index}", options.stack(key, index, count), value)
    names = {
        "num_encoder_layers": "num_layers",
        "downsampling_factor": "downsampling",
        "encoder_dim": "dim",
        "cnn_module_kernel": "conv_kernel",
    }
    return {names.get(key, key): value for key, value in seen.items()}


def _heads(shapes: Shapes, options: Options, index: int, count: int, layer: str) -> dict[str, int]:
    """Number of heads and their widths, of which the shapes show three products."""
    position = _shape(shapes, f"{layer}self_attn_weights.linear_pos.weight")[0]
    scores = _shape(shapes, f"{layer}self_attn_weights.in_proj.weight")[0]
    values = _shape(shapes, f"{layer}self_attn1.in_proj.weight")[0]
    stated = {key: options.stack(key, index, count) for key in _HEAD_DIMS}
    heads = options.stack("num_heads", index, count)
    known = heads is not None
    if heads is None:
        heads = position // (stated["pos_head_dim"] or _HEAD_DIMS["pos_head_dim"])
    if heads < 1 or position % heads or values % heads or (scores - position) % (2 * heads):
        raise CheckpointError(
            f"{options.source}: stack {index} cannot have {heads} heads: its attention has {position} position, "
            f"{scores - position} query and key, and {values} value channels. "
            f"{'num_heads is wrong.' if known else _STATE_HEADS}"
        )
    found = {
        "query_head_dim": (scores - position) // (2 * heads),
        "value_head_dim": values // heads,
        "pos_head_dim": position // heads,
    }
    if not known and found != {key: stated[key] or default for key, default in _HEAD_DIMS.items()}:
        raise CheckpointError(
            f"{options.source}: the number of heads of stack {index} cannot be told from the weights: with icefall's "
            f"usual {_HEAD_DIMS} the shapes give {heads} heads with {found}. {_STATE_HEADS}"
        )
    return {"num_heads": heads, **found}


_STATE_HEADS = (
    "State num_heads (and where they differ from icefall's, query_head_dim, value_head_dim, pos_head_dim) in "
    "zipformer.yaml beside the weights, for instance 'num_heads: 4,4,4,8,4,4'."
)


def _feature_dim(shapes: Shapes, options: Options, channels: int) -> int:
    bins = _shape(shapes, "encoder_embed.out.weight")[1] // channels
    dim = options.values.get("feature_dim", 80)
    if ((dim - 1) // 2 - 1) // 2 != bins:
        raise CheckpointError(
            f"{options.source}: the front-end has {bins} frequency bins, which feature_dim {dim} does not give. "
            "State feature_dim in zipformer.yaml beside the weights."
        )
    return int(dim)


def _agree(options: Options, key: str, stated: Any, seen: Any) -> None:
    if stated is not None and stated != seen:
        raise CheckpointError(
            f"{options.source}: {key} is stated as {stated!r}, but the weights have {seen!r}: they do not belong "
            "together."
        )


def _prefix(shapes: Shapes, index: int) -> str:
    """``encoder.encoders.0.layers.``, or what a downsampled stack has."""
    plain = f"encoder.encoders.{index}.layers."
    return plain if any(name.startswith(plain) for name in shapes) else f"encoder.encoders.{index}.encoder.layers."


def _count(shapes: Shapes, prefix: str) -> int:
    """How many numbered parts there are behind ``prefix``."""
    numbers = {name[len(prefix) :].split(".", 1)[0] for name in shapes if name.startswith(prefix)}
    return len([number for number in numbers if number.isdigit()])


def _shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes or not shapes[name]:
        raise CheckpointError(f"the checkpoint lacks {name}, which every Zipformer2 has: it is damaged or incomplete.")
    return shapes[name]
