"""The decoder behind ``aed``: against a plain implementation, token by token, with shared memory, and its contract."""

from __future__ import annotations

import pytest
import torch

from oasr_core.cache.decoder_kv import DenseDecoderCache
from oasr_core.errors import CheckpointError, RequestRefusedError
from oasr_core.models.base import AedInterface, EncoderBatch
from oasr_core.registry import registry
from oasr_whisper.config import WhisperConfig
from oasr_whisper.model import WhisperModel

TOKENS = torch.tensor([[10, 11, 14, 3, 7], [10, 12, 13, 4, 4]])


@pytest.fixture(scope="module")
def features():
    torch.manual_seed(2)
    return torch.randn(2, 100, 5)


@pytest.fixture(scope="module")
def memory(tiny, features):
    with torch.inference_mode():
        out = tiny.encoder.encode(EncoderBatch(features, torch.tensor([100, 40])))
        return tiny.interfaces["aed"].memory(out.hidden, out.lengths)


@pytest.fixture(scope="module")
def expected(reference, features):
    """Logits and scores of the plain network, row by row."""
    return [reference.decode(row, reference.encode(audio)) for row, audio in zip(TOKENS, features, strict=True)]


def run(head, tokens, memory, pieces):
    """Logits of ``tokens`` fed in pieces of these sizes."""
    dtype = memory[0].dtype
    cache = DenseDecoderCache(head.kv, len(tokens), dtype=dtype, device=torch.device("cpu"))
    out = []
    with torch.inference_mode():
        for piece in tokens.split(pieces, dim=1):
            step = cache.begin(piece.shape[1])
            out.append(head.logits(head.step(piece, step, memory)))
            cache.commit(step)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("pieces", [[5], [1, 1, 1, 1, 1], [2, 1, 2]])
def test_logits_equal_the_plain_network(tiny, memory, expected, pieces):
    logits = run(tiny.interfaces["aed"], TOKENS, memory, pieces)
    assert logits.dtype == torch.float32
    for row, (wanted, _) in enumerate(expected):
        torch.testing.assert_close(logits[row], wanted, atol=1e-4, rtol=0)


def test_several_hypotheses_share_the_memory_of_their_request(tiny, memory):
    head = tiny.interfaces["aed"]
    rows = torch.tensor([[10, 3, 5], [10, 4, 6], [10, 5, 1], [10, 1, 2], [10, 2, 2], [10, 7, 8]])
    shared = run(head, rows, memory, [2, 1])
    alone = run(head, rows, tuple(tensor.repeat_interleave(3, dim=0) for tensor in memory), [2, 1])
    torch.testing.assert_close(shared, alone, atol=2e-5, rtol=0)


def test_cross_scores_are_those_of_the_alignment_heads_in_their_order(tiny, memory, expected):
    head = tiny.interfaces["aed"]
    assert head.tokens.alignment_heads == ((2, 1), (1, 0))
    with torch.inference_mode():
        scores = head.cross_scores(TOKENS, memory)
    assert scores.shape == (2, 2, 5, 50)
    assert scores.dtype == torch.float32
    for row, (_, wanted) in enumerate(expected):
        torch.testing.assert_close(scores[row], torch.stack([wanted[2, 1], wanted[1, 0]]), atol=1e-4, rtol=0)


def test_more_tokens_than_positions_cannot_be_aligned(tiny, memory):
    with pytest.raises(RequestRefusedError, match=r"13 tokens are to be aligned.*12 positions"):
        tiny.interfaces["aed"].cross_scores(torch.full((2, 13), 3), memory)


def test_memory_is_one_entry_a_request_of_the_stated_size(tiny, memory):
    head = tiny.interfaces["aed"]
    assert isinstance(head, AedInterface)
    assert all(tensor.shape[0] == 2 and tensor.is_contiguous() for tensor in memory)
    assert sum(tensor[0].numel() for tensor in memory) == head.memory_elements
    assert (head.kv.layers, head.kv.kv_heads, head.kv.head_dim) == (3, 2, 8)
    assert (head.vocab_size, head.max_positions) == (tiny.vocab_size, 12)


def test_half_precision_logits_break_ties_as_float32_does(hf, load):
    head = load(hf.convert(), torch.bfloat16).interfaces["aed"]
    torch.manual_seed(3)
    hidden = (torch.randn(4, 1, 16) * 40).bfloat16()
    wanted = hidden.float() @ hf.weights["model.decoder.embed_tokens.weight"].bfloat16().float().T
    logits = head.logits(hidden)
    best = wanted.topk(32, dim=-1).indices[..., :16]
    torch.testing.assert_close(logits.gather(-1, best), wanted.gather(-1, best), atol=1e-3, rtol=0)
    assert (logits - wanted).abs().max() < wanted.abs().max() / 100


def test_it_is_registered():
    assert registry("models").get("whisper") is WhisperModel


def test_preparing_twice_changes_nothing(tiny, memory):
    before = run(tiny.interfaces["aed"], TOKENS, memory, [5])
    tiny.prepare()
    assert torch.equal(before, run(tiny.interfaces["aed"], TOKENS, memory, [5]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimm": 3}, "Unknown key 'dimm'. Did you mean 'dim'"),
        ({"encoder_heads": 3}, "dim 16 is no multiple of encoder_heads 3"),
        ({"vocab_size": 12}, "token ids .* lie outside of the vocabulary of 12"),
        ({"decoder_layers": 2}, r"alignment_heads \[\(2, 1\)\] do not exist"),
        ({"tokens": {"alignment_heads": []}}, "alignment_heads is empty"),
        ({"tokens": {"sott": 3}}, "Unknown key 'tokens.sott'. Did you mean 'sot'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(hf, change, message):
    config = dict(hf.convert().config)
    config |= {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        WhisperModel.from_config(config)


def test_a_configuration_is_json_and_reads_back(hf):
    config = hf.convert().config
    assert WhisperConfig.parse(config).model_dump(mode="json") == config
