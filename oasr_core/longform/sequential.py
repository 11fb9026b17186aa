"""One window after another, each beginning where the text of the one before ends: Whisper's own way."""

from __future__ import annotations

from typing import Any

from oasr_core.longform.plan import LEAST_WINDOW, ChildSpec, LongFormPlan
from oasr_core.request import DecodingOptions, RequestOutput
from oasr_core.tokenizers.base import Tokenizer

#: Ids before a window that are given to it; a strategy shortens them to what its decoder takes.
CONTEXT_TOKENS = 448
#: A window decoded at a temperature above this gives no context: what it invents would be carried on.
RESET_TEMPERATURE = 0.5


class SequentialPlan(LongFormPlan):
    """Takes the next window from where the child says that its text ends (``RequestOutput.consumed_seconds``).

    Children are asked for the times of their segments; one that consumed nothing, or does not say, has dealt with its
    whole window. Each window is given the ids before it as context, timestamps included, and the language that the
    first window with text was found to be in, unless the request names one.
    Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 3.8.
    """

    def __init__(
        self,
        samples: int,
        sample_rate: int,
        tokenizer: Tokenizer,
        *,
        window_samples: int,
        decoding: DecodingOptions | None = None,
        condition_on_previous_text: bool = True,
    ) -> None:
        """``decoding`` are the parent's options; its prompt goes before the context of the windows."""
        super().__init__(samples, sample_rate, tokenizer)
        self.window_samples = window_samples
        self.decoding = decoding or DecodingOptions()
        self.condition_on_previous_text = condition_on_previous_text
        self._position = 0
        self._count = 0
        self._language = self.decoding.language
        self._prompt = self.decoding.prompt
        self._context: list[int] = []

    @property
    def progress(self) -> float:
        """Seconds up to the next window."""
        return self._seconds(self._position)

    @property
    def _complete(self) -> bool:
        return self._position >= self.samples

    @property
    def _next_start(self) -> float | None:
        return None

    def _take(self, child: ChildSpec, output: RequestOutput) -> None:
        self._position = self._position_behind(child, output)
        said = self._stitcher.append(
            output, self._seconds(child.start), self._seconds(self._position), until=output.consumed_seconds or None
        )
        if self.samples - self._position < round(LEAST_WINDOW * self.sample_rate):
            self._position = self.samples
        if output.text.strip():
            self._language = self._language or output.language
        self._context = [*self._context, *said][-CONTEXT_TOKENS:]
        if not self.condition_on_previous_text or (output.temperature or 0.0) > RESET_TEMPERATURE:
            self._context, self._prompt = [], None

    def _start(self) -> list[ChildSpec]:
        if self._running or self._complete:
            return []
        end = min(self._position + self.window_samples, self.samples)
        child = ChildSpec(self._count, self._position, end, self._overrides())
        self._count += 1
        return [child]

    def _overrides(self) -> dict[str, Any]:
        return {
            "segment_timestamps": True,
            "context_tokens": tuple(self._context),
            "prompt": self._prompt,
            "language": self._language,
        }
