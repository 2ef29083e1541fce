"""What one process without paging, packing or hand-off generates: transformers in float32, greedy or seeded.

`follows` is for a text that is only to be compared: one forward over it gives the logits after each of its tokens, and
it is the reference's text exactly where each of its tokens is what follows those before it.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from splitserve.engine.history import TokenHistory
from splitserve.engine.sampler import SampleRow, sample
from splitserve.engine.sampling_params import SamplingParams
from splitserve.models.description import describe


@lru_cache(maxsize=16)
def _model(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def greedy(
    directory: Path, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True, **options: Any
) -> list[int]:
    """The output ids; without `ignore_eos` it ends with the end-of-sequence token, if one comes. `options` are those of
    transformers' `generate`."""
    output = _model(directory).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None if ignore_eos else _model(directory).generation_config.eos_token_id,
        pad_token_id=0,
        **options,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@torch.inference_mode()
def logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Float32 `[tokens, vocab]`: after each token, what the model makes of the next one."""
    found: torch.Tensor = _model(directory)(torch.tensor([list(token_ids)])).logits[0]
    return found


def follows(
    rows: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int], params: SamplingParams, *, sample_index: int = 0
) -> list[int | None]:
    """What is chosen after the prompt and after each of `outputs` but the last, whose logits are `rows`."""
    tokens = [*prompt, *outputs]
    chosen = [
        SampleRow(params, sample_index, number, TokenHistory(tokens[: len(prompt) + number], len(prompt)))
        for number in range(len(outputs))
    ]
    return sample(rows, chosen, frozenset())


def sampled(directory: Path, prompt: Sequence[int], params: SamplingParams, *, sample_index: int = 0) -> list[int]:
    """The output ids of a seeded text: after each token the whole sequence runs through the model again."""
    eos_token_ids = frozenset(describe(directory, "tiny", "r1").eos_token_ids)
    outputs: list[int] = []
    while len(outputs) < params.max_tokens:
        tokens = [*prompt, *outputs]
        row = SampleRow(params, sample_index, len(outputs), TokenHistory(tokens, len(prompt)))
        (token,) = sample(logits(directory, tokens)[-1:], [row], eos_token_ids)
        assert token is not None
        outputs.append(token)
        is_end = (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        if is_end and len(outputs) > params.min_tokens:
            break
    return outputs
