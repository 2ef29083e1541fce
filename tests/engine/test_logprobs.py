"""Log-probabilities: those of the whole row, whatever was asked of the sampler, and None where there are none."""

import math

import pytest
import torch

from splitserve.engine.logprobs import token_logprobs


@pytest.mark.parametrize("vocab", [1, 5, 384, 49152])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_not_those_of_a_softmax(vocab: int, num_top: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 4 + 30
    expected = torch.log_softmax(logits, -1)
    found = token_logprobs(logits, vocab // 2, num_top)
    assert found is not None
    assert found.logprob == pytest.approx(float(expected[vocab // 2]), abs=1e-5)
    top = expected.topk(min(num_top, vocab))
    assert found.top_ids == tuple(top.indices.tolist())
    assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    if vocab // 2 in found.top_ids:
        assert found.top_logprobs[found.top_ids.index(vocab // 2)] == found.logprob


def test_order_of_equals_is_left_to_chance() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 1.0])
    found = token_logprobs(logits, 0, 4)
    assert found is not None
    assert found.top_ids == (1, 2, 4, 0)


def test_excluded_token_has_a_finite_logprob() -> None:
    logits = torch.tensor([0.0, -math.inf, 0.0])
    found = token_logprobs(logits, 1, 3)
    assert found is not None
    assert found.logprob == -math.inf
    assert found.top_ids == (0, 2, 1)
    assert found.top_logprobs == pytest.approx([-math.log(2), -math.log(2), -math.inf])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row_without_a_distribution_gives_numbers(bad: float) -> None:
    """C62."""
    logits = torch.zeros(50)
    logits[7] = bad
    assert token_logprobs(logits, 3, 2) is None
    assert token_logprobs(torch.full((50,), -math.inf), 3, 2) is None
