"""EngineConfig: one flat object, composed of the options classes of the components that read them.

Torch-free. A field that the engine does not serve yet exists, is validated, and is refused by name when it is set to
a value that would need the missing machinery; nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from oasr_core.cache.options import CacheOptions
from oasr_core.checkpoints.options import CheckpointOptions
from oasr_core.decoding.options import DecodeOptions, EndpointOptions
from oasr_core.errors import ConfigError, did_you_mean
from oasr_core.executors.options import ExecutorOptions
from oasr_core.frontend.options import FeatureConfig, FeatureOptions
from oasr_core.graphs.options import GraphOptions
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.streaming.options import StreamingOptions

ServiceMode = Literal["mixed", "streaming", "offline"]
Origin = Literal["default", "checkpoint", "file", "flag"]

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
_DECODER_TYPES = {"ctc_cuda": "ctc", "ctc_wfst": "ctc_wfst"}


class RuntimeOptions(BaseModel):
    """Where and in which precision the engine runs, and which requests it takes."""

    device: str = Field("auto", description="auto (CUDA where there is one, else CPU), cpu, cuda, cuda:N.")
    dtype: str = Field(
        "auto", description="auto (bf16 where the device has matrix units for it), float32, bfloat16, float16."
    )
    quantization: str | dict[str, Any] | None = Field(
        None, description="Quantization scheme; None follows the checkpoint."
    )
    service_mode: ServiceMode = Field("mixed", description="mixed serves both pools; streaming and offline pin one.")

    @field_validator("device", mode="before")
    @classmethod
    def _device_name(cls, value: object) -> str:
        return str(value)

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: object) -> str:
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise ValueError(f"unknown dtype {name!r}; allowed: {', '.join(_DTYPES)}.{did_you_mean(name, _DTYPES)}")
        return _DTYPES[name]


class LongFormOptions(BaseModel):
    """How audio longer than a fixed window is cut."""

    long_form: bool = Field(False, description="Cut over-long requests into windows and stitch one output.")
    long_form_overlap_seconds: float = Field(
        1.0, ge=0, description="Audio shared by neighbouring windows of the overlap segmenter."
    )
    long_form_mode: Literal["parallel", "sequential", "auto"] = Field(
        "parallel",
        description="parallel cuts at once and decodes windows together; sequential begins each window where the last "
        "one's timestamps end; auto is sequential where the decode family writes timestamps and no segmenter is set.",
    )
    condition_on_previous_text: bool = Field(
        True, description="Sequential windows are given the text before them; False makes each stand alone."
    )
    segmenter: str | None = Field(
        None, description="A name on the segmenters axis; None: overlap, where long audio has to be cut."
    )
    segmenter_options: dict[str, Any] = Field(default_factory=dict, description="Options of that segmenter.")
    silence_gate: str = Field(
        "auto",
        description="Audio without speech ends empty, undecoded: auto (signal, for families that invent text), off, "
        "signal, or a segmenter's name.",
    )
    output_transforms: list[str] = Field(default_factory=list, description="Output transforms, in order.")


COMPONENTS: tuple[type[BaseModel], ...] = (
    CheckpointOptions,
    RuntimeOptions,
    StreamingOptions,
    BatchingOptions,
    CacheOptions,
    FeatureOptions,
    DecodeOptions,
    EndpointOptions,
    ExecutorOptions,
    GraphOptions,
    LongFormOptions,
)

#: Field -> what has to come before any value but the default can be served.
NOT_SERVED: Mapping[str, str] = {
    "quantization": "quantization schemes",
    "overlap_partial_readback": "late read-back of partials",
    "streaming_graph_cache_growth": "graph capture",
    "streaming_graph_batch_ladder": "graph capture",
    "streaming_graph_pad_batch": "graph capture",
    "streaming_graph_max_shapes": "graph capture",
    "offline_graph_batch_buckets": "graph capture",
    "offline_graph_frame_granularity": "graph capture",
    "offline_graph_max_frames": "graph capture",
    "offline_graph_max_captures": "graph capture",
    "feature_graph_batch_buckets": "graph capture",
    "output_transforms": "output transforms",
}

#: Fields that overlap host and device work where there is a device; the engine says so where one is set explicitly.
NO_EFFECT_YET = frozenset(
    {"offline_decode_overlap", "offline_collate_prefetch", "streaming_feature_lookahead", "use_offline_cuda_graphs"}
)

_Options = TypeVar("_Options", bound=BaseModel)


class EngineConfig(
    CheckpointOptions,
    RuntimeOptions,
    StreamingOptions,
    BatchingOptions,
    CacheOptions,
    FeatureOptions,
    DecodeOptions,
    EndpointOptions,
    ExecutorOptions,
    GraphOptions,
    LongFormOptions,
):
    """Every knob of the engine, flat. ``docs/config.md`` lists all of them with their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error

    @field_validator("ckpt_dir", mode="before")
    @classmethod
    def _path_text(cls, value: object) -> str:
        return str(value)

    @field_validator("preferred_batch_size", "streaming_graph_batch_ladder", "offline_graph_batch_buckets")
    @classmethod
    def _positive_sizes(cls, sizes: list[int] | None) -> list[int] | None:
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise ValueError(f"needs at least one size, each 1 or more; got {sizes}")
        return sizes

    @field_validator("ctc_decoder_config", "wfst_decoder_config", mode="before")
    @classmethod
    def _as_mapping(cls, value: object) -> object:
        return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value

    @model_validator(mode="before")
    @classmethod
    def _translate_aliases(cls, values: Any) -> Any:
        return _decode_aliases(dict(values)) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> EngineConfig:
        sizes = [size for size in self.preferred_batch_size or [] if size > self.max_batch_size]
        if sizes:
            raise ValueError(
                f"preferred_batch_size {sizes} cannot be reached with max_batch_size={self.max_batch_size}."
            )
        if self.enable_sequence_packing and self.partition_policy not in ("auto", "packing"):
            raise ValueError(
                f"enable_sequence_packing contradicts partition_policy={self.partition_policy!r}; set one of them."
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> EngineConfig:
        for name, missing in NOT_SERVED.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name}={value!r} is not served by this version yet ({missing}); leave it unset.")
        return self

    def options(self, cls: type[_Options]) -> _Options:
        """The part of the configuration that one component reads, with what was set explicitly kept."""
        return cls.model_construct(
            _fields_set=self.model_fields_set & set(cls.model_fields),
            **{name: getattr(self, name) for name in cls.model_fields},
        )

    def replace(self, **values: Any) -> EngineConfig:
        """A copy with some fields set."""
        return type(self)(**{**self.model_dump(exclude_unset=True), **values})

    # Derived properties of a centred 4x subsampling front-end (seed, section 6). An encoder whose front-end they do not
    # describe answers through ``BaseEncoder.chunk_geometry``, which is what the engine uses.

    @property
    def subsampling_rate(self) -> int:
        """Feature frames per encoder frame of a ``Conv2dSubsampling`` by 4."""
        return 4

    @property
    def right_context(self) -> int:
        """Feature frames that an encoder frame sees beyond its own first."""
        return 6

    @property
    def decoding_window(self) -> int:
        """Feature frames per chunk."""
        return (self.chunk_size - 1) * self.subsampling_rate + self.right_context + 1

    @property
    def stride(self) -> int:
        """Feature frames that the cursor advances per chunk."""
        return self.subsampling_rate * self.chunk_size

    @property
    def required_cache_size(self) -> int:
        """Encoder frames of left context in dense mode; negative is unlimited."""
        return self.chunk_size * self.num_left_chunks


def _check_composition() -> None:
    """A field name used by two options classes is an error at import."""
    owners: dict[str, type[BaseModel]] = {}
    for component in COMPONENTS:
        for name in component.model_fields:
            if name in owners:
                raise TypeError(f"option {name!r} is declared by {owners[name].__name__} and {component.__name__}")
            owners[name] = component


_check_composition()


def owner_of(field: str) -> type[BaseModel]:
    """The options class that declares ``field``."""
    return next(component for component in COMPONENTS if field in component.model_fields)


def _decode_aliases(values: dict[str, Any]) -> dict[str, Any]:
    """Translate the per-family fields of the manual to ``decode_method`` and ``decode_options``."""
    decoder_type = values.get("decoder_type")
    if decoder_type is not None:
        if decoder_type not in _DECODER_TYPES:
            raise ValueError(
                f"decoder_type={decoder_type!r} is unknown; allowed: {', '.join(_DECODER_TYPES)}, or set decode_method."
            )
        method = _DECODER_TYPES[decoder_type]
        if values.get("decode_method", method) != method:
            raise ValueError(f"decoder_type={decoder_type!r} contradicts decode_method={values['decode_method']!r}.")
        values["decode_method"] = method
    options = values.get("decode_options")
    if options is not None and not isinstance(options, Mapping):
        return values  # the field's own check refuses it
    merged: dict[str, Any] = dict(options or {})
    for alias in ("ctc_decoder_config", "wfst_decoder_config", "fst_path"):
        given = values.get(alias)
        if given is None or (alias != "fst_path" and not isinstance(given, Mapping | BaseModel)):
            continue
        wfst = alias != "ctc_decoder_config"
        method = values.setdefault("decode_method", "ctc_wfst" if alias == "wfst_decoder_config" else "ctc")
        if wfst != (method == "ctc_wfst"):
            reader = "decode_method='ctc_wfst' only" if wfst else "the other CTC methods"
            raise ValueError(f"{alias} is read by {reader}, not by {method!r}; set that, or leave {alias} unset.")
        if isinstance(given, BaseModel):
            given = given.model_dump(exclude_unset=True)
        merged = {**({alias: given} if alias == "fst_path" else dict(given)), **merged}
    if merged:
        values["decode_options"] = merged
    return values


def _explain(error: ValidationError) -> str:
    """All findings of a validation in one readable message."""
    lines = []
    for finding in error.errors():
        name = ".".join(str(part) for part in finding["loc"])
        if finding["type"] == "extra_forbidden":
            known = FeatureConfig.model_fields if name.startswith("feature_config.") else EngineConfig.model_fields
            hint = did_you_mean(name.rsplit(".", 1)[-1], known)
            lines.append(f"unknown option {name!r}.{hint or ' What a decode method reads goes into decode_options.'}")
        elif name:
            lines.append(f"{name}: {finding['msg'].removeprefix('Value error, ')} (got {finding['input']!r})")
        else:
            lines.append(finding["msg"].removeprefix("Value error, "))
    return "invalid engine configuration: " + "; ".join(lines) + " (docs/config.md lists every option)"


def resolve_config(
    file: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
) -> tuple[EngineConfig, dict[str, Origin]]:
    """Rank the sources (default < checkpoint < file < flag) and say where each value comes from."""
    layers: tuple[tuple[Origin, Mapping[str, Any] | None], ...] = (
        ("checkpoint", checkpoint),
        ("file", file),
        ("flag", flags),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(EngineConfig.model_fields, "default")
    for origin, layer in layers:
        for name, value in (layer or {}).items():
            values[name] = value
            if name in origins:
                origins[name] = origin
    config = EngineConfig(**values)
    for name in ("decode_method", "decode_options"):
        aliases = ("decoder_type", "ctc_decoder_config", "wfst_decoder_config", "fst_path")
        if origins[name] == "default" and name in config.model_fields_set:
            origins[name] = next((origins[alias] for alias in aliases if origins[alias] != "default"), "default")
    return config, origins
