"""The offline executor: a batch's micro-batches, back to back."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.decoding.base import DecodeStrategy
from oasr_core.executors.failures import failed, is_out_of_memory
from oasr_core.executors.intake import Intake
from oasr_core.request import Request, RequestOutput


class OfflineExecutor:
    """Features, forward, decode and text of whole utterances."""

    def __init__(self, intake: Intake, strategy: DecodeStrategy) -> None:
        self._intake = intake
        self._strategy = strategy

    def run(self, batch: Sequence[Request]) -> list[RequestOutput]:
        """One terminal output per request, in the order of ``batch``."""
        outputs, micros = self._intake.split(batch)
        for rows, packed in micros:
            outputs += self._contained(rows, packed)
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
        out = self._intake.encode(rows, packed)
        hypotheses = self._strategy.decode_offline(out, [request.decoding for request in rows])
        return [self._intake.final(request, hyps) for request, hyps in zip(rows, hypotheses, strict=True)]
