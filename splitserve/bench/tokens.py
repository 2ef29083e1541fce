"""Are a cluster's tokens those of one process? Greedy, position by position, against transformers' own forward.

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

# Of the standard deviation of a position's logits: what two exact computations in float32 may differ by.
_TIE = 1e-3


@dataclass(frozen=True, kw_only=True)
class TokensRow:
    """One prompt. Positions count output tokens from 0.

    At `ties` positions the reference's two likeliest tokens are as good as equal: rounding decides, and either is
    right. At `first_difference`, if there is one, the output has a token that is neither the likeliest nor tied with
    it; there the reference preferred its own by `margin`, in logits.
    """

    kind: str
    prompt_tokens: int
    output_tokens: int
    ties: int
    first_difference: int | None
    margin: float | None
    is_equal: bool


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
        """Looks at each token of `output`, given those before it: a tie that went the other way hides nothing behind
        it."""
        ids = torch.tensor([[*prompt, *output]], device=self._device)
        answer = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(output) + 1)
        logits = answer.logits[0, :-1].float().cpu()
        likeliest = logits.topk(2).values
        tie = _TIE * logits.std(-1)
        behind = likeliest[:, 0] - logits.gather(1, torch.tensor([output]).T)[:, 0]
        wrong = (~(behind <= tie)).nonzero()[:, 0].tolist()  # not a number is wrong, too
        first = wrong[0] if wrong else None
        return TokensRow(
            kind="tokens",
            prompt_tokens=len(prompt),
            output_tokens=len(output),
            ties=int((likeliest[:, 0] - likeliest[:, 1] <= tie).sum()),
            first_difference=first,
            margin=None if first is None else float(behind[first]),
            is_equal=first is None,
        )
