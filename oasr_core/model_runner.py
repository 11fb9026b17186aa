"""ModelRunner: the network, its streaming backend, and the precision and device that they run in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oasr_core.cache.options import CacheOptions
from oasr_core.cache.sizing import CacheConfig, available_on_cpu, available_on_cuda, build_cache_config
from oasr_core.cache.store import StreamStateStore
from oasr_core.decoding.base import Consumes
from oasr_core.errors import ConfigError, PluginContractError
from oasr_core.graphs.backends import GraphBackend
from oasr_core.models.base import BaseAsrModel, EncoderBatch, EncoderOutput, PagedKV, Slot
from oasr_core.registry import registry
from oasr_core.streaming.base import StreamChunk, StreamingEncoderBackend
from oasr_core.streaming.options import StreamingOptions

logger = logging.getLogger(__name__)

#: ``(request id, first encoder frame, log-probs or hidden states of the valid frames)``
Tap = Callable[[str, int, Tensor], None]


class ModelRunner:
    """Runs the offline and the streaming forward and gives a strategy what it consumes."""

    def __init__(
        self, model: BaseAsrModel, consumes: Consumes, graphs: GraphBackend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model = model
        self._graphs = graphs
        self.encoder = model.encoder
        self.device = device
        self.dtype = dtype
        self.backend: StreamingEncoderBackend | None = None
        #: Sees each request's frames after every forward; a debugging aid of the invariance checks.
        self.tap: Tap | None = None
        self._log_probs = model.interfaces["ctc"].log_probs if consumes in ("log_probs", "both") else None

    def enable_streaming(
        self, streaming: StreamingOptions, cache: CacheOptions, max_streams: int, *, probe_frames: int | None = None
    ) -> StreamingEncoderBackend:
        """Build the state store and the backend for this encoder; refuses geometry that the weights cannot serve.

        ``probe_frames``: feature frames of the offline forward to allow for where a capacity is derived from a GPU's
        memory (``None``: the engine serves no offline requests).
        """
        encoder = self.encoder
        geometry = encoder.chunk_geometry(streaming.chunk_size)
        paged = [spec for spec in encoder.state_specs if isinstance(spec, PagedKV)]
        slots = [spec for spec in encoder.state_specs if isinstance(spec, Slot)]
        if len(paged) > 1:
            raise ConfigError(f"{type(encoder).__name__} declares {len(paged)} PagedKV specs; one is supported")
        config = None
        if paged:
            config = build_cache_config(
                paged[0],
                cache,
                chunk_size=geometry.output_frames,
                num_left_chunks=streaming.num_left_chunks,
                max_streams=max_streams,
                element_size=self.dtype.itemsize,
                available_bytes=self._available_bytes(cache, max(geometry.window, probe_frames or 0), max_streams),
            )
            self._log_pool(config, cache)
        store = StreamStateStore(
            config,
            slots,
            max_streams=max_streams,
            dtype=self.dtype,
            device=self.device,
            paged=cache.use_paged_cache,
        )
        backend_cls = registry("streaming_backends").get(encoder.streaming_kind)
        self.backend = backend_cls(
            encoder,
            geometry,
            store,
            device=self.device,
            dtype=self.dtype,
            pad_final=streaming.finalize_silence_pad,
        )
        return self.backend

    @torch.inference_mode()
    def forward_offline(self, features: Tensor, lengths: Sequence[int], *, packed: bool = False) -> EncoderOutput:
        """Offline forward of a micro-batch: ``features`` ``(batch, frames, dim)``, ``lengths`` feature frames."""
        batch = EncoderBatch(
            features.to(self.device),  # float32: normalisation wants the precision, the encoder casts behind it
            torch.tensor(lengths, dtype=torch.int64).to(self.device, non_blocking=True),
            packed=packed,
        )
        key = ("offline", tuple(features.shape), packed)
        out = self._graphs.run(key, lambda: self._head(self.encoder.encode(batch)))
        promised = max(self.encoder.output_frames(length) for length in lengths)
        if promised > out.hidden.shape[1]:
            raise PluginContractError(
                f"{type(self.encoder).__name__}.encode gave {out.hidden.shape[1]} frames, output_frames() promises "
                f"{promised}."
            )
        return out

    @torch.inference_mode()
    def forward_streaming(self, chunks: Sequence[StreamChunk]) -> EncoderOutput:
        """One step of a cohort."""
        if self.backend is None:
            raise ConfigError("this engine was built without a streaming backend (service_mode='offline')")
        backend = self.backend
        return self._graphs.run(("streaming", len(chunks)), lambda: self._head(backend.forward_step(chunks)))

    def observe(self, request_ids: Sequence[str], offsets: Sequence[int], out: EncoderOutput) -> None:
        """Show every row's valid frames to the tap."""
        if self.tap is None:
            return
        values = out.log_probs if out.log_probs is not None else out.hidden
        for row, (request_id, offset) in enumerate(zip(request_ids, offsets, strict=True)):
            self.tap(request_id, offset, values[row, : int(out.lengths[row])].float().cpu().clone())

    def _head(self, out: EncoderOutput) -> EncoderOutput:
        if self._log_probs is not None and out.log_probs is None:
            out.log_probs = self._log_probs(out.hidden)
        return out

    def _available_bytes(self, cache: CacheOptions, frames: int, max_streams: int) -> int | None:
        """Memory for a derived pool; nothing is measured unless a capacity was left unset."""
        if cache.max_num_blocks is not None or not cache.use_paged_cache:
            return None
        return self.available_bytes(cache, frames, max_streams)

    def available_bytes(self, cache: CacheOptions, frames: int, max_streams: int) -> int | None:
        """Memory that a pool may take beside a forward of ``max_streams`` rows of ``frames`` feature frames."""
        if self.device.type == "cpu":
            return available_on_cpu(cache)
        return self._probe_cuda(cache, frames, max_streams) if self.device.type == "cuda" else None

    def _probe_cuda(self, cache: CacheOptions, frames: int, max_streams: int) -> int:
        """Peak bytes of the widest forward that the engine will run, then the driver's figures."""
        features = torch.zeros(max_streams, frames, self.encoder.feature_dim, device=self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.forward_offline(features, [frames] * max_streams)
        probe = torch.cuda.max_memory_allocated(self.device) - before
        free, total = torch.cuda.mem_get_info(self.device)
        return available_on_cuda(total, free, cache, probe)

    def _log_pool(self, config: CacheConfig, options: CacheOptions) -> None:
        logger.info(
            "paged KV pool: %d blocks of %d frames, %d bytes a block, %.1f MiB; at most %d blocks (%d frames) a stream",
            config.num_blocks,
            config.block_frames,
            config.bytes_per_block,
            config.pool_bytes / 2**20,
            config.blocks_per_seq,
            config.capacity_frames,
        )
        if options.max_num_blocks is None and config.left_frames is None:
            limit = "max_blocks_per_seq" if config.blocks_per_seq == options.max_blocks_per_seq else "memory"
            logger.info("the pool is limited by %s, each stream by %d frames", limit, config.capacity_frames)
