"""Are a cluster's tokens those of one process? Greedy, position by position, against transformers' own `generate`.

Called by the GPU's benchmark; pure but for the two models that it asks.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitserve.client.sync import Client
from splitserve.engine.transformers_api import AutoModelForCausalLM

_REQUEST_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TokensRow:
    """One prompt. Positions count output tokens from 0.

    Where the outputs part, `margin` is how far the reference preferred its own token, in logits: near nothing for two
    that are equally likely, which may go either way, and large where something is wrong.
    """

    kind: str
    prompt_tokens: int
    output_tokens: int
    is_equal: bool
    first_difference: int | None
    margin: float | None


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def from_cluster(target: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy outputs, all prompts at once, over gRPC."""
    with Client(target, timeout=_REQUEST_S) as client, ThreadPoolExecutor(len(prompts)) as pool:

        def run(prompt: Sequence[int]) -> list[int]:
            answer = client.generate(list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            return list(answer.token_ids)

        return list(pool.map(run, prompts))


class Reference:
    """transformers in float32, with its own attention, one prompt at a time."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._model.eval().to(device)
        self._device = device

    @torch.inference_mode()
    def compare(self, prompt: Sequence[int], output: Sequence[int]) -> TokensRow:
        """Generates as many tokens as `output` has, and finds the first that differs."""
        ids = torch.tensor([list(prompt)], device=self._device)
        generated = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=len(output),
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = generated.sequences[0, len(prompt) :].tolist()
        differing = [position for position, pair in enumerate(zip(expected, output, strict=True)) if pair[0] != pair[1]]
        first = differing[0] if differing else None
        margin = None
        if first is not None:
            logits = generated.logits[first][0]
            margin = float(logits[expected[first]] - logits[output[first]])
        return TokensRow(
            kind="tokens",
            prompt_tokens=len(prompt),
            output_tokens=len(output),
            is_equal=first is None,
            first_difference=first,
            margin=margin,
        )
