"""Logits in half precision: coarse where it does not matter, exact where tokens are chosen."""

from __future__ import annotations

import pytest
import torch

from oasr_whisper.projection import REFINED, VocabularyProjection, _Int8Product, _largest

VOCAB, DIM = 20000, 64


@pytest.fixture(scope="module")
def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("shape", [(1, DIM), (7, DIM), (2, 3, DIM)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])
def test_the_largest_are_exact(embedding, shape, scale):
    hidden = (scale * torch.randn(shape, generator=torch.Generator().manual_seed(2))).bfloat16()
    logits = VocabularyProjection(embedding, exact_ids=[0, 17])(hidden)
    exact = hidden.float() @ embedding.float().T
    torch.testing.assert_close(logits[..., [0, 17]], exact[..., [0, 17]], rtol=1e-5, atol=1e-4 * scale)
    assert logits.shape == (*shape[:-1], VOCAB)
    assert logits.dtype == torch.float32
    largest = exact.topk(REFINED // 2, dim=-1)
    torch.testing.assert_close(logits.gather(-1, largest.indices), largest.values, rtol=1e-5, atol=1e-4 * scale)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    spread = exact.std()
    assert (logits - exact).abs().max() < 0.08 * spread
    torch.testing.assert_close(logits.logsumexp(-1), exact.logsumexp(-1), rtol=0, atol=0.02 * max(1.0, float(spread)))


def test_rows_do_not_change_each_other(embedding):
    hidden = torch.randn(5, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    hidden[2] = 0.0
    hidden[3] *= 1000.0
    project = VocabularyProjection(embedding)
    together = project(hidden)
    for row in range(5):
        torch.testing.assert_close(together[row], project(hidden[row : row + 1])[0], rtol=1e-5, atol=1e-5)
    assert not together[2].any()


def test_a_row_of_nan_stays_its_own(embedding):
    hidden = torch.randn(3, DIM).bfloat16()
    hidden[1] = torch.nan
    logits = VocabularyProjection(embedding)(hidden)
    assert logits[1].isnan().any()
    assert logits[[0, 2]].isfinite().all()


def test_without_the_operators_the_plain_product_serves(embedding, monkeypatch):
    monkeypatch.setattr(_Int8Product, "is_served", staticmethod(lambda: False))
    hidden = torch.randn(2, DIM).bfloat16()
    logits = VocabularyProjection(embedding)(hidden)
    exact = hidden.float() @ embedding.float().T
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))


def test_single_precision_is_left_alone(embedding):
    wide, hidden = embedding.float(), torch.randn(3, DIM)
    torch.testing.assert_close(VocabularyProjection(wide)(hidden), hidden @ wide.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [40, 8191, 8192, 51864])
@pytest.mark.parametrize("count", [1, 32])
def test_the_largest_of_a_row_are_found(size, count):
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    values[0, -1] = 9.0
    found = values.gather(-1, _largest(values, count)).sort(-1).values
    assert torch.equal(found, values.topk(count, dim=-1).values.sort(-1).values)
