"""What an engine is made of, and the facts that follow from it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from oasr_core.checkpoints.bundle import CheckpointBundle
from oasr_core.checkpoints.load import LoadReport
from oasr_core.config import EngineConfig
from oasr_core.decoding.base import DecodeStrategy, Mode
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.executors.incremental import IncrementalExecutor
from oasr_core.executors.offline import OfflineExecutor
from oasr_core.executors.streaming import StreamingExecutor
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.pinned import AudioBuffers
from oasr_core.longform.parallel import ParallelPlan
from oasr_core.longform.plan import LongFormPlan
from oasr_core.longform.sequential import CONTEXT_TOKENS, SequentialPlan
from oasr_core.model_runner import ModelRunner
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions, Request
from oasr_core.scheduling.scheduler import Scheduler
from oasr_core.segmenters.base import Segmenter
from oasr_core.tokenizers.base import Tokenizer


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
        """How a long request is cut; ``RequestRefusedError`` for more than one hypothesis: only the best is joined."""
        if options.n_best > 1:
            raise RequestRefusedError(
                f"n_best={options.n_best}: audio that is decoded in windows (long_form) has one transcript, joined of "
                "their best ones."
            )
        limit = self.max_samples
        if limit is None:
            raise ConfigError("this model has no window to cut audio for")
        samples, rate = len(waveform), self.inputs.frontend.sample_rate
        if self.config.long_form_mode == "sequential":
            later = {"segment_timestamps": True, "context_tokens": (0,) * CONTEXT_TOKENS}
            self.strategy.validate(options.model_copy(update=later), "offline")  # later windows need more memory
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
        return ParallelPlan(
            self.segmenter.windows(waveform, limit),
            samples,
            rate,
            self.outputs.tokenizer,
            max_in_flight=self.config.max_batch_size,
            timed="word_timestamps" in self.strategy.honours,
            keep_words=options.word_timestamps,
        )

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
