"""Token-level hypotheses become texts, words, times and confidences: one place for every decode family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from oasr_core.decoding.alignment import Seconds, align_words, seconds, token_times
from oasr_core.decoding.base import Hypotheses, Hypothesis, TokenSpan
from oasr_core.decoding.endpoint import cut
from oasr_core.errors import PluginContractError
from oasr_core.request import DecodingOptions, FinishReason, RequestOutput, Segment, WordTiming
from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer


class TextState:
    """The incremental text of one stream (:meth:`OutputProcessor.open`)."""

    def __init__(self, decoder: IncrementalDecoder, stable_decoder: IncrementalDecoder) -> None:
        self.decoder = decoder
        self.stable_decoder = stable_decoder
        self.text = ""
        self.stable_chars = 0
        self.stable_tokens = 0
        self.tokens: list[int] = []
        self.frames: list[int] = []
        self.timestamps: list[float] = []

    def show_in(self, output: RequestOutput) -> None:
        """Put what the partials have shown so far into a terminal output that comes before the end."""
        output.text, output.stable_prefix_chars = self.text, self.stable_chars
        output.tokens, output.nbest_texts = [list(self.tokens)], [self.text]


class OutputProcessor:
    """Makes :class:`RequestOutput` of :class:`Hypotheses`; every list of an output belongs to that output alone."""

    def __init__(self, tokenizer: Tokenizer, frame_seconds: float, *, hold_unstable: bool = False) -> None:
        """``frame_seconds`` are the seconds from one encoder frame to the next.

        ``hold_unstable``: partials show only what is never taken back.
        """
        self.tokenizer = tokenizer
        self.frame_seconds = frame_seconds
        self.hold_unstable = hold_unstable

    def open(self) -> TextState:
        """Begin the text of one stream."""
        return TextState(self.tokenizer.incremental(), self.tokenizer.incremental())

    def partial(self, state: TextState, request_id: str, hyps: Hypotheses, options: DecodingOptions) -> RequestOutput:
        """The transcript so far: text, tokens and their times, score of the best hypothesis.

        Only tokens that are new since the last partial are decoded, unless the hypothesis was revised. A character
        that lacks a token is left out. Words, segments, confidence and further hypotheses come with the final.
        """
        best = hyps.best
        self._advance_stable(state, best.tokens[: hyps.stable_tokens])
        shown = hyps.stable_tokens if self.hold_unstable else len(best.tokens)
        self._advance_text(state, best.tokens[:shown])
        self._advance_times(state, None if best.frames is None else best.frames[:shown])
        return RequestOutput(
            request_id=request_id,
            text=state.text,
            stable_prefix_chars=state.stable_chars,
            tokens=[list(state.tokens)],
            scores=[float(best.score)],
            timestamps=list(state.timestamps) if best.frames is not None else None,
            nbest_texts=[state.text],
            language=hyps.language,
            no_speech_prob=_plain(hyps.no_speech_prob),
            unencoded_hotwords=list(hyps.unencoded_hotwords),
        )

    def final(
        self,
        request_id: str,
        hyps: Hypotheses,
        options: DecodingOptions,
        *,
        finish_reason: FinishReason,
        duration: float,
        boundaries: Sequence[int] = (),
    ) -> RequestOutput:
        """The terminal output of a request whose audio lasted ``duration`` seconds; no time lies beyond that.

        ``boundaries`` are the encoder frames at which segments ended.
        """
        best = hyps.best
        nbest = hyps.nbest[: options.n_best]
        texts = [self.tokenizer.decode(hyp.tokens) for hyp in nbest]
        times = self._times(best, duration)
        posteriors = _posteriors(best)
        words = self._words(texts[0], best, times, posteriors) if options.word_timestamps else None
        return RequestOutput(
            request_id=request_id,
            text=texts[0],
            tokens=[[int(token) for token in hyp.tokens] for hyp in nbest],
            scores=[float(hyp.score) for hyp in nbest],
            finished=True,
            is_segment_final=True,
            stable_prefix_chars=len(texts[0]),
            segments=self._final_segments(hyps, texts[0], times, words, boundaries, options, duration),
            words=words,
            timestamps=[start for start, _ in times] if times is not None else None,
            confidence=self._confidence(best, posteriors),
            nbest_texts=texts,
            language=hyps.language,
            language_prob=_plain(hyps.language_prob),
            reached_final=hyps.reached_final,
            no_speech_prob=_plain(hyps.no_speech_prob),
            unencoded_hotwords=list(hyps.unencoded_hotwords),
            consumed_seconds=_plain(hyps.consumed_seconds),
            temperature=_plain(hyps.temperature),
            finish_reason="length" if hyps.reached_cap and finish_reason == "stop" else finish_reason,
        )

    def segments(self, hyp: Hypothesis, options: DecodingOptions, duration: float) -> list[Segment]:
        """A finished part of a hypothesis, as one segment; none without text."""
        text = self.tokenizer.decode(hyp.tokens)
        times = self._times(hyp, duration)
        words = self._words(text, hyp, times, _posteriors(hyp)) if options.word_timestamps else None
        return _segments(text, times, words, duration)

    def _times(self, hyp: Hypothesis, duration: float) -> list[Seconds] | None:
        if hyp.frames is None:
            return None
        return token_times(hyp.frames, self.frame_seconds, duration, hyp.end_frames)

    def _confidence(self, best: Hypothesis, posteriors: Sequence[float] | None) -> float | None:
        """The mean posterior of the tokens that spell something."""
        if not posteriors:
            return None
        special = self.tokenizer.special_ids
        spelled = [each for token, each in zip(best.tokens, posteriors, strict=True) if token not in special]
        return fmean(spelled) if spelled else None

    def _final_segments(
        self,
        hyps: Hypotheses,
        text: str,
        times: Sequence[Seconds] | None,
        words: Sequence[WordTiming] | None,
        boundaries: Sequence[int],
        options: DecodingOptions,
        duration: float,
    ) -> list[Segment]:
        """Cut where endpoints were, else where the model says; else one."""
        if boundaries:
            return self._cut_segments(hyps.best, boundaries, options, duration)
        if hyps.segments is None:
            return _segments(text, times, words, duration)
        made = (self._marked_segment(hyps.best, span, options, times, duration) for span in hyps.segments)
        return [segment for segment in made if segment is not None]

    def _marked_segment(
        self,
        best: Hypothesis,
        span: TokenSpan,
        options: DecodingOptions,
        times: Sequence[Seconds] | None,
        duration: float,
    ) -> Segment | None:
        """A segment that the model marks, as long as its words where those are timed; ``None`` without text."""
        inside = slice(span.first, span.last)
        part = Hypothesis(best.tokens[inside])
        text = self.tokenizer.decode(part.tokens)
        if not text.strip():
            return None
        start, end = min(span.start, duration), min(span.end, duration)
        if not options.word_timestamps:
            return Segment(text, start, end)
        posteriors = _posteriors(best)
        own = None if posteriors is None else posteriors[inside]
        words = self._words(text, part, None if times is None else times[inside], own)
        if words:
            start, end = words[0].start, words[-1].end
        return Segment(text, start, end, tuple(words))

    def _cut_segments(
        self, best: Hypothesis, boundaries: Sequence[int], options: DecodingOptions, duration: float
    ) -> list[Segment]:
        return [segment for part in cut(best, boundaries) for segment in self.segments(part, options, duration)]

    def _advance_stable(self, state: TextState, tokens: Sequence[int]) -> None:
        new = [int(token) for token in tokens[state.stable_tokens :]]
        if new:
            state.stable_chars += len(state.stable_decoder.push(new))
            state.stable_tokens += len(new)

    def _advance_text(self, state: TextState, tokens: Sequence[int]) -> None:
        if tokens[: len(state.tokens)] != state.tokens:
            state.decoder, state.text, state.tokens = self.tokenizer.incremental(), "", []
        new = [int(token) for token in tokens[len(state.tokens) :]]
        if new:
            state.text += state.decoder.push(new)
            state.tokens += new

    def _advance_times(self, state: TextState, frames: Sequence[int] | None) -> None:
        frames = frames or []
        if frames[: len(state.frames)] != state.frames:
            state.frames, state.timestamps = [], []
        new = frames[len(state.frames) :]
        state.frames += new
        state.timestamps += [seconds(frame, self.frame_seconds) for frame in new]

    def _words(
        self, text: str, best: Hypothesis, times: Sequence[Seconds] | None, posteriors: Sequence[float] | None
    ) -> list[WordTiming]:
        if not best.tokens:
            return []
        if times is None:
            raise PluginContractError(
                "word_timestamps were asked for and the decode strategy gave tokens without frames; a strategy that "
                "has none must not list 'word_timestamps' in `honours`."
            )
        pieces = self.tokenizer.token_pieces(best.tokens)
        if "".join(pieces) != text:
            name = type(self.tokenizer).__name__
            raise PluginContractError(f"{name}.token_pieces must add up to decode: got {pieces!r} for {text!r}.")
        # A lone part of a character decodes to U+FFFD; a stripped token (special, leading space) to nothing.
        return align_words(text, pieces, times, posteriors, lambda i: bool(self.tokenizer.decode([best.tokens[i]])))


def _segments(
    text: str, times: Sequence[Seconds] | None, words: Sequence[WordTiming] | None, duration: float
) -> list[Segment]:
    """One segment, from the first token to the last (the whole audio where there are no times); none without text."""
    if not text.strip():
        return []
    start, end = (times[0][0], times[-1][1]) if times else (0.0, duration)
    return [Segment(text, start, end, tuple(words) if words is not None else None)]


def _posteriors(hyp: Hypothesis) -> list[float] | None:
    if hyp.token_log_probs is None:
        return None
    return [math.exp(min(log_prob, 0.0)) for log_prob in hyp.token_log_probs]


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
