"""What a benchmark lets the engine compute: decode steps on KV that was never computed, prompts of random ids.

Called by the engine's and the GPU's benchmark. Pure but for `fill_with_noise`, which writes the pool.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch

from splitserve.engine.batch import Segment
from splitserve.engine.runner import ModelRunner
from splitserve.service.errors import InvalidRequest

BLOCK_SIZE = 16

_DECODE = "1x128,1x1024,1x4096,8x128,8x1024,8x4096,32x128,32x1024,32x4096"
_PREFILL = "256,2048,8000"


@dataclass(frozen=True)
class Case:
    """A decode step of `batch` sequences of `context` tokens each, the new one included, or one prompt's prefill."""

    kind: Literal["decode", "prefill"]
    batch: int
    context: int

    def __str__(self) -> str:
        return f"decode {self.batch}x{self.context}" if self.kind == "decode" else f"prefill {self.context}"

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Of each, how many new tokens are computed, and its length with them."""
        return [(1 if self.kind == "decode" else self.context, self.context)] * self.batch

    @property
    def num_logit_rows(self) -> int:
        return self.batch


def choose_cases(decode: str | None, prefill: str | None, max_model_len: int) -> list[Case]:
    """From lists such as "1x128,8x1024" and "256,2048"; "" means none, None the usual ones that fit the model.

    InvalidRequest for what is no such list, for a case that is too long for the model, and where nothing is left.
    """
    cases = [Case("decode", *_numbers(item, r"(\d+)x(\d+)")) for item in _items(decode, _DECODE)]
    cases += [Case("prefill", 1, *_numbers(item, r"(\d+)")) for item in _items(prefill, _PREFILL)]
    asked = {"decode": decode, "prefill": prefill}
    for case in cases:
        if case.context > max_model_len and asked[case.kind] is not None:
            raise InvalidRequest(f"{case}: the model's context is {max_model_len} tokens", field=case.kind)
    fitting = [case for case in cases if case.context <= max_model_len]
    if not fitting:
        raise InvalidRequest("there is nothing to measure: no case of --decode and --prefill is left")
    return fitting


def _items(asked: str | None, default: str) -> list[str]:
    return [item.strip() for item in (default if asked is None else asked).split(",") if item.strip()]


def _numbers(item: str, pattern: str) -> list[int]:
    match = re.fullmatch(pattern, item)
    if match is None or not all(int(number) for number in match.groups()):
        raise InvalidRequest(f"{item!r} is no case: --decode 8x1024 is sequences x context, --prefill 2048 is tokens")
    return [int(number) for number in match.groups()]


def fill_with_noise(runner: ModelRunner) -> None:
    """Ordinary numbers in every page of the pool: fresh pages would all be one page of zeros."""
    tensor = runner.pool.tensor
    tensor.copy_(torch.randn(tensor.shape[1:], device=tensor.device).to(tensor.dtype))


def decode_segments(runner: ModelRunner, batch: int, context: int) -> list[Segment]:
    """One new token for each of `batch` sequences whose blocks lie anywhere in the pool, as after hours of serving."""
    generator = torch.Generator().manual_seed(batch)
    blocks = torch.randperm(runner.pool.num_blocks, generator=generator).tolist()
    token_ids = torch.randint(runner.vocab_size, (batch, 1), generator=generator).tolist()
    per_sequence = runner.layout.blocks_for(context)
    return [
        Segment(
            token_ids=token_ids[index],
            start=context - 1,
            block_table=blocks[index * per_sequence : (index + 1) * per_sequence],
            wants_logits=True,
        )
        for index in range(batch)
    ]


def prefill_chunks(runner: ModelRunner, num_tokens: int, chunk: int) -> list[Segment]:
    """One prompt, as the prefill worker computes it when it is alone: `chunk` tokens to a forward."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(runner.vocab_size, (num_tokens,), generator=generator).tolist()
    table = range(runner.layout.blocks_for(num_tokens))
    return [
        Segment(ids[start : start + chunk], start, table, wants_logits=start + chunk >= num_tokens)
        for start in range(0, num_tokens, chunk)
    ]
