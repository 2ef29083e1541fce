"""What one process without paging, packing or hand-off generates: transformers in float32, greedy."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


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
