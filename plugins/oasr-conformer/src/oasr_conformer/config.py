"""The network configuration of the ``conformer`` architecture (torch-free, JSON types)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oasr_core.errors import CheckpointError, did_you_mean


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EncoderConfig(_Config):
    """The encoder; defaults are WeNet's own for keys that a training configuration leaves out."""

    kind: Literal["conformer", "transformer"] = "conformer"
    output_size: int = Field(256, gt=0)
    attention_heads: int = Field(4, gt=0)
    linear_units: int = Field(2048, gt=0)
    num_blocks: int = Field(6, gt=0)
    input_layer: Literal["conv2d", "conv2d6", "conv2d8", "linear"] = "conv2d"
    positions: Literal["rel_pos", "abs_pos", "no_pos"] = "rel_pos"
    relative_attention: bool = Field(True, description="Keys carry a projected absolute position and two biases.")
    activation: Literal["swish", "relu", "gelu"] = "swish"
    macaron: bool = True
    conv_module: bool = True
    conv_kernel: int = Field(15, gt=0)
    conv_causal: bool = False
    conv_norm: Literal["layer_norm", "batch_norm"] = "batch_norm"
    dynamic_chunk: bool = False
    static_chunk_size: int = Field(0, ge=0, description="Encoder frames of the mask that is always used; 0 for none.")
    final_norm: bool = True
    query_bias: bool = True
    key_bias: bool = True
    value_bias: bool = True
    norm_eps: float = Field(1e-5, gt=0)
    conv_norm_eps: float = Field(1e-5, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> EncoderConfig:
        if self.output_size % self.attention_heads:
            raise ValueError(f"output_size {self.output_size} is no multiple of attention_heads {self.attention_heads}")
        if self.kind == "transformer" and (self.macaron or self.conv_module):
            raise ValueError("kind 'transformer' has neither a macaron feed forward nor a convolution module")
        if self.conv_module and not self.conv_causal and self.conv_kernel % 2 == 0:
            raise ValueError(f"conv_kernel {self.conv_kernel} is even, which only a causal convolution can have")
        return self

    @property
    def streams(self) -> bool:
        """Whether the weights were trained to see no further than a chunk."""
        chunked = self.dynamic_chunk or self.static_chunk_size > 0
        return chunked and (self.conv_causal or not self.conv_module)


class DecoderConfig(_Config):
    """The attention decoder(s): ``bitransformer`` adds one that runs from right to left."""

    kind: Literal["transformer", "bitransformer"] = "transformer"
    attention_heads: int = Field(4, gt=0)
    linear_units: int = Field(2048, gt=0)
    num_blocks: int = Field(6, gt=0)
    reverse_num_blocks: int = Field(0, ge=0)
    activation: Literal["swish", "relu", "gelu"] = "relu"
    norm_eps: float = Field(1e-5, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> DecoderConfig:
        if (self.kind == "bitransformer") != (self.reverse_num_blocks > 0):
            raise ValueError(f"kind {self.kind!r} does not go with reverse_num_blocks {self.reverse_num_blocks}")
        return self


class ConformerConfig(_Config):
    """Everything that :meth:`oasr_conformer.model.ConformerModel.from_config` needs."""

    input_dim: int = Field(80, gt=0, description="Feature dimension.")
    vocab_size: int = Field(gt=1)
    cmvn: bool = Field(False, description="Global mean and variance normalisation inside the encoder.")
    blank_id: int = Field(0, ge=0)
    sos_id: int = Field(ge=0)
    eos_id: int = Field(ge=0)
    reverse_weight: float = Field(0.0, ge=0, le=1, description="Trained weight of the right-to-left decoder.")
    encoder: EncoderConfig = EncoderConfig()
    decoder: DecoderConfig | None = None

    @model_validator(mode="after")
    def _fits(self) -> ConformerConfig:
        for name in ("blank_id", "sos_id", "eos_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is not below vocab_size {self.vocab_size}")
        if self.decoder is not None and self.encoder.output_size % self.decoder.attention_heads:
            raise ValueError(
                f"encoder output_size {self.encoder.output_size} is no multiple of the decoder's "
                f"attention_heads {self.decoder.attention_heads}"
            )
        return self

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str = "the bundle's config") -> ConformerConfig:
        """Validate a bundle's ``config``; raises ``CheckpointError`` naming the key, its value and what is allowed."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise CheckpointError(f"conformer: {source} is not usable. {_describe(error)}") from error


_PARTS: Mapping[str, type[BaseModel]] = {"encoder": EncoderConfig, "decoder": DecoderConfig}


def _describe(error: ValidationError) -> str:
    """One sentence per fault, with the nearest known name for an unknown key."""
    sentences = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"]]
        where = ".".join(path)
        if fault["type"] == "extra_forbidden":
            owner = _PARTS.get(path[0], ConformerConfig) if len(path) > 1 else ConformerConfig
            hint = did_you_mean(path[-1], owner.model_fields)
            sentences.append(f"Unknown key {where!r}.{hint}")
        else:
            given = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            sentences.append(f"{where + ': ' if where else ''}{fault['msg']}{given}.")
    return " ".join(sentences)
