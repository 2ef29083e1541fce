"""From logits to tokens that carry their position and their finish, the same way on prefill and decode workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitserve.engine.sampler import SampleRow, SamplingParams, sample
from splitserve.engine.stopping import finish_reason
from splitserve.worker import messages


def sampling_params(limits: messages.Limits) -> SamplingParams:
    return SamplingParams(
        temperature=limits.temperature,
        top_p=limits.top_p,
        top_k=limits.top_k,
        min_p=limits.min_p,
        seed=limits.seed,
        max_tokens=limits.max_tokens,
        min_tokens=limits.min_tokens,
        stop_token_ids=tuple(limits.stop_token_ids),
        ignore_eos=limits.ignore_eos,
    )


def samples_problem(samples: Sequence[messages.Sample]) -> str | None:
    """What is wrong with an attempt's samples: only at their very start do several have the same tokens."""
    if not samples:
        return "an attempt without a sample"
    if len({sample.index for sample in samples}) != len(samples):
        return "an attempt with one sample twice"
    if len(samples) > 1 and any(sample.output_ids for sample in samples):
        return "an attempt of several samples that have begun"
    return None


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn: for which sample, and what came before it."""

    params: SamplingParams
    sample: int
    num_prompt: int
    num_outputs: int


def draw_tokens(
    logits: torch.Tensor, draws: Sequence[Draw], eos_token_ids: frozenset[int], max_model_len: int
) -> list[messages.Token | None]:
    """One token per row of `logits` [rows, vocab]; None where the row holds no usable number."""
    rows = [SampleRow(draw.params, draw.sample, draw.num_outputs) for draw in draws]
    tokens: list[messages.Token | None] = []
    for draw, token_id in zip(draws, sample(logits, rows, eos_token_ids), strict=True):
        if token_id is None:
            tokens.append(None)
            continue
        num_outputs = draw.num_outputs + 1
        finish = finish_reason(
            token_id, num_outputs, draw.params, eos_token_ids, draw.num_prompt + num_outputs, max_model_len
        )
        tokens.append(
            messages.Token(
                sample=draw.sample,
                position=draw.num_outputs,
                token_id=token_id,
                finish_reason=finish.value if finish else "",
            )
        )
    return tokens
