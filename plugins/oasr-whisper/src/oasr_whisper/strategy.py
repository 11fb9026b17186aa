"""The decode strategy ``aed``: Whisper's prompts, rules and results around the core's autoregressive machinery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oasr_core.decoding.autoregressive import AutoregressiveStrategy, Retry, hypotheses
from oasr_core.decoding.base import DecodeContext, Hypotheses, Hypothesis, Mode, NoOptions, TokenSpan
from oasr_core.decoding.decode_group import Candidate, Row
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.decoding.sampling import Sampling
from oasr_core.errors import PluginContractError
from oasr_core.models.base import DecoderMemory
from oasr_core.request import DecodingOptions
from oasr_whisper.config import TIMESTAMP_SECONDS
from oasr_whisper.decoder import AedHead
from oasr_whisper.fallback import (
    Attempt,
    average_log_prob,
    best_attempt,
    compression_ratio,
    fails,
    is_silence,
    next_temperature,
)
from oasr_whisper.options import AedOptions, AedRequestOptions
from oasr_whisper.prompt import PromptBuilder
from oasr_whisper.rules import TokenRules
from oasr_whisper.segments import segment
from oasr_whisper.timing import token_frames
from oasr_whisper.word_times import word_times


@dataclass
class _Note:
    """What is kept of a request beside its tokens; ``attempts`` are those that failed so far."""

    timestamps: bool
    language: str
    language_prob: float | None = None
    no_speech_prob: float | None = None
    attempts: tuple[Attempt[Hypotheses], ...] = field(default=())


class AedStrategy(AutoregressiveStrategy):
    """Whisper: transcribes or translates windows, in a language that is given or detected.

    Tokens of a result hold its timestamps where they were asked for; they spell nothing. Word times come from the
    attention of the best hypothesis, in a pass of its own.
    """

    oasr_api = "1.0"
    requires = ("aed",)
    honours = frozenset(
        {
            "word_timestamps",
            "segment_timestamps",
            "max_new_tokens",
            "temperature",
            "top_k",
            "top_p",
            "seed",
            "prompt",
            "context_tokens",
            "task",
            "language",
            "hotwords",
        }
    )
    invents_text = True
    options_cls = AedOptions
    request_options_cls = AedRequestOptions

    head: AedHead

    def __init__(self, context: DecodeContext) -> None:
        """Raises ``PluginContractError`` for options of another strategy."""
        options = AedOptions() if isinstance(context.options, NoOptions) else context.options
        if not isinstance(options, AedOptions):
            raise PluginContractError(
                f"Strategy 'aed' was given options of type {type(options).__name__}; it takes AedOptions."
            )
        context = replace(context, options=options)
        head: AedHead = context.model.interfaces["aed"]
        self._options = options
        self._tokens = head.tokens
        self._prompts = PromptBuilder(head.tokens, context.tokenizer, head.max_positions)
        super().__init__(context)
        self._rules = TokenRules(head.tokens, options, head.vocab_size, self._device)
        self._languages = list(head.tokens.language_ids)
        ids = list(head.tokens.language_ids.values())
        self._language_ids = torch.tensor(ids, dtype=torch.int64, device=self._device)

    # -- admission ----------------------------------------------------------------------------------------------------

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse languages, tasks and texts that the checkpoint does not know, and weights of hotwords."""
        self._prompts.validate(options)
        super().validate(options, mode)

    def prompt_ceiling(self, options: DecodingOptions) -> int:
        """Tokens of the prompt."""
        return self._prompts.ceiling(options)

    def max_width(self, options: DecodingOptions) -> int:
        """Hypotheses of the search, or of a fallback where that has more."""
        width = super().max_width(options)
        return max(width, self._options.best_of) if self._options.temperature_fallback else width

    # -- decoding -----------------------------------------------------------------------------------------------------

    @property
    def end_ids(self) -> frozenset[int]:
        """``<|endoftext|>``."""
        return frozenset((self._tokens.eot,))

    def rows(self, requests: Sequence[IncrementalRequest], memory: DecoderMemory, frames: Sequence[int]) -> list[Row]:
        """Prompts, after the language of those that name none was detected."""
        detected = self._detect(requests, memory)
        made = []
        for index, (request, count) in enumerate(zip(requests, frames, strict=True)):
            language, probability = detected.get(index, (request.options.language or "en", None))
            timestamps = self._has_timestamps(request.options)
            prompt = self._prompts.build(request.options, language, timestamps=timestamps)
            note = _Note(timestamps, language, probability)
            made.append(self.new_row(request, count, prompt.tokens, probe=prompt.sot, note=note))
        return made

    def mask(self, logits: Tensor, pairs: Sequence[tuple[Row, Candidate]]) -> None:
        """The checkpoint's lists, and the rules of timestamps."""
        generated = [candidate.tokens for _, candidate in pairs]
        self._rules.apply(logits, generated, [row.note.timestamps for row, _ in pairs])

    def probed(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Note how probable it is that nobody speaks."""
        found = (logits[:, self._tokens.no_speech] - logits.logsumexp(dim=-1)).exp()
        for row, probability in zip(rows, found.tolist(), strict=True):
            row.note.no_speech_prob = probability

    def may_revise(self, row: Row) -> bool:
        """Whether the text that a partial shows may yet be taken back, by a fallback or as silence."""
        if self._options.temperature_fallback:
            return True
        return self._options.no_speech_gate and is_silence(self._options, -torch.inf, row.note.no_speech_prob)

    def finish(self, row: Row, memory: DecoderMemory) -> Hypotheses | Retry:
        """The result, empty for silence; or another attempt."""
        note: _Note = row.note
        attempt = self._attempt(row)
        if self._options.temperature_fallback and fails(self._options, attempt, note.no_speech_prob):
            attempts = (*note.attempts, attempt)
            warmer = next_temperature(self._options, row.sampling.temperature)
            if warmer is not None:
                retry = _Note(note.timestamps, note.language, note.language_prob, note.no_speech_prob, attempts)
                wanted = row.request.options
                return Retry(Sampling(self._options.best_of, False, warmer, wanted.top_k, wanted.top_p), retry)
            attempt = best_attempt(self._options, attempts)
        return self._result(row, memory, attempt)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _has_timestamps(self, options: DecodingOptions) -> bool:
        wanted = AedRequestOptions.model_validate(options.extra).timestamps
        return options.segment_timestamps or (self._options.timestamps if wanted is None else wanted)

    @torch.inference_mode()
    def _detect(
        self, requests: Sequence[IncrementalRequest], memory: DecoderMemory
    ) -> dict[int, tuple[str, float | None]]:
        """Languages and their probabilities, for the requests of a multilingual model that name none."""
        asking = [index for index, request in enumerate(requests) if request.options.language is None]
        if not self._tokens.multilingual or not asking:
            return {}
        chosen = memory if len(asking) == len(requests) else tuple(tensor[asking] for tensor in memory)
        cache = self.scratch(len(asking))
        start = torch.full((len(asking), 1), self._tokens.sot, dtype=torch.int64, device=self._device)
        logits = self.head.logits(self.head.step(start, cache.begin(1), chosen)[:, -1])
        best = logits[:, self._language_ids].softmax(dim=-1).max(dim=-1)
        return {
            index: (self._languages[place], probability)
            for index, place, probability in zip(asking, best.indices.tolist(), best.values.tolist(), strict=True)
        }

    def _attempt(self, row: Row) -> Attempt[Hypotheses]:
        found = hypotheses(row)
        best = row.ranked()[0]
        ratio = 0.0
        if self._options.temperature_fallback:
            ratio = compression_ratio(self.context.tokenizer.decode(best.tokens))
        average = average_log_prob(best.score, len(best.tokens))
        return Attempt(row.sampling.temperature, average, ratio, found)

    def _result(self, row: Row, memory: DecoderMemory, attempt: Attempt[Hypotheses]) -> Hypotheses:
        note: _Note = row.note
        found = attempt.result
        if self._options.no_speech_gate and is_silence(self._options, attempt.avg_log_prob, note.no_speech_prob):
            found = Hypotheses([Hypothesis([])])
        found.language, found.language_prob = note.language, note.language_prob
        found.no_speech_prob, found.temperature = note.no_speech_prob, attempt.temperature
        duration = row.frames * TIMESTAMP_SECONDS
        tokens = found.best.tokens
        spans = [TokenSpan(0, len(tokens), 0.0, duration)]
        if note.timestamps:
            spans, found.consumed_seconds = segment(tokens, self._tokens.timestamp_begin, duration)
            found.segments = spans
        if row.request.options.word_timestamps:
            self._time(row, memory, found, spans)
        return found

    @torch.inference_mode()
    def _time(self, row: Row, memory: DecoderMemory, found: Hypotheses, spans: Sequence[TokenSpan]) -> None:
        """Frames of the best hypothesis' tokens, by one more pass over its text."""
        best = found.best
        text = [token for token in best.tokens if token < self._tokens.eot]
        if not text:
            best.frames = best.end_frames = [0] * len(best.tokens)
            return
        start = self._prompts.start(row.note.language, row.request.options.task)
        sequence = [*start, self._tokens.no_timestamps, *text, self._tokens.eot][: self.head.max_positions]
        scores = self.head.cross_scores(torch.tensor([sequence], device=self._device), memory)[0]
        frames = iter(token_frames(scores, len(start), len(text) + 1, row.frames))
        starts: list[float] = []
        here = next(frames)
        for token in best.tokens:
            starts.append(here * TIMESTAMP_SECONDS)
            if token < self._tokens.eot:
                here = next(frames)
        starts.append(here * TIMESTAMP_SECONDS)
        times = word_times(self.context.tokenizer.token_pieces(best.tokens), starts, spans)
        best.frames = [round(begin / TIMESTAMP_SECONDS) for begin, _ in times]
        best.end_frames = [round(end / TIMESTAMP_SECONDS) for _, end in times]
        if found.consumed_seconds is not None:
            _keep_sides(
                best.frames, best.end_frames, spans[-1].first, round(found.consumed_seconds / TIMESTAMP_SECONDS)
            )


def _keep_sides(frames: list[int], ends: list[int], last: int, edge: int) -> None:
    """Let tokens from ``last`` on, which are unfinished, begin at frame ``edge`` or later, and all others before it."""
    for index, (begin, end) in enumerate(zip(frames, ends, strict=True)):
        frames[index] = max(begin, edge) if index >= last else min(begin, edge - 1)
        ends[index] = max(end, frames[index])
