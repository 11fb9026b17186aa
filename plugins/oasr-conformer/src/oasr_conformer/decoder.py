"""Attention decoders, teacher-forced: scores of given hypotheses in both directions."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from oasr_conformer.config import DecoderConfig
from oasr_conformer.layers import FeedForward
from oasr_core.errors import RequestRefusedError
from oasr_core.models.layers import LayerNorm, Linear, attention, length_bias, sinusoids


class _Attention(nn.Module):
    """Plain multi-head attention of ``x`` over ``memory``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = Linear(dim, dim)
        self.linear_k = Linear(dim, dim)
        self.linear_v = Linear(dim, dim)
        self.linear_out = Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
        """``residual + attention``; causal self-attention where ``bias`` is ``None``."""
        query = self._split(self.linear_q(x))
        key, value = self._split(self.linear_k(memory)), self._split(self.linear_v(memory))
        key, value = key.expand(len(x), -1, -1, -1), value.expand(len(x), -1, -1, -1)
        context = attention(query, key, value, bias=bias, causal=bias is None)
        return self.linear_out.add_to(residual, context.reshape(x.shape))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output, feed forward; pre-norm."""

    def __init__(self, config: DecoderConfig, dim: int) -> None:
        super().__init__()
        self.self_attn = _Attention(dim, config.attention_heads)
        self.src_attn = _Attention(dim, config.attention_heads)
        self.feed_forward = FeedForward(dim, config.linear_units, config.activation)
        self.norm1 = LayerNorm(dim, eps=config.norm_eps)
        self.norm2 = LayerNorm(dim, eps=config.norm_eps)
        self.norm3 = LayerNorm(dim, eps=config.norm_eps)

    def forward(self, x: Tensor, memory: Tensor, memory_bias: Tensor) -> Tensor:
        """``(batch, tokens, dim)`` to the same."""
        y = self.norm1(x)
        x = self.self_attn(y, y, x, None)
        x = self.src_attn(self.norm2(x), memory, x, memory_bias)
        return self.feed_forward(self.norm3(x), x)


class AttentionDecoder(nn.Module):
    """One direction. Parameter names are WeNet's."""

    def __init__(self, config: DecoderConfig, blocks: int, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.dim = dim
        self.embed = nn.ModuleList([nn.Embedding(vocab_size, dim)])
        self.decoders = nn.ModuleList(DecoderLayer(config, dim) for _ in range(blocks))
        self.after_norm = LayerNorm(dim, eps=config.norm_eps)
        self.output_layer = Linear(dim, vocab_size)

    def forward(self, memory: Tensor, memory_lengths: Tensor, tokens: Tensor) -> Tensor:
        """Log posteriors ``(batch, tokens, vocab)`` float32 of what follows each of ``tokens`` ``(batch, tokens)``."""
        if memory.stride(0) == 0:  # one utterance, expanded to its hypotheses: project it once
            memory = memory[:1]
        x = self.embed[0](tokens) * self.dim**0.5
        x = x + sinusoids(tokens.shape[1], self.dim, device=x.device).to(x.dtype)
        bias = length_bias(memory_lengths, memory.shape[1])
        for layer in self.decoders:
            x = layer(x, memory, bias)
        return F.log_softmax(self.output_layer(self.after_norm(x)).float(), dim=-1)


class BidirectionalDecoder(nn.Module):
    """A decoder from left to right and one from right to left."""

    def __init__(self, config: DecoderConfig, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.left_decoder = AttentionDecoder(config, config.num_blocks, dim, vocab_size)
        self.right_decoder = AttentionDecoder(config, config.reverse_num_blocks, dim, vocab_size)


class DecoderScorer:
    """Interface ``aed_scorer`` over either kind of decoder."""

    def __init__(
        self, decoder: AttentionDecoder | BidirectionalDecoder, *, sos_id: int, eos_id: int, reverse_weight: float
    ) -> None:
        self._left = decoder.left_decoder if isinstance(decoder, BidirectionalDecoder) else decoder
        self._right = decoder.right_decoder if isinstance(decoder, BidirectionalDecoder) else None
        self.sos_id = sos_id
        self.eos_id = eos_id
        self.reverse_weight = reverse_weight if self._right is not None else 0.0

    def score(self, hidden: Tensor, lengths: Tensor, hyps: Tensor, hyp_lengths: Tensor, *, reverse: bool) -> Tensor:
        """See :class:`~oasr_core.models.base.AedScorerInterface`.

        ``hidden`` may be one utterance expanded (``Tensor.expand``) over its hypotheses. Outputs past a row's
        ``hyp_lengths`` are garbage; they never reach valid ones, because the decoder is causal.
        """
        decoder = self._right if reverse else self._left
        if decoder is None:
            raise RequestRefusedError(
                "conformer: this checkpoint has no right-to-left decoder (decoder 'transformer'); use reverse_weight 0."
            )
        return cast(Tensor, decoder(hidden, lengths, hyps))
