"""From logits to tokens that carry their position, their finish and their logprobs, the same way on prefill and decode
workers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from splitserve.engine.history import TokenHistory
from splitserve.engine.logprobs import token_logprobs
from splitserve.engine.sampler import SampleRow, sample
from splitserve.engine.sampling_params import SamplingParams
from splitserve.engine.stopping import finish_reason
from splitserve.service.reasons import Reason
from splitserve.worker import messages
from splitserve.worker.admission import Refusal

NOT_FINITE = "the model's logits are not finite"


def sampling_params(limits: messages.Limits) -> SamplingParams:
    """Raises ValueError for values out of range."""
    return SamplingParams(
        temperature=limits.temperature,
        top_p=limits.top_p,
        top_k=limits.top_k,
        min_p=limits.min_p,
        repetition_penalty=limits.repetition_penalty,
        presence_penalty=limits.presence_penalty,
        frequency_penalty=limits.frequency_penalty,
        logit_bias=tuple(limits.logit_bias.items()),
        seed=limits.seed,
        max_tokens=limits.max_tokens,
        min_tokens=limits.min_tokens,
        stop_token_ids=tuple(limits.stop_token_ids),
        ignore_eos=limits.ignore_eos,
        logprobs=limits.logprobs,
    )


def start_problem(start: messages.Start, vocab_size: int) -> Refusal | None:
    """Why no worker can go on from `start`, if so. The router checks all of it too; here it would cost every request
    on this worker."""
    problem = _start_problem(start, vocab_size)
    return None if problem is None else Refusal(Reason.INVALID, problem)


def _start_problem(start: messages.Start, vocab_size: int) -> str | None:
    if not start.prompt_ids:
        return "an attempt without a prompt"
    if problem := _samples_problem(start.samples):
        return problem
    outputs = (sample.output_ids for sample in start.samples)
    for token_id in _extremes(chain(start.prompt_ids, *outputs, start.limits.logit_bias)):
        if not 0 <= token_id < vocab_size:
            return f"token id {token_id} is not in a vocabulary of {vocab_size}"
    try:
        sampling_params(start.limits)
    except ValueError as error:
        return str(error)
    return None


def _samples_problem(samples: Sequence[messages.Sample]) -> str | None:
    """Only at their very start do several samples have the same tokens."""
    if not samples:
        return "an attempt without a sample"
    if len({sample.index for sample in samples}) != len(samples):
        return "an attempt with one sample twice"
    if len(samples) > 1 and any(sample.output_ids for sample in samples):
        return "an attempt of several samples that have begun"
    return None


def _extremes(token_ids: Iterable[int]) -> tuple[int, int]:
    ids = list(token_ids)
    return min(ids, default=0), max(ids, default=0)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn: for which sample, and what came before it."""

    params: SamplingParams
    sample: int
    history: TokenHistory


def draw_tokens(
    logits: torch.Tensor, draws: Sequence[Draw], eos_token_ids: frozenset[int], max_model_len: int
) -> list[messages.Token | None]:
    """One token per row of `logits` (float32 `[rows, vocab]`); None where the row holds no usable number."""
    logits = logits.cpu()
    rows = [SampleRow(draw.params, draw.sample, draw.history.num_outputs, draw.history) for draw in draws]
    drawn = sample(logits, rows, eos_token_ids)
    return [
        None if token_id is None else _token(row, draw, token_id, eos_token_ids, max_model_len)
        for row, draw, token_id in zip(logits, draws, drawn, strict=True)
    ]


def _token(
    logits: torch.Tensor, draw: Draw, token_id: int, eos_token_ids: frozenset[int], max_model_len: int
) -> messages.Token | None:
    params, num_outputs = draw.params, draw.history.num_outputs + 1
    logprobs = None
    if params.logprobs is not None:
        logprobs = logprobs_of(logits, token_id, params.logprobs)
        if logprobs is None:
            return None
    finish = finish_reason(token_id, num_outputs, params, eos_token_ids, draw.history.total_len + 1, max_model_len)
    return messages.Token(
        sample=draw.sample,
        position=num_outputs - 1,
        token_id=token_id,
        finish_reason=finish.value if finish else "",
        logprobs=logprobs,
    )


def logprobs_of(logits: torch.Tensor, token_id: int, num_top: int) -> messages.Logprobs | None:
    """`token_logprobs` as a message; None where the row of logits is no distribution."""
    found = token_logprobs(logits, token_id, num_top)
    if found is None:
        return None
    return messages.Logprobs(token_id, found.logprob, list(found.top_ids), list(found.top_logprobs))
