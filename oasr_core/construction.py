"""Build an engine's parts in order: checkpoint, weights, cast, move, tables, decoder, pools, executors."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from oasr_core.cache.options import CacheOptions
from oasr_core.checkpoints.bundle import CheckpointBundle, TokenizerSpec
from oasr_core.checkpoints.load import LoadReport, load_model
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.config import NO_EFFECT_YET, EngineConfig
from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Mode, StrategyOptions
from oasr_core.decoding.incremental import IncrementalStrategy
from oasr_core.decoding.options import DecodeOptions, EndpointOptions
from oasr_core.errors import ConfigError, RequestRefusedError, did_you_mean
from oasr_core.executors.incremental import IncrementalExecutor
from oasr_core.executors.offline import OfflineExecutor
from oasr_core.executors.streaming import StreamingExecutor
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.pinned import AudioBuffers
from oasr_core.graphs.backends import EagerBackend, GraphBackend
from oasr_core.graphs.options import GraphOptions
from oasr_core.longform.parallel import ParallelPlan
from oasr_core.longform.plan import LongFormPlan
from oasr_core.longform.sequential import SequentialPlan
from oasr_core.model_runner import ModelRunner
from oasr_core.models.base import BaseAsrModel, PagedKV
from oasr_core.outputs import OutputProcessor
from oasr_core.registry import active_plugins, registry
from oasr_core.request import DecodingOptions, Request
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import partition_name
from oasr_core.scheduling.scheduler import Scheduler
from oasr_core.segmenters.base import Segmenter
from oasr_core.segmenters.gate import SegmenterGate, SilenceGate
from oasr_core.streaming.options import StreamingOptions
from oasr_core.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from pydantic import BaseModel

logger = logging.getLogger(__name__)

#: Length of the offline probe forward where the frontend has no fixed window.
_PROBE_SECONDS = 30.0

_Options = TypeVar("_Options", bound="BaseModel")


@dataclass
class EngineParts:
    """Everything that an engine owns. ``no_streaming`` and ``no_offline`` say why a mode is not served."""

    config: EngineConfig
    bundle: CheckpointBundle
    load_report: LoadReport
    parameters: int
    device: torch.device
    dtype: torch.dtype
    inputs: InputProcessor
    runner: ModelRunner
    strategy: DecodeStrategy
    tokenizer: Tokenizer
    outputs: OutputProcessor
    scheduler: Scheduler
    offline: OfflineExecutor | None
    incremental: IncrementalExecutor | None
    streaming: StreamingExecutor | None
    audio_buffers: AudioBuffers
    segmenter: Segmenter | None = None
    no_streaming: str = ""
    no_offline: str = ""

    @property
    def frame_seconds(self) -> float:
        """Seconds per encoder frame."""
        return self.inputs.frontend.frame_seconds * self.runner.encoder.subsampling_rate

    def cost(self, num_frames: int) -> int:
        """What batching compares: a fixed-window frontend makes every request as long as its window."""
        window = self.inputs.frontend.window_seconds
        return num_frames if window is None else round(window / self.inputs.frontend.frame_seconds)

    @cached_property
    def max_samples(self) -> int | None:
        """Samples that one forward can take, ``None`` without a limit."""
        window, rate = self.inputs.frontend.window_seconds, self.inputs.frontend.sample_rate
        limit = self.runner.encoder.max_positions
        if window is not None:
            longest = int(window * rate)
        elif limit is not None:
            longest = int(2 * limit * self.frame_seconds * rate)
        else:
            return None
        if limit is None:
            return longest
        return bisect_right(range(longest + 1), limit, key=self._encoder_frames) - 1

    def _encoder_frames(self, samples: int) -> int:
        return self.runner.encoder.output_frames(self.inputs.num_frames(samples))

    def stamp(self, request: Request, samples: Tensor) -> None:
        """Put whole audio on a request, with what scheduling wants to know of it."""
        request.num_samples = len(samples)
        request.num_frames = self.inputs.num_frames(len(samples))
        request.cost = self.cost(request.num_frames)
        request.audio_final = True
        if request.streaming:
            request.audio_chunks.append(samples)
        else:
            request.audio = samples

    def is_long(self, request: Request) -> bool:
        """Whether a request is decoded in windows; in sequential mode the model's timestamps decide how many."""
        limit = self.max_samples
        if request.streaming or not self.config.long_form or limit is None or not request.num_samples:
            return False
        return self.config.long_form_mode == "sequential" or request.num_samples > limit

    def plan_long(self, waveform: Tensor, options: DecodingOptions) -> LongFormPlan:
        """How a long request is cut."""
        limit = self.max_samples
        if limit is None:
            raise ConfigError("this model has no window to cut audio for")
        samples, rate = len(waveform), self.inputs.frontend.sample_rate
        if self.config.long_form_mode == "sequential":
            return SequentialPlan(
                samples,
                rate,
                self.outputs.tokenizer,
                window_samples=limit,
                decoding=options,
                condition_on_previous_text=self.config.condition_on_previous_text,
            )
        if self.segmenter is None:
            raise ConfigError("long audio is to be cut and there is no segmenter")
        windows = self.segmenter.windows(waveform, limit)
        return ParallelPlan(windows, samples, rate, self.outputs.tokenizer, max_in_flight=self.config.max_batch_size)

    def stride_samples(self) -> int:
        """Samples per encoder stride."""
        if self.runner.backend is None:
            raise ConfigError(f"this engine does not stream: {self.no_streaming}")
        frames = self.runner.backend.geometry.stride
        return round(frames * self.inputs.frontend.frame_seconds * self.inputs.frontend.sample_rate)

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse, by name, request options that the strategy does not honour."""
        always = {"n_best", "extra", "endpointing"}
        for name in options.model_fields_set - always - self.strategy.honours:
            if getattr(options, name) != type(options).model_fields[name].get_default(call_default_factory=True):
                raise RequestRefusedError(
                    f"decode method {self.config.decode_method!r} does not honour {name}={getattr(options, name)!r}; "
                    f"it honours: {', '.join(sorted(self.strategy.honours | always))}."
                )
        if mode == "offline" and options.endpointing:
            raise RequestRefusedError("endpointing=True is for streams; an offline request is one segment")
        try:
            self.strategy.request_options_cls.model_validate(options.extra)
        except ValidationError as error:
            raise RequestRefusedError(f"extra options of this request: {error}") from error
        self.strategy.validate(options, mode)

    def describe(self) -> dict[str, Any]:
        """Facts in plain types, for the CLI and for bug reports."""
        geometry = self.runner.backend.geometry if self.runner.backend is not None else None
        encoder = self.runner.encoder
        return {
            "model": self.bundle.source,
            "architecture": self.bundle.architecture,
            "converter": self.bundle.converter,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "sample_rate": self.inputs.frontend.sample_rate,
            "vocab_size": self.runner.model.vocab_size,
            "parameters": self.parameters,
            "decode_method": self.config.decode_method,
            "honours": sorted(self.strategy.honours),
            "modes": [
                name
                for name, part in (("offline", self.offline or self.incremental), ("streaming", self.streaming))
                if part
            ],
            "streaming_kind": encoder.streaming_kind,
            "chunk_ms": None if geometry is None else round(geometry.output_frames * self.frame_seconds * 1000),
            "num_left_chunks": self.config.num_left_chunks,
            "max_batch_size": self.config.max_batch_size,
        }


def build_parts(config: EngineConfig) -> EngineParts:
    """Everything from a configuration; each refusal names what would have to change."""
    if not config.ckpt_dir:
        raise ConfigError("ckpt_dir is empty: name a checkpoint directory, a pretrained model, or a Hub id.")
    bundle = resolve_checkpoint(
        config.ckpt_dir, architecture=config.architecture, checkpoint_name=config.checkpoint_name
    )
    config = config.replace(**adopted_values(config, bundle))
    strategy_cls = registry("decode_strategies").get(config.decode_method)
    config = _resolved_long_form(config, strategy_cls)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    frontend = build_frontend(config, bundle)
    tokenizer = build_tokenizer(config, bundle)
    options = parse_options(strategy_cls.options_cls, config.decode_options, f"decode_method {config.decode_method!r}")
    model, report = load_model(bundle)
    registry("models").check_part(bundle.architecture, "encoder", model.encoder)
    _check_interfaces(model, strategy_cls, config.decode_method)
    _check_features(frontend, model, bundle)
    _check_left_context(config, model, bundle)
    parameters = sum(bundle.state_dict[name].numel() for name in report.mapped)
    bundle.state_dict = {}  # the model has its own copy after the cast
    model.eval().requires_grad_(False).to(dtype).to(device)
    model.prepare()
    graphs = build_graphs(config.options(GraphOptions), device)
    runner = ModelRunner(model, strategy_cls.consumes, graphs, device, dtype)
    strategy = build_strategy(config, strategy_cls, options, runner, tokenizer, frontend)
    inputs = InputProcessor(frontend, device)
    frame_seconds = frontend.frame_seconds * model.encoder.subsampling_rate
    outputs = OutputProcessor(strategy.output_tokenizer, frame_seconds, hold_unstable=config.hold_unstable_partials)
    batching = config.options(BatchingOptions)
    scheduler = Scheduler(
        batching,
        registry("batching_policies").get(batching.schedule_policy)(),
        registry("partition_policies").get(partition_name(batching))(),
        admit_window=config.decode_admit_window_ms / 1000.0 if isinstance(strategy, IncrementalStrategy) else 0.0,
    )
    no_streaming, no_offline = _refusals(config, model, frontend, strategy)
    segmenter = build_segmenter(config, frontend)
    gate = build_gate(config, strategy_cls, segmenter, frontend)
    offline = incremental = None
    if not no_offline and isinstance(strategy, IncrementalStrategy):
        incremental = IncrementalExecutor(
            inputs,
            runner,
            strategy,
            outputs,
            scheduler,
            config.options(DecodeOptions),
            max_slots=config.max_decode_slots or config.max_batch_size,
            partial_interval=config.partial_decode_interval,
            gate=gate,
        )
    elif not no_offline:
        offline = OfflineExecutor(inputs, runner, strategy, outputs, scheduler, gate=gate)
    streaming = None
    if not no_streaming:
        listener = segmenter if config.endpoint_silence == "segmenter" else None
        streaming = build_streaming(
            config, inputs, runner, strategy, outputs, offline=offline is not None, segmenter=listener
        )
    buffers = AudioBuffers(
        device, frontend.sample_rate, config.max_pinned_audio_seconds, config.max_pinned_audio_total_seconds
    )
    parts = EngineParts(
        config=config,
        bundle=bundle,
        load_report=report,
        parameters=parameters,
        device=device,
        dtype=dtype,
        inputs=inputs,
        runner=runner,
        strategy=strategy,
        tokenizer=tokenizer,
        outputs=outputs,
        scheduler=scheduler,
        offline=offline,
        incremental=incremental,
        streaming=streaming,
        audio_buffers=buffers,
        segmenter=segmenter,
        no_streaming=no_streaming,
        no_offline=no_offline,
    )
    logger.info("engine: %s", parts.describe())
    for name in sorted(NO_EFFECT_YET & config.model_fields_set):
        logger.warning("%s=%r is accepted and has no effect in this version", name, getattr(config, name))
    for plugin in active_plugins():
        logger.info("plugin: %s", plugin)
    return parts


def build_strategy(
    config: EngineConfig,
    strategy_cls: type[DecodeStrategy],
    options: StrategyOptions,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    frontend: FeatureFrontend,
) -> DecodeStrategy:
    """The decode strategy; one that keeps requests in flight is told how many, and the bytes that they may take."""
    context = DecodeContext(runner.model, tokenizer, options, runner.device, runner.dtype)
    if issubclass(strategy_cls, IncrementalStrategy):
        context.max_slots = config.max_decode_slots or config.max_batch_size
        budget = config.decode_kv_budget_gib
        if budget is None:
            frames = round((frontend.window_seconds or _PROBE_SECONDS) / frontend.frame_seconds)
            context.kv_budget_bytes = runner.available_bytes(
                config.options(CacheOptions), frames, config.max_batch_size
            )
            context.kv_budget_derived = True
        elif budget > 0:
            context.kv_budget_bytes = int(budget * 2**30)
    return strategy_cls(context)


def build_segmenter(config: EngineConfig, frontend: FeatureFrontend) -> Segmenter | None:
    """The configured segmenter; ``overlap`` where long audio is to be cut and none is named."""
    if config.segmenter is None:
        if config.segmenter_options:
            raise ConfigError(f"segmenter_options={config.segmenter_options!r} without a segmenter; name it.")
        if config.endpoint_silence == "segmenter":
            raise ConfigError("endpoint_silence='segmenter' needs a segmenter; set segmenter, for example to 'vad'.")
        if not config.long_form:
            return None
    name, options = config.segmenter or "overlap", dict(config.segmenter_options)
    if name == "overlap":
        options.setdefault("overlap_seconds", config.long_form_overlap_seconds)
    elif "long_form_overlap_seconds" in config.model_fields_set:
        raise ConfigError(f"long_form_overlap_seconds is read by segmenter 'overlap', not by {name!r}.")
    cls: type[Segmenter] = registry("segmenters").get(name)
    segmenter = cls.from_options(options, frontend.sample_rate)
    if config.endpoint_silence == "segmenter" and not segmenter.offers_streams:
        raise ConfigError(f"endpoint_silence='segmenter': segmenter {name!r} does not follow streams.")
    return segmenter


def build_gate(
    config: EngineConfig, strategy: type[DecodeStrategy], segmenter: Segmenter | None, frontend: FeatureFrontend
) -> SilenceGate | None:
    """What keeps audio without speech away from the decoder, if anything does."""
    name = config.silence_gate
    if name == "off" or (name == "auto" and not strategy.invents_text):
        return None
    if name in ("auto", "signal"):
        return SilenceGate()
    if segmenter is not None and name == config.segmenter:
        return SegmenterGate(segmenter)
    cls: type[Segmenter] = registry("segmenters").get(name)
    return SegmenterGate(cls.from_options({}, frontend.sample_rate))


def build_streaming(
    config: EngineConfig,
    inputs: InputProcessor,
    runner: ModelRunner,
    strategy: DecodeStrategy,
    outputs: OutputProcessor,
    *,
    offline: bool,
    segmenter: Segmenter | None = None,
) -> StreamingExecutor:
    """State store, backend and executor of the streams; ``offline``: the memory probe allows for offline forwards.

    ``segmenter``: its silence ends segments, in place of the decoder's.
    """
    settings, frontend = config.options(StreamingOptions), inputs.frontend
    probe_frames = None
    if offline:
        probe_frames = round((frontend.window_seconds or _PROBE_SECONDS) / frontend.frame_seconds)
    backend = runner.enable_streaming(
        settings, config.options(CacheOptions), config.max_batch_size, probe_frames=probe_frames
    )
    return StreamingExecutor(
        inputs,
        runner,
        backend,
        strategy,
        outputs,
        endpointing=config.options(EndpointOptions),
        segmenter=segmenter,
        partial_interval=settings.partial_decode_interval,
    )


def adopted_values(config: EngineConfig, bundle: CheckpointBundle) -> dict[str, Any]:
    """What the checkpoint says about options that were not set explicitly."""
    offered: dict[str, Any] = {
        "audio_scale": bundle.feature.audio_scale,
        "decode_method": bundle.decoding.decode_method,
        "chunk_size": bundle.decoding.chunk_size,
        "num_left_chunks": bundle.decoding.num_left_chunks,
    }
    adopted = {
        name: value for name, value in offered.items() if value is not None and name not in config.model_fields_set
    }
    method = adopted.get("decode_method", config.decode_method)
    if bundle.decoding.options and bundle.decoding.decode_method == method:
        adopted["decode_options"] = {**bundle.decoding.options, **config.decode_options}
    return adopted


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one; a device that was asked for and is missing is an error."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a device; allowed: auto, cpu, cuda, cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} was asked for and CUDA is not available; set device='cpu' or 'auto'.")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where the device multiplies it in matrix units, else fp32; the choice is logged."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device)[0] >= 8
    else:
        native = device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())
    dtype = torch.bfloat16 if native else torch.float32
    logger.info("dtype=auto: %s on %s", dtype, device)
    return dtype


def build_graphs(options: GraphOptions, device: torch.device) -> GraphBackend:
    """``auto`` runs eagerly everywhere; on CUDA, where graphs would be wanted, that is said."""
    if options.graph_backend != "auto":
        named: GraphBackend = registry("graph_backends").get(options.graph_backend)()
        return named
    if device.type == "cuda" and options.use_cuda_graphs:
        logger.warning("use_cuda_graphs: this version captures no CUDA graphs; every forward runs eagerly")
    return EagerBackend()


def build_frontend(config: EngineConfig, bundle: CheckpointBundle) -> FeatureFrontend:
    """The checkpoint's frontend; an explicit ``feature_config`` overrides it, loudly where it differs."""
    frontend_cls: type[FeatureFrontend] = registry("frontends").get(bundle.feature.kind)
    trained = parse_options(frontend_cls.options_cls, bundle.feature.options, f"frontend {bundle.feature.kind!r}")
    if config.feature_config is None:
        return frontend_cls(trained, config.audio_scale)
    given = config.feature_config
    changed = [
        f"{name}: trained {getattr(trained, name)!r}, set {getattr(given, name)!r}"
        for name in type(given).model_fields
        if getattr(trained, name, None) != getattr(given, name)
    ]
    if changed:
        logger.warning("feature_config overrides the features that the model was trained on: %s", "; ".join(changed))
    return frontend_cls(
        parse_options(frontend_cls.options_cls, given.model_dump(), "feature_config"), config.audio_scale
    )


def build_tokenizer(config: EngineConfig, bundle: CheckpointBundle) -> Tokenizer:
    """The checkpoint's tokenizer, or the one that ``unit_table`` or ``sentencepiece_model`` names."""
    spec = bundle.tokenizer
    if config.unit_table is not None:
        spec = TokenizerSpec("symbol_table", {**spec.files, "symbols": Path(config.unit_table)}, spec.options)
    if config.sentencepiece_model is not None:
        # Where a symbol table maps ids to pieces, the model only encodes: its own ids are others.
        role = "sentencepiece" if "symbols" in spec.files else "model"
        kind = spec.kind if "symbols" in spec.files else "sentencepiece"
        spec = TokenizerSpec(kind, {**spec.files, role: Path(config.sentencepiece_model)}, spec.options)
    tokenizer: Tokenizer = registry("tokenizers").get(spec.kind).from_spec(spec)
    return tokenizer


def parse_options(cls: type[_Options], values: Any, owner: str) -> _Options:
    """Validate a mapping against an options class; unknown keys are refused with the known ones."""
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for finding in error.errors():
            name = ".".join(str(part) for part in finding["loc"])
            if finding["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields) or "none"
                lines.append(f"unknown option {name!r}; known: {known}.{did_you_mean(name, cls.model_fields)}")
            else:
                lines.append(f"{name}: {finding['msg'].removeprefix('Value error, ')} (got {finding['input']!r})")
        raise ConfigError(f"{owner}: " + "; ".join(lines)) from error


def _resolved_long_form(config: EngineConfig, strategy: type[DecodeStrategy]) -> EngineConfig:
    """``auto`` becomes a mode; windows that follow timestamps need a family that writes them."""
    writes = "segment_timestamps" in strategy.honours
    if config.long_form_mode == "auto":
        return config.replace(long_form_mode="sequential" if writes else "parallel")
    if config.long_form and config.long_form_mode == "sequential" and not writes:
        raise ConfigError(
            f"long_form_mode='sequential' needs timestamps that decode_method={config.decode_method!r} does not write; "
            "use 'parallel'."
        )
    return config


def _check_features(frontend: FeatureFrontend, model: BaseAsrModel, bundle: CheckpointBundle) -> None:
    """An overridden frontend still has to give the frames that the encoder takes, at the rate it was trained on."""
    if frontend.feature_dim != model.encoder.feature_dim:
        raise ConfigError(
            f"the model takes {model.encoder.feature_dim} features a frame and feature_config gives "
            f"{frontend.feature_dim}; leave num_mel_bins, lfr_m and use_energy as the checkpoint has them."
        )
    trained = bundle.feature.options.get("sample_rate", frontend.sample_rate)
    if frontend.sample_rate != trained:
        raise ConfigError(
            f"the model was trained at {trained} Hz and feature_config says {frontend.sample_rate} Hz; declare the "
            "rate of your audio with sample_rate on the request instead."
        )


def _check_left_context(config: EngineConfig, model: BaseAsrModel, bundle: CheckpointBundle) -> None:
    """State of fixed extent has its left context from the weights; another one cannot be had by a setting."""
    specs = model.encoder.state_specs
    trained = bundle.decoding.num_left_chunks
    fixed = model.encoder.streaming_kind != "none" and not any(isinstance(spec, PagedKV) for spec in specs)
    if fixed and trained is not None and config.num_left_chunks != trained:
        raise ConfigError(
            f"num_left_chunks={config.num_left_chunks}: the left context of this {model.architecture} checkpoint is "
            f"fixed ({trained} chunks of its own size); leave num_left_chunks unset."
        )


def _check_interfaces(model: BaseAsrModel, strategy: type[DecodeStrategy], method: str) -> None:
    missing = [name for name in strategy.requires if name not in model.interfaces]
    if missing:
        raise ConfigError(
            f"decode_method={method!r} requires the interface {', '.join(missing)}, which "
            f"{type(model).__name__} does not "
            f"offer; it offers: {', '.join(model.interfaces) or 'none'}."
        )


def _refusals(
    config: EngineConfig, model: BaseAsrModel, frontend: FeatureFrontend, strategy: DecodeStrategy
) -> tuple[str, str]:
    """Why streaming and offline are not served; empty where they are. A pinned mode that cannot be served is an
    error.
    """
    no_streaming = no_offline = ""
    if model.encoder.streaming_kind == "none":
        no_streaming = f"{type(model.encoder).__name__} with these weights is offline only"
    elif frontend.framing is None:
        no_streaming = f"{type(frontend).__name__} needs whole utterances"
    elif "streaming" not in strategy.modes:
        no_streaming = f"decode_method={config.decode_method!r} is offline only"
    if "offline" not in strategy.modes:
        no_offline = f"decode_method={config.decode_method!r} is streaming only"
    if no_streaming and no_offline:
        raise ConfigError(f"nothing can be served: {no_streaming}; {no_offline}.")
    if (config.service_mode == "streaming" and no_streaming) or (config.service_mode == "offline" and no_offline):
        raise ConfigError(f"service_mode={config.service_mode!r} cannot be served: {no_streaming or no_offline}.")
    if config.service_mode == "streaming":
        no_offline = "service_mode='streaming'"
    elif config.service_mode == "offline":
        no_streaming = "service_mode='offline'"
    return no_streaming, no_offline
