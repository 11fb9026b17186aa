"""What the executors of whole utterances share: from a batch to encoder output, and from hypotheses to the output."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.executors.failures import failed
from oasr_core.frontend.input import InputProcessor
from oasr_core.model_runner import ModelRunner
from oasr_core.models.base import EncoderOutput
from oasr_core.outputs import OutputProcessor
from oasr_core.request import Request, RequestOutput
from oasr_core.scheduling.scheduler import Scheduler
from oasr_core.segmenters.gate import SilenceGate

#: Requests that run together, and whether as one packed row.
Micro = tuple[list[Request], bool]


class Intake:
    """Sorts out what there is nothing to decode in, cuts the rest into micro-batches and encodes them."""

    def __init__(
        self,
        inputs: InputProcessor,
        runner: ModelRunner,
        outputs: OutputProcessor,
        scheduler: Scheduler,
        *,
        gate: SilenceGate | None = None,
    ) -> None:
        """``gate``: audio without speech ends empty, undecoded."""
        self._inputs = inputs
        self._runner = runner
        self._outputs = outputs
        self._scheduler = scheduler
        self._gate = gate

    def split(self, batch: Sequence[Request]) -> tuple[list[RequestOutput], list[Micro]]:
        """Outputs of what is silent, too short for an encoder frame, or failed on the way; and the micro-batches."""
        ended: list[RequestOutput] = []
        rows: list[Request] = []
        frames: list[int] = []
        for request in batch:
            try:
                count = self._runner.encoder.output_frames(request.num_frames)
                if count > 0 and not self._is_silent(request):
                    rows.append(request)
                    frames.append(count)
                else:
                    ended.append(self.final(request, Hypotheses([Hypothesis([])])))
            except Exception as error:
                ended += failed([request], "offline_forward", error)
        if not rows:
            return ended, []
        try:
            micros = self._scheduler.split_offline_batch([request.cost for request in rows], frames)
        except Exception as error:
            return ended + failed(rows, "offline_forward", error), []
        return ended, [([rows[index] for index in micro.indices], micro.packed) for micro in micros]

    def encode(self, rows: Sequence[Request], packed: bool) -> EncoderOutput:
        """Features and forward of a micro-batch, shown to the tap."""
        waveforms = [request.audio for request in rows if request.audio is not None]
        if len(waveforms) != len(rows):
            raise RuntimeError("an offline request was admitted without audio")
        features, lengths = self._inputs.extract(waveforms)
        out = self._runner.forward_offline(features, lengths, packed=packed)
        self._runner.observe([request.request_id for request in rows], [0] * len(rows), out)
        return out

    def final(self, request: Request, hyps: Hypotheses) -> RequestOutput:
        """The terminal output of a request."""
        duration = request.num_samples / self._inputs.frontend.sample_rate
        return self._outputs.final(request.request_id, hyps, request.decoding, finish_reason="stop", duration=duration)

    def _is_silent(self, request: Request) -> bool:
        if self._gate is None or request.audio is None:
            return False
        return self._gate.is_silent(request.audio, self._inputs.frontend.sample_rate)
