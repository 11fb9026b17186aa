"""Predictors and joiner: building blocks of models that offer the interface ``transducer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oasr_core.models.base import TransducerJoiner, TransducerPredictor
from oasr_core.models.layers import Linear

LstmState = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Transducer:
    """What a model offers as its interface ``transducer`` (:class:`~oasr_core.models.base.TransducerInterface`)."""

    predictor: TransducerPredictor
    joiner: TransducerJoiner
    vocab_size: int
    blank_id: int = 0
    unk_id: int | None = None
    max_sym_per_frame: int = 1
    durations: tuple[int, ...] | None = None


class StatelessPredictor(nn.Module):
    """A predictor that sees the last ``context_size`` tokens alone: their embeddings, a grouped convolution, ReLU.

    The parameters are icefall's ``decoder.*``: ``embedding.weight`` ``(vocab, dim)`` and, from two tokens of context
    on, ``conv.weight`` ``(dim, 4, context_size)``; with one token the output is its embedding. The state is the tokens
    before the next one, ``(batch, context_size - 1)`` int64; before the start of the utterance they are -1, whose
    embedding is zero. See "RNN-transducer with stateless prediction network", Ghodsi et al. 2020.
    """

    _table: Tensor | None

    def __init__(self, vocab_size: int, dim: int, context_size: int) -> None:
        """``dim`` is a multiple of 4, the channels of a group."""
        super().__init__()
        self.context_size = context_size
        self.embedding = nn.Embedding(vocab_size, dim)
        if context_size > 1:
            self.conv = nn.Conv1d(dim, dim, context_size, groups=dim // 4, bias=False)
        self.register_buffer("_table", None, persistent=False)

    def prepare(self) -> None:
        """Tabulate what each token gives in each place of the context, which makes a step several times faster.

        To be called by the model's ``prepare``, behind the last change of the weights. The table has the size of the
        embedding, ``context_size`` times, and a row of zeros for what is before the start.
        """
        weight = self.embedding.weight.detach()
        if self.context_size == 1:
            places = weight[None]
        else:
            vocab, dim = weight.shape
            grouped, kernel = weight.view(vocab, dim // 4, 4), self.conv.weight.detach().view(dim // 4, 4, 4, -1)
            places = torch.einsum("vgi,goic->cvgo", grouped, kernel).reshape(self.context_size, vocab, dim)
        self._table = torch.cat([places, torch.zeros_like(places[:, :1])], dim=1)

    def init(self, batch: int) -> Tensor:
        """Nothing but what is before the start."""
        return torch.full((batch, self.context_size - 1), -1, device=self.embedding.weight.device)

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output for the context that ends in ``tokens``."""
        context = torch.cat([state, tokens[:, None]], dim=1)
        out = self._convolve(context) if self._table is None else self._look_up(self._table, context)
        return (out if self.context_size == 1 else out.relu()), context[:, 1:]

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        """Contexts of the chosen rows."""
        return state.index_select(0, rows)

    def concat(self, states: Sequence[Tensor]) -> Tensor:
        """All contexts."""
        return torch.cat(list(states))

    def _convolve(self, context: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(context.clamp(min=0)) * (context >= 0)[:, :, None]
        if self.context_size == 1:
            return embedded[:, 0]
        convolved: Tensor = self.conv(embedded.transpose(1, 2))
        return convolved[:, :, 0]

    def _look_up(self, table: Tensor, context: Tensor) -> Tensor:
        # -1 takes the last row, that of zeros.
        return table[torch.arange(self.context_size, device=context.device), context].sum(dim=1)


class LstmPredictor(nn.Module):
    """An LSTM over the embeddings of all tokens so far; ``embedding`` and ``lstm`` are its parameters.

    Blank is embedded only at the start of an utterance; the row of ``embedding`` for it is zero in models that were
    trained with a zero start vector. The state is hidden and cell, each ``(layers, batch, dim)``.
    """

    context_size = 1

    def __init__(self, vocab_size: int, dim: int, layers: int = 1, embedding_dim: int | None = None) -> None:
        """``vocab_size`` rows of ``embedding``, blank included; ``embedding_dim`` ``None``: as wide as the LSTM."""
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim or dim)
        self.lstm = nn.LSTM(embedding_dim or dim, dim, layers)

    def init(self, batch: int) -> LstmState:
        """Zeros."""
        zeros = self.embedding.weight.new_zeros(self.lstm.num_layers, batch, self.lstm.hidden_size)
        return zeros, zeros

    def step(self, tokens: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """One step of all layers."""
        out, (hidden, cell) = self.lstm(self.embedding(tokens)[None], state)
        return out[0], (hidden, cell)

    def select(self, state: LstmState, rows: Tensor) -> LstmState:
        """Hidden and cell of the chosen rows."""
        hidden, cell = state
        return hidden.index_select(1, rows), cell.index_select(1, rows)

    def concat(self, states: Sequence[LstmState]) -> LstmState:
        """All rows."""
        return torch.cat([hidden for hidden, _ in states], dim=1), torch.cat([cell for _, cell in states], dim=1)


class Joiner(nn.Module):
    """Adds the projections of both sides; tanh, and a linear layer to the labels.

    The parameters are icefall's ``joiner.*``: ``encoder_proj``, ``decoder_proj`` and ``output_linear``, with biases.
    ``outputs`` counts labels, and durations where the model has them. A model may pack it
    (:func:`oasr_core.models.layers.pack_modules`).
    """

    def __init__(self, encoder_dim: int, predictor_dim: int, joint_dim: int, outputs: int) -> None:
        super().__init__()
        self.encoder_proj = Linear(encoder_dim, joint_dim)
        self.decoder_proj = nn.Linear(predictor_dim, joint_dim)  # few rows at a time: packing would not pay
        self.output_linear = Linear(joint_dim, outputs)

    def project_encoder(self, hidden: Tensor) -> Tensor:
        """``(..., encoder_dim)`` to ``(..., joint_dim)``."""
        projected: Tensor = self.encoder_proj(hidden)
        return projected

    def project_predictor(self, out: Tensor) -> Tensor:
        """``(..., predictor_dim)`` to ``(..., joint_dim)``."""
        projected: Tensor = self.decoder_proj(out)
        return projected

    def joint(self, encoder: Tensor, predictor: Tensor) -> Tensor:
        """Logits float32, not normalised."""
        logits: Tensor = self.output_linear(torch.tanh(encoder + predictor))
        return logits.float()
