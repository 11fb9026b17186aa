"""The network configuration of the ``zipformer`` architecture (torch-free, JSON types)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oasr_core.errors import CheckpointError, did_you_mean

#: Feature frames per frame of the front-end (50 Hz for frames of 10 ms).
EMBED_RATE = 2
#: Feature frames that one front-end frame sees before ConvNeXt.
EMBED_CONTEXT = 9
#: Frames that ConvNeXt's kernel of 7 reaches to either side.
CONVNEXT_REACH = 3


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StackConfig(_Config):
    """One stack of layers that share a frame rate and a width; defaults are icefall's."""

    num_layers: int = Field(gt=0)
    downsampling: int = Field(1, gt=0, description="Front-end frames per frame of the stack.")
    dim: int = Field(gt=0)
    feedforward_dim: int = Field(gt=0, description="Width of the second feed forward; the others have 3/4 and 5/4.")
    num_heads: int = Field(gt=0)
    query_head_dim: int = Field(32, gt=0)
    value_head_dim: int = Field(12, gt=0)
    pos_head_dim: int = Field(4, gt=0)
    conv_kernel: int = Field(31, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> StackConfig:
        if self.conv_kernel % 2 == 0:
            raise ValueError(f"conv_kernel {self.conv_kernel} is even; Zipformer2 has odd kernels")
        return self

    @property
    def nonlin_dim(self) -> int:
        """Hidden width of the non-linear attention."""
        return 3 * self.dim // 4

    @property
    def half_kernel(self) -> int:
        """Frames that the depthwise convolution reaches to one side."""
        return self.conv_kernel // 2


class EncoderConfig(_Config):
    """Front-end and stacks."""

    feature_dim: int = Field(80, gt=0)
    embed_channels: tuple[int, int, int] = (8, 32, 128)
    pos_dim: int = Field(48, gt=0, multiple_of=2)
    causal: bool = False
    output_downsampling: int = Field(2, gt=0, description="Front-end frames per output frame.")
    left_context_frames: int = Field(128, gt=0, description="Front-end frames that a stream's attention looks back on.")
    stacks: tuple[StackConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> EncoderConfig:
        if self.embed_width < 1:
            raise ValueError(f"feature_dim {self.feature_dim} is too small for the front-end")
        if self.causal:
            for index, stack in enumerate(self.stacks):
                if self.left_context_frames % stack.downsampling:
                    raise ValueError(
                        f"left_context_frames {self.left_context_frames} is no multiple of the downsampling "
                        f"{stack.downsampling} of stack {index}"
                    )
                if self.left_context_frames < stack.half_kernel * stack.downsampling:
                    raise ValueError(
                        f"left_context_frames {self.left_context_frames} is less than the convolution of stack {index} "
                        f"looks back ({stack.half_kernel} x {stack.downsampling})"
                    )
        return self

    @property
    def embed_width(self) -> int:
        """Frequency bins behind the front-end's convolutions."""
        return ((self.feature_dim - 1) // 2 - 1) // 2

    @property
    def output_dim(self) -> int:
        """Width of the encoder's output: that of the widest stack."""
        return max(stack.dim for stack in self.stacks)

    @property
    def frame_multiple(self) -> int:
        """Front-end frames that every stack and the output divide."""
        return math.lcm(self.output_downsampling, *(stack.downsampling for stack in self.stacks))


class TransducerConfig(_Config):
    """Stateless predictor and joiner."""

    decoder_dim: int = Field(512, gt=0)
    joiner_dim: int = Field(512, gt=0)
    context_size: int = Field(2, gt=0)


class ZipformerConfig(_Config):
    """Everything that :meth:`oasr_zipformer.model.ZipformerModel.from_config` needs."""

    vocab_size: int = Field(gt=1)
    blank_id: int = Field(0, ge=0)
    unk_id: int | None = Field(None, ge=0, description="Unit that advances a transducer like the blank does.")
    ctc: bool = True
    transducer: TransducerConfig | None = None
    encoder: EncoderConfig

    @model_validator(mode="after")
    def _fits(self) -> ZipformerConfig:
        if not self.ctc and self.transducer is None:
            raise ValueError("neither ctc nor transducer: nothing could decode")
        for name in ("blank_id", "unk_id"):
            value = getattr(self, name)
            if value is not None and value >= self.vocab_size:
                raise ValueError(f"{name} {value} is not below vocab_size {self.vocab_size}")
        return self

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str = "the bundle's config") -> ZipformerConfig:
        """Validate a bundle's ``config``; raises ``CheckpointError`` naming the key, its value and what is allowed."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise CheckpointError(f"zipformer: {source} is not usable. {_describe(error)}") from error


_PARTS: Mapping[str, type[BaseModel]] = {"encoder": EncoderConfig, "transducer": TransducerConfig}


def _describe(error: ValidationError) -> str:
    """One sentence per fault, with the nearest known name for an unknown key."""
    sentences = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"]]
        if fault["type"] == "extra_forbidden":
            owner: type[BaseModel] = _PARTS.get(path[0], ZipformerConfig) if len(path) > 1 else ZipformerConfig
            owner = StackConfig if "stacks" in path else owner
            hint = did_you_mean(path[-1], owner.model_fields)
            sentences.append(f"Unknown key {'.'.join(path)!r}.{hint}")
        else:
            given = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            sentences.append(f"{'.'.join(path) + ': ' if path else ''}{fault['msg']}{given}.")
    return " ".join(sentences)
