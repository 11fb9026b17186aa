"""Build an engine's parts in order: checkpoint, weights, cast, move, tables, decoder, pools, executors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import ValidationError

from oasr_core.cache.options import CacheOptions
from oasr_core.checkpoints.bundle import CheckpointBundle, TokenizerSpec
from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.config import NO_EFFECT_YET, EngineConfig
from oasr_core.decoding.base import DecodeContext, DecodeStrategy, StrategyOptions
from oasr_core.decoding.incremental import IncrementalStrategy
from oasr_core.decoding.options import DecodeOptions, EndpointOptions
from oasr_core.engine_parts import EngineParts
from oasr_core.errors import ConfigError, did_you_mean
from oasr_core.executors.incremental import IncrementalExecutor
from oasr_core.executors.intake import Intake
from oasr_core.executors.offline import OfflineExecutor
from oasr_core.executors.streaming import StreamingExecutor
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.pinned import AudioBuffers
from oasr_core.graphs.backends import EagerBackend, GraphBackend
from oasr_core.graphs.options import GraphOptions
from oasr_core.model_runner import ModelRunner
from oasr_core.models.base import BaseAsrModel, PagedKV
from oasr_core.outputs import OutputProcessor
from oasr_core.registry import active_plugins, registry
from oasr_core.request import DecodingOptions
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
    segmenter = build_segmenter(config, frontend)
    gate = build_gate(config, strategy_cls, segmenter, frontend)
    _refuse_idle_settings(config)
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
    scheduler = build_scheduler(config, strategy)
    no_streaming, no_offline = _refusals(config, model, frontend, strategy)
    offline = incremental = streaming = None
    if not no_offline:
        intake = Intake(inputs, runner, outputs, scheduler, gate=gate)
        if isinstance(strategy, IncrementalStrategy):
            incremental = build_incremental(config, intake, strategy, outputs)
        else:
            offline = OfflineExecutor(intake, strategy)
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


def build_scheduler(config: EngineConfig, strategy: DecodeStrategy) -> Scheduler:
    """Queues and policies; arrivals are held back for each other only where a family decodes in groups."""
    batching = config.options(BatchingOptions)
    return Scheduler(
        batching,
        registry("batching_policies").get(batching.schedule_policy)(),
        registry("partition_policies").get(partition_name(batching))(),
        admit_window=config.decode_admit_window_ms / 1000.0 if isinstance(strategy, IncrementalStrategy) else 0.0,
    )


def build_incremental(
    config: EngineConfig, intake: Intake, strategy: IncrementalStrategy, outputs: OutputProcessor
) -> IncrementalExecutor:
    """The executor of a family that generates."""
    return IncrementalExecutor(
        intake,
        strategy,
        outputs,
        config.options(DecodeOptions),
        max_slots=config.max_decode_slots or config.max_batch_size,
        partial_interval=config.partial_decode_interval,
    )


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
        if "overlap_seconds" in options and "long_form_overlap_seconds" in config.model_fields_set:
            raise ConfigError("long_form_overlap_seconds and segmenter_options overlap_seconds: set one of them.")
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
    known = registry("segmenters").names()
    if name not in known and ":" not in name:
        raise ConfigError(
            f"silence_gate={name!r} is not known; allowed: auto, off, signal, and the segmenters {', '.join(known)}."
            f"{did_you_mean(name, ['auto', 'off', 'signal', *known])}"
        )
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
    """The checkpoint's frontend; ``feature_config`` or ``frontend_options`` override it, loudly where they differ."""
    frontend_cls: type[FeatureFrontend] = registry("frontends").get(bundle.feature.kind)
    trained = parse_options(frontend_cls.options_cls, bundle.feature.options, f"frontend {bundle.feature.kind!r}")
    if config.feature_config is not None and config.frontend_options:
        raise ConfigError("feature_config and frontend_options both override the features; set one of them.")
    if config.feature_config is not None:
        source, given = "feature_config", config.feature_config.model_dump()
    elif config.frontend_options:
        source, given = "frontend_options", {**trained.model_dump(), **config.frontend_options}
    else:
        return frontend_cls(trained, config.audio_scale)
    options = parse_options(frontend_cls.options_cls, given, source)
    changed = [
        f"{name}: trained {getattr(trained, name)!r}, set {getattr(options, name)!r}"
        for name in type(options).model_fields
        if getattr(trained, name) != getattr(options, name)
    ]
    if changed:
        logger.warning("%s overrides the features that the model was trained on: %s", source, "; ".join(changed))
    return frontend_cls(options, config.audio_scale)


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
                hint = did_you_mean(name, cls.model_fields)
                if name in DecodingOptions.model_fields:
                    hint = f" A request asks for it: DecodingOptions({name}=...)."
                lines.append(f"unknown option {name!r}; known: {known}.{hint}")
            else:
                lines.append(f"{name}: {finding['msg'].removeprefix('Value error, ')} (got {finding['input']!r})")
        raise ConfigError(f"{owner}: " + "; ".join(lines)) from error


def _resolved_long_form(config: EngineConfig, strategy: type[DecodeStrategy]) -> EngineConfig:
    """``auto`` becomes a mode, by whether the family writes timestamps and no segmenter is named; ``sequential`` needs
    such a family.
    """
    writes = "segment_timestamps" in strategy.honours
    if config.long_form_mode == "auto":
        follows = config.long_form and writes and config.segmenter is None
        return config.replace(long_form_mode="sequential" if follows else "parallel")
    if config.long_form and config.long_form_mode == "sequential" and not writes:
        raise ConfigError(
            f"long_form_mode='sequential' needs timestamps that decode_method={config.decode_method!r} does not write; "
            "use 'parallel'."
        )
    return config


def _refuse_idle_settings(config: EngineConfig) -> None:
    """Settings of long form that would change nothing."""
    sequential = config.long_form_mode == "sequential"
    cuts = config.long_form and not sequential
    if config.segmenter is not None and not (
        cuts or config.endpoint_silence == "segmenter" or config.silence_gate == config.segmenter
    ):
        reason = "long_form_mode='sequential' cuts by timestamps" if config.long_form else "long_form is off"
        raise ConfigError(
            f"segmenter={config.segmenter!r} would have nothing to do: {reason}, and neither endpoint_silence nor "
            "silence_gate names it."
        )
    needs = {
        "long_form_overlap_seconds": (cuts, "long_form=True in parallel mode"),
        "condition_on_previous_text": (config.long_form and sequential, "sequential long form"),
        "long_form_mode": (config.long_form, "long_form=True"),
    }
    for name, (served, reader) in needs.items():
        default = type(config).model_fields[name].get_default()
        if name in config.model_fields_set and getattr(config, name) != default and not served:
            raise ConfigError(f"{name}={getattr(config, name)!r} is read with {reader} only; leave it unset.")


def _check_features(frontend: FeatureFrontend, model: BaseAsrModel, bundle: CheckpointBundle) -> None:
    """An overridden frontend still has to give the frames that the encoder takes, at the rate it was trained on."""
    if frontend.feature_dim != model.encoder.feature_dim:
        raise ConfigError(
            f"the model takes {model.encoder.feature_dim} features a frame and the settings give "
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


#: What pins a mode, on the command line too.
_MODES = "Set another service_mode; --mode, --chunk-size, --feed-ms and --partials set it, too."


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
    refused = {"streaming": no_streaming, "offline": no_offline}.get(config.service_mode)
    if refused:
        raise ConfigError(f"service_mode={config.service_mode!r} cannot be served: {refused}. {_MODES}")
    if config.service_mode == "streaming":
        no_offline = "service_mode='streaming'"
    elif config.service_mode == "offline":
        no_streaming = "service_mode='offline'"
    return no_streaming, no_offline
