"""The offline executor: a batch's micro-batches, back to back."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.decoding.base import DecodeStrategy, Hypotheses, Hypothesis
from oasr_core.executors.failures import failed, is_out_of_memory
from oasr_core.executors.waveforms import is_silent, waveform
from oasr_core.frontend.input import InputProcessor
from oasr_core.model_runner import ModelRunner
from oasr_core.outputs import OutputProcessor
from oasr_core.request import Request, RequestOutput
from oasr_core.scheduling.scheduler import Scheduler
from oasr_core.segmenters.gate import SilenceGate


class OfflineExecutor:
    """Features, forward, decode and text of whole utterances."""

    def __init__(
        self,
        inputs: InputProcessor,
        runner: ModelRunner,
        strategy: DecodeStrategy,
        outputs: OutputProcessor,
        scheduler: Scheduler,
        *,
        gate: SilenceGate | None = None,
    ) -> None:
        """``gate``: audio without speech ends empty, undecoded."""
        self._inputs = inputs
        self._runner = runner
        self._strategy = strategy
        self._outputs = outputs
        self._scheduler = scheduler
        self._gate = gate

    def run(self, batch: Sequence[Request]) -> list[RequestOutput]:
        """One terminal output per request, in the order of ``batch``."""
        frames = {request.request_id: self._runner.encoder.output_frames(request.num_frames) for request in batch}
        outputs: list[RequestOutput] = []
        audible: list[Request] = []
        for request in batch:
            try:
                rate = self._inputs.frontend.sample_rate
                if frames[request.request_id] <= 0 or is_silent(request, self._gate, rate):
                    outputs.append(self._final(request, Hypotheses([Hypothesis([])])))
                else:
                    audible.append(request)
            except Exception as error:
                outputs += failed([request], "offline_forward", error)
        try:
            costs = [request.cost for request in audible]
            micros = self._scheduler.split_offline_batch(costs, [frames[request.request_id] for request in audible])
        except Exception as error:
            outputs += failed(audible, "offline_forward", error)
            micros = []
        for micro in micros:
            outputs += self._contained([audible[index] for index in micro.indices], micro.packed)
        results = {output.request_id: output for output in outputs}
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
        features, lengths = self._inputs.extract([waveform(request) for request in rows])
        out = self._runner.forward_offline(features, lengths, packed=packed)
        self._runner.observe([request.request_id for request in rows], [0] * len(rows), out)
        hypotheses = self._strategy.decode_offline(out, [request.decoding for request in rows])
        return [self._final(request, hyps) for request, hyps in zip(rows, hypotheses, strict=True)]

    def _final(self, request: Request, hyps: Hypotheses) -> RequestOutput:
        duration = request.num_samples / self._inputs.frontend.sample_rate
        return self._outputs.final(request.request_id, hyps, request.decoding, finish_reason="stop", duration=duration)
