"""Whisper's decoder, behind the interface ``aed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.errors import RequestRefusedError
from oasr_core.models.base import DecoderKV, DecoderMemory, DecoderState
from oasr_core.models.layers import LayerNorm, Linear, attention
from oasr_whisper.config import WhisperConfig
from oasr_whisper.encoder import NORM_EPS
from oasr_whisper.projection import VocabularyProjection


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and feed forward, each behind a norm; keys of the audio come ready."""

    __call__: Callable[..., Tensor]

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.self_norm = LayerNorm(dim, eps=NORM_EPS)
        self.self_qkv = Linear(dim, 3 * dim)
        self.self_out = Linear(dim, dim)
        self.cross_norm = LayerNorm(dim, eps=NORM_EPS)
        self.cross_query = Linear(dim, dim)
        self.cross_out = Linear(dim, dim)
        self.ffn_norm = LayerNorm(dim, eps=NORM_EPS)
        self.ffn_in = Linear(dim, ffn_dim, activation="gelu")
        self.ffn_out = Linear(ffn_dim, dim)

    def forward(self, x: Tensor, index: int, state: DecoderState, key: Tensor, value: Tensor) -> Tensor:
        """``x`` ``(rows, n, dim)`` to the same; ``key``, ``value`` ``(requests, heads, frames, head_dim)``."""
        x = self.attend_tokens(x, index, state)
        return self.attend_audio(x, self.query(x, len(key)), key, value)

    def attend_tokens(self, x: Tensor, index: int, state: DecoderState) -> Tensor:
        """The part before the cross-attention."""
        rows, tokens, _ = x.shape
        qkv = self.self_qkv(self.self_norm(x)).view(rows, tokens, 3, self.heads, self.head_dim)
        context = state.attend(index, *qkv.unbind(2))
        return self.self_out.add_to(x, context.reshape(x.shape))

    def query(self, x: Tensor, requests: int) -> Tensor:
        """Queries of the cross-attention, ``(requests, heads, rows / requests * n, head_dim)``.

        All tokens that share a request's keys lie side by side, so that the keys are read once.
        """
        query = self.cross_query(self.cross_norm(x))
        return cast(Tensor, query.view(requests, -1, self.heads, self.head_dim).transpose(1, 2))

    def attend_audio(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Cross-attention for what :meth:`query` gives, and the feed forward."""
        context = F.scaled_dot_product_attention(query, key, value)
        x = self.cross_out.add_to(x, context.transpose(1, 2).reshape(x.shape))
        return self.ffn_out.add_to(x, self.ffn_in(self.ffn_norm(x)))


class WhisperDecoder(nn.Module):
    """Token and position embeddings, layers, and the projection of the audio to the keys and values of all layers."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.decoder_heads, config.dim // config.decoder_heads
        self.embedding = nn.Parameter(torch.zeros(config.vocab_size, config.dim))
        self.positions = nn.Parameter(torch.zeros(config.max_target_positions, config.dim))
        self.layers = nn.ModuleList(
            DecoderLayer(config.dim, config.decoder_heads, config.decoder_ffn_dim) for _ in range(config.decoder_layers)
        )
        self.norm = LayerNorm(config.dim, eps=NORM_EPS)
        #: Keys and values of the layers one after the other: ``(layers * 2 * dim, dim)``.
        self.cross_kv = Linear(config.dim, 2 * config.decoder_layers * config.dim)
        self.projection: VocabularyProjection | None = None
        self._exact_ids = (config.tokens.no_speech,)

    def tie(self) -> None:
        """Give the output projection a form of its own; lookups go on using the embedding."""
        self.projection = VocabularyProjection(self.embedding.detach(), self._exact_ids)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``tokens``, ``positions`` ``(rows, n)`` to ``(rows, n, dim)``."""
        return F.embedding(tokens, self.embedding).add_(F.embedding(positions, self.positions))


class AedHead:
    """Interface ``aed`` of a :class:`WhisperDecoder`.

    The memory of a request is a key and a value for each layer, ``(heads, frames, head_dim)``, over all frames of the
    window: the model was trained to find the end of the speech by itself.
    """

    def __init__(self, decoder: WhisperDecoder, config: WhisperConfig) -> None:
        self._decoder = decoder
        #: Ids with a meaning, and what a prompt is made of (:class:`~oasr_whisper.config.WhisperTokens`).
        self.tokens = config.tokens
        self.kv = DecoderKV(config.decoder_layers, config.decoder_heads, config.dim // config.decoder_heads)
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_target_positions
        self.memory_elements = 2 * config.decoder_layers * config.dim * config.max_source_positions

    def memory(self, hidden: Tensor, lengths: Tensor) -> DecoderMemory:
        """``hidden`` ``(requests, frames, dim)`` to keys and values ``(requests, heads, frames, head_dim)`` by layer.

        All frames are kept, whatever ``lengths`` says.
        """
        decoder = self._decoder
        requests, frames, _ = hidden.shape
        parts = 2 * self.kv.layers
        memory = tuple(hidden.new_empty(requests, decoder.heads, frames, decoder.head_dim) for _ in range(parts))
        # One request's projection is still in the cache of a CPU when it is put into order.
        at_once = 1 if hidden.device.type == "cpu" else max(1, requests)
        for start in range(0, requests, at_once):
            rows = slice(start, start + at_once)
            projected = decoder.cross_kv(hidden[rows]).view(-1, frames, parts, decoder.heads, decoder.head_dim)
            for part, tensor in enumerate(memory):
                tensor[rows] = projected[:, :, part].transpose(1, 2)
        return memory

    def step(self, tokens: Tensor, state: DecoderState, memory: DecoderMemory) -> Tensor:
        """``tokens`` ``(rows, n)`` int64 to hidden states ``(rows, n, dim)`` behind the final norm."""
        decoder = self._decoder
        x = decoder.embed(tokens, state.positions())
        for index, layer in enumerate(decoder.layers):
            x = layer(x, index, state, memory[2 * index], memory[2 * index + 1])
        return decoder.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """``(..., dim)`` to ``(..., vocab)`` float32: products with the token embeddings."""
        projection = self._decoder.projection
        return F.linear(hidden, self._decoder.embedding).float() if projection is None else projection(hidden)

    def cross_scores(self, tokens: Tensor, memory: DecoderMemory) -> Tensor:
        """Scores of ``tokens.alignment_heads``, in their order: ``(rows, heads, n, frames)`` float32.

        ``tokens`` ``(rows, n)`` int64, each row from its first position; ``RequestRefusedError`` where a row is longer
        than the decoder's positions.
        """
        rows, count = tokens.shape
        if count > self.max_positions:
            raise RequestRefusedError(
                f"{count} tokens are to be aligned; this model's decoder has {self.max_positions} positions."
            )
        decoder, heads = self._decoder, self.tokens.alignment_heads
        positions = torch.arange(count, device=tokens.device).expand(rows, count)
        state = _WholeSequence(positions)
        x = decoder.embed(tokens, positions)
        scores: dict[tuple[int, int], Tensor] = {}
        layers = cast(Sequence[DecoderLayer], decoder.layers)
        for index, layer in enumerate(layers[: max(layer for layer, _ in heads) + 1]):
            key, value = memory[2 * index], memory[2 * index + 1]
            x = layer.attend_tokens(x, index, state)
            query = layer.query(x, len(key))
            for head in {head for at, head in heads if at == index}:
                scores[index, head] = _scores(query[:, head], key[:, head]).view(rows, count, -1)
            x = layer.attend_audio(x, query, key, value)
        return torch.stack([scores[pair] for pair in heads], dim=1)


class _WholeSequence:
    """The state of rows that are given whole, from their first position: nothing is kept."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def positions(self) -> Tensor:
        return self._positions

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, causal=True)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Scaled scores of one head in float32: ``(requests, n, head_dim)``, ``(requests, frames, head_dim)``."""
    return torch.matmul(query.float() * query.shape[-1] ** -0.5, key.float().transpose(1, 2))
