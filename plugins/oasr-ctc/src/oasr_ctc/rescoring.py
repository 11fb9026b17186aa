"""The decode strategy ``ctc_aed_rescoring``: attention decoders, teacher-forced, choose among the CTC n-best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Hypotheses, Hypothesis, Mode, NoOptions
from oasr_core.errors import ConfigError, PluginContractError, RequestRefusedError
from oasr_core.models.base import AedScorerInterface, EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_ctc.greedy import InvalidLogProbsError
from oasr_ctc.options import CtcOptions
from oasr_ctc.strategy import CtcStrategy

#: Most log posteriors (hypotheses x tokens x vocabulary) that one pass of a decoder makes: 512 MiB of float32. Only a
#: micro-batch of very long transcripts needs a second pass.
MAX_LOG_PROBS = 1 << 27


class CtcAedRescoringOptions(CtcOptions):
    """How the CTC n-best are searched (options of ``ctc``) and how they are scored again."""

    search: Literal["beam"] = Field(default="beam", description="Prefix beam search gives the n best.")
    nbest: int | None = Field(default=None, ge=1, description="Hypotheses scored again; None takes beam_size.")
    ctc_weight: float = Field(default=0.5, ge=0.0, allow_inf_nan=False, description="Weight of the CTC score.")
    reverse_weight: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of the right-to-left decoder; None takes the trained one, 0 leaves that decoder out.",
    )
    demote_empty_hyps: bool = Field(default=False, description="Rank the empty hypothesis behind all others.")


class CtcAedRescoringStrategy(DecodeStrategy):
    """Searches the CTC n-best and ranks them by what the attention decoders make of them.

    A hypothesis is scored left to right, ``l`` (its tokens, then eos), and right to left, ``r`` (its tokens reversed,
    then eos), both as sums of log posteriors: ``(1 - reverse_weight) * l + reverse_weight * r + ctc_weight * ctc``,
    without a length normalisation. The highest wins, of equal ones the better by CTC. Frames are those of the CTC
    search; a token's posterior is the mean of what the two decoders give it. Whole utterances only.
    """

    oasr_api = "1.0"
    requires = ("ctc", "aed_scorer")
    consumes = "both"
    modes = ("offline",)
    honours = CtcStrategy.honours
    options_cls = CtcAedRescoringOptions
    request_options_cls = CtcStrategy.request_options_cls

    def __init__(self, context: DecodeContext) -> None:
        """Raises ``ConfigError`` for options that contradict each other or the checkpoint."""
        super().__init__(context)
        options = CtcAedRescoringOptions() if isinstance(context.options, NoOptions) else context.options
        if not isinstance(options, CtcAedRescoringOptions):
            raise PluginContractError(
                f"Strategy 'ctc_aed_rescoring' was given options of type {type(options).__name__}; it takes "
                "CtcAedRescoringOptions."
            )
        self.nbest = options.beam_size if options.nbest is None else options.nbest
        if self.nbest > options.beam_size:
            raise ConfigError(
                f"Decode option nbest={options.nbest} of strategy 'ctc_aed_rescoring': the search keeps "
                f"beam_size={options.beam_size} hypotheses; lower nbest or raise beam_size."
            )
        self._scorer: AedScorerInterface = context.model.interfaces["aed_scorer"]
        trained = float(self._scorer.reverse_weight)
        self.reverse_weight = trained if options.reverse_weight is None else options.reverse_weight
        if self.reverse_weight > 0.0 and trained == 0.0:
            raise ConfigError(
                f"Decode option reverse_weight={self.reverse_weight} of strategy 'ctc_aed_rescoring': this checkpoint "
                "has no trained right-to-left decoder; leave reverse_weight unset or give 0."
            )
        self._ctc_weight = options.ctc_weight
        self._demote_empty = options.demote_empty_hyps
        self._vocab_size = int(context.model.interfaces["ctc"].vocab_size)
        self._ctc: DecodeStrategy = CtcStrategy(replace(context, options=options))

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse streams, more hypotheses than are scored, and what ``ctc`` refuses."""
        if mode == "streaming":
            raise RequestRefusedError(
                "decode strategy 'ctc_aed_rescoring' refuses streams: the decoders score whole utterances; send the "
                "audio offline, or use decode method 'ctc'."
            )
        if options.n_best > self.nbest:
            raise RequestRefusedError(
                f"n_best={options.n_best} is refused by decode strategy 'ctc_aed_rescoring': {self.nbest} hypotheses "
                "are scored; ask for no more, or raise the decode options beam_size and nbest."
            )
        self._ctc.validate(options, mode)

    @torch.inference_mode()
    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Search all rows, then score the hypotheses of all rows together, once in each direction.

        Raises :class:`~oasr_ctc.greedy.InvalidLogProbsError` with the rows at fault where a score is NaN.
        """
        wide = [wanted.model_copy(update={"n_best": self.nbest}) for wanted in options]
        found = self._ctc.decode_offline(out, wide)
        lists = [hyps.nbest[: self.nbest] for hyps in found]
        scores = score_hypotheses(
            self._scorer, self._vocab_size, out.hidden, out.lengths, lists, reverse=self.reverse_weight > 0.0
        )
        ranked = [self._ranked(nbest, again, row) for row, (nbest, again) in enumerate(zip(lists, scores, strict=True))]
        return [
            replace(hyps, nbest=nbest, stable_tokens=len(nbest[0].tokens))
            for hyps, nbest in zip(found, ranked, strict=True)
        ]

    def _ranked(self, nbest: Sequence[Hypothesis], scores: Sequence[AedScore], row: int) -> list[Hypothesis]:
        """The hypotheses of a row with their fused scores, best first; the order of CTC decides between equals."""
        fused = [self._fuse(hyp, score) for hyp, score in zip(nbest, scores, strict=True)]
        if any(math.isnan(hyp.score) for hyp in fused):
            raise InvalidLogProbsError(
                f"Scores of the attention decoders for batch row {row} are NaN; finite values or -inf are allowed. The "
                "decoder overflowed or its weights are not finite: check the checkpoint, or use dtype='float32'.",
                [row],
            )
        return sorted(fused, key=lambda hyp: (self._demote_empty and not hyp.tokens, -hyp.score))

    def _fuse(self, hyp: Hypothesis, score: AedScore) -> Hypothesis:
        total, posteriors = float(score.left.sum()), np.exp(score.left[:-1])
        if score.right is not None:
            total = (1.0 - self.reverse_weight) * total + self.reverse_weight * float(score.right.sum())
            posteriors = (posteriors + np.exp(score.right[:-1])) / 2.0
        if self._ctc_weight > 0.0:  # a weight of zero leaves out even a score of -inf
            total += self._ctc_weight * hyp.score
        with np.errstate(divide="ignore"):
            log_posteriors = np.log(posteriors).tolist()
        return replace(hyp, token_log_probs=log_posteriors, score=total)


class AedScore(NamedTuple):
    """Log posteriors, float64, of one hypothesis' tokens in their order, then of eos; ``right`` as the option asks."""

    left: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64] | None


def score_hypotheses(
    scorer: AedScorerInterface,
    vocab_size: int,
    hidden: Tensor,
    lengths: Tensor,
    nbests: Sequence[Sequence[Hypothesis]],
    *,
    reverse: bool,
) -> list[list[AedScore]]:
    """Score every hypothesis of every row, teacher-forced, left to right and with ``reverse`` right to left as well.

    ``hidden`` ``(batch, frames, dim)``, ``lengths`` ``(batch,)`` encoder frames; ``nbests[row]`` the hypotheses of that
    row. Frames past a row's length may hold anything. ``vocab_size`` log posteriors are made for each token.
    """
    device = hidden.device
    lengths = lengths.to(device)
    # A weight of zero does not silence NaN in what lies behind a row's end.
    past = torch.arange(hidden.shape[1], device=device) >= lengths[:, None]
    hidden = hidden.masked_fill(past[:, :, None], 0.0)
    owners = torch.tensor([row for row, nbest in enumerate(nbests) for _ in nbest], device=device)
    tokens = [hyp.tokens for nbest in nbests for hyp in nbest]
    left = _score(scorer, vocab_size, hidden, lengths, owners, tokens, reverse=False)
    right: list[npt.NDArray[np.float64] | None] = [None] * len(tokens)
    if reverse:
        backwards = _score(scorer, vocab_size, hidden, lengths, owners, [hyp[::-1] for hyp in tokens], reverse=True)
        right = [np.concatenate([scores[-2::-1], scores[-1:]]) for scores in backwards]
    flat = map(AedScore, left, right)
    return [[next(flat) for _ in nbest] for nbest in nbests]


def _score(
    scorer: AedScorerInterface,
    vocab_size: int,
    hidden: Tensor,
    lengths: Tensor,
    owners: Tensor,
    tokens: Sequence[Sequence[int]],
    *,
    reverse: bool,
) -> list[npt.NDArray[np.float64]]:
    """For each hypothesis the log posteriors of ``tokens``, as they stand, then of eos; ``owners`` are their rows."""
    sizes = [len(hyp) + 1 for hyp in tokens]
    targets = torch.full((len(tokens), max(sizes)), scorer.eos_id, dtype=torch.int64)
    for place, hyp in enumerate(tokens):
        targets[place, : len(hyp)] = torch.tensor(hyp, dtype=torch.int64)
    targets = targets.to(hidden.device)
    inputs = torch.cat([targets.new_full((len(tokens), 1), scorer.sos_id), targets[:, :-1]], dim=1)
    hyp_lengths = torch.tensor(sizes, device=hidden.device)
    picked = []
    width = max(1, MAX_LOG_PROBS // (max(sizes) * vocab_size))
    for start in range(0, len(tokens), width):
        part = slice(start, start + width)
        owner = owners[part]
        # The hypotheses of a lone utterance share its frames: a decoder may project those once.
        memory = hidden.expand(len(owner), -1, -1) if len(hidden) == 1 else hidden[owner]
        log_probs = scorer.score(memory, lengths[owner], inputs[part], hyp_lengths[part], reverse=reverse)
        picked.append(log_probs.gather(2, targets[part, :, None])[:, :, 0])
    rows = torch.cat(picked).cpu().numpy().astype(np.float64)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]
