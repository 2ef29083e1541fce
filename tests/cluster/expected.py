"""What a cluster has to answer, by one process without company, hand-off and prefix cache.

In float32 that is transformers. In another dtype transformers rounds differently, so there it is our own runner, which
computes every token of a text anew, in one forward and in blocks that nobody else has. So it is in float32 for the rare
draw that lies closer to the border between two tokens than the two round, which is checked.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.client.types import Generation, TokenLogprobs
from splitserve.engine.batch import Segment
from splitserve.engine.loading import load_runner
from splitserve.engine.runner import ModelRunner
from splitserve.engine.sampling_params import SamplingParams
from splitserve.models.cache import cache_root
from tests.compiled import KERNEL_FOLDER
from tests.reference import follows, logits

# Options of a request that change nothing of what is chosen.
_ELSEWHERE = ("prompt_logprobs", "request_id", "timeout", "reader")
# How far logits of transformers and ours are apart in float32, at most.
_ROUNDING = 1e-4


class Reference:
    """Of the model in `directory` as a worker with this dtype has it."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        self._directory = directory
        self._dtype = dtype

    def check(self, prompt: Sequence[int], answer: Generation, options: dict[str, Any]) -> None:
        """The whole text of a request with these options and without a stop, and its logprobs if they are asked for."""
        params = _params(options)
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == params.max_tokens
        tokens, chosen = [*prompt, *answer.token_ids], list(answer.token_ids)
        rows = self._rows(tokens)
        if self._dtype == "float32" and chosen != follows(rows[len(prompt) - 1 : -1], prompt, chosen, params):
            own = self._own_rows(tokens)
            assert torch.allclose(rows, own, rtol=0.0, atol=_ROUNDING)
            rows = own
        outputs = rows[len(prompt) - 1 : -1]
        assert chosen == follows(outputs, prompt, chosen, params)
        _check_logprobs(answer.logprobs, answer.token_ids, outputs, params.logprobs)
        num_top = options.get("prompt_logprobs")
        if num_top is not None:
            assert answer.prompt_logprobs[0] == TokenLogprobs(prompt[0], None, {})
        _check_logprobs(answer.prompt_logprobs[1:], prompt[1:], rows[: len(prompt) - 1], num_top)

    @cached_property
    def runner(self) -> ModelRunner:
        return load_runner(
            self._directory,
            dtype=self._dtype,
            device="cpu",
            block_size=16,
            kv_cache_bytes=16 << 20,
            kernel_folder=KERNEL_FOLDER,
            selftest_folder=cache_root() / "self-tests",
        )

    def _rows(self, tokens: list[int]) -> torch.Tensor:
        """Float32 `[tokens, vocab]`: the logits after each token."""
        return logits(self._directory, tokens) if self._dtype == "float32" else self._own_rows(tokens)

    def _own_rows(self, tokens: list[int]) -> torch.Tensor:
        blocks = range(self.runner.layout.blocks_for(len(tokens)))
        return self.runner.run([Segment(tokens, 0, blocks, wants_logits=True, wants_all_logits=True)])


def _params(options: dict[str, Any]) -> SamplingParams:
    chosen = {"ignore_eos": True} | {name: value for name, value in options.items() if name not in _ELSEWHERE}
    return SamplingParams(**(chosen | {"logit_bias": tuple(chosen.get("logit_bias", {}).items())}))


def _check_logprobs(
    entries: Sequence[TokenLogprobs], token_ids: Sequence[int], rows: torch.Tensor, num_top: int | None
) -> None:
    if num_top is None:
        assert not entries
        return
    assert [entry.token_id for entry in entries] == list(token_ids)
    likeliest = rows.sort(dim=-1, descending=True, stable=True).indices  # of equals the lower id
    for entry, row, top in zip(entries, torch.log_softmax(rows, -1), likeliest[:, :num_top].tolist(), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert list(entry.top) == top
        assert list(entry.top.values()) == pytest.approx(row[top].tolist(), abs=1e-4)
