"""The offline executor: a batch's micro-batches, back to back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
        frames = {request.request_id: self._runner.encoder.output_frames(request.num_frames) for request in batch}
        audible = [request for request in batch if frames[request.request_id] > 0]
        silent = [request for request in batch if frames[request.request_id] <= 0]
        outputs = self._empty(silent)
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

    def _empty(self, rows: Sequence[Request]) -> list[RequestOutput]:
        """Requests too short for one encoder frame end empty."""
        outputs: list[RequestOutput] = []
        for request in rows:
            try:
                outputs.append(self._final(request, Hypotheses([Hypothesis([])])))
            except Exception as error:
                outputs += failed([request], "offline_forward", error)
        return outputs

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
        features, lengths = self._inputs.extract([_waveform(request) for request in rows])
        out = self._runner.forward_offline(features, lengths, packed=packed)
        self._runner.observe([request.request_id for request in rows], [0] * len(rows), out)
        hypotheses = self._strategy.decode_offline(out, [request.decoding for request in rows])
        return [self._final(request, hyps) for request, hyps in zip(rows, hypotheses, strict=True)]

    def _final(self, request: Request, hyps: Hypotheses) -> RequestOutput:
        duration = request.num_samples / self._inputs.frontend.sample_rate
        return self._outputs.final(request.request_id, hyps, request.decoding, finish_reason="stop", duration=duration)


def _waveform(request: Request) -> Tensor:
    if request.audio is None:
        raise RuntimeError(f"offline request {request.request_id!r} was admitted without audio")
    return request.audio
