"""The offline executor: a batch's micro-batches, back to back."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.decoding.base import DecodeStrategy, Hypotheses, Hypothesis
from oasr_core.executors.failures import failed, is_out_of_memory
from oasr_core.frontend.input import InputProcessor
from oasr_core.model_runner import ModelRunner
from oasr_core.outputs import OutputProcessor
from oasr_core.request import Request, RequestOutput
from oasr_core.scheduling.scheduler import Scheduler


class OfflineExecutor:
    """Features, forward, decode and text of whole utterances."""

    def __init__(
        self,
        inputs: InputProcessor,
        runner: ModelRunner,
        strategy: DecodeStrategy,
        outputs: OutputProcessor,
        scheduler: Scheduler,
    ) -> None:
        self._inputs = inputs
        self._runner = runner
        self._strategy = strategy
        self._outputs = outputs
        self._scheduler = scheduler

    def run(self, batch: Sequence[Request]) -> list[RequestOutput]:
        """One terminal output per request, in the order of ``batch``."""
        results: dict[str, RequestOutput] = {}
        encoder = self._runner.encoder
        audible = [request for request in batch if encoder.output_frames(request.num_frames) > 0]
        for request in batch:
            if encoder.output_frames(request.num_frames) <= 0:
                results[request.request_id] = self._final(request, Hypotheses([Hypothesis([])]))
        costs = [request.num_frames for request in audible]
        frames = [encoder.output_frames(cost) for cost in costs]
        for micro in self._scheduler.split_offline_batch(costs, frames):
            rows = [audible[index] for index in micro.indices]
            for output in self._contained(rows, micro.packed):
                results[output.request_id] = output
        return [results[request.request_id] for request in batch]

    def _contained(self, rows: list[Request], packed: bool) -> list[RequestOutput]:
        """Run a micro-batch; on failure re-run it one request at a time, except where memory ran out."""
        try:
            return self._run(rows, packed)
        except Exception as error:
            if is_out_of_memory(error):
                return failed(rows, "offline_oom", error)
            if len(rows) == 1:
                return failed(rows, "offline_forward", error)
        return [output for request in rows for output in self._contained([request], packed)]

    def _run(self, rows: list[Request], packed: bool) -> list[RequestOutput]:
        waveforms = [request.audio for request in rows if request.audio is not None]
        features, lengths = self._inputs.extract(waveforms)
        out = self._runner.forward_offline(features, lengths, packed=packed)
        self._runner.observe([request.request_id for request in rows], [0] * len(rows), out)
        hypotheses = self._strategy.decode_offline(out, [request.decoding for request in rows])
        return [self._final(request, hyps) for request, hyps in zip(rows, hypotheses, strict=True)]

    def _final(self, request: Request, hyps: Hypotheses) -> RequestOutput:
        duration = request.num_samples / self._inputs.frontend.sample_rate
        return self._outputs.final(request.request_id, hyps, request.decoding, finish_reason="stop", duration=duration)
