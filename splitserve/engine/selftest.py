"""What a model must prove at start before it serves: paged attention is used, is right, and recomputes exactly.

Called by the loader. The caller gives a runner on a scratch pool; nothing here touches the serving pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from splitserve.engine.batch import Segment
from splitserve.engine.runner import ModelRunner
from splitserve.engine.support import UnsupportedModel

NUM_TOKENS = 64
WINDOW = 8
COPY_VOCAB_SIZE = 128

# Relative root-mean-square distance between the logits of the paged and of transformers' eager forward. Wrong scaling,
# masks or positions give 0.3 and more; bf16 layers drift by some 0.01.
_TOLERANCE = {"float32": 2e-4, "bfloat16": 0.08}


@dataclass(frozen=True)
class SelfTestResult:
    recompute_exact: bool
    numerics: str


def fixed_token_ids(vocab_size: int, count: int, offset: int = 0) -> list[int]:
    """Arbitrary ids, the same on every machine."""
    return [(7919 * (index + 1 + offset) + 104729) % vocab_size for index in range(count)]


def blocks_needed(block_size: int) -> int:
    """Blocks of the scratch pool: two sequences of `NUM_TOKENS` tokens."""
    return 2 * -(-NUM_TOKENS // block_size)


def require_equal_to_eager(runner: ModelRunner, model: Any, what: str) -> None:
    """UnsupportedModel unless the paged forward of `runner` equals transformers' eager forward of its `model`."""
    token_ids = fixed_token_ids(runner.vocab_size, min(NUM_TOKENS, runner.max_model_len))
    paged = _run(runner, [_prompt(runner, token_ids)])[-1]
    eager = _eager_logits(model, token_ids)
    tolerance = _TOLERANCE[runner.layout.dtype]
    distance = _relative_distance(paged, eager)
    if not distance <= tolerance:  # NaN fails too
        raise UnsupportedModel(
            f"paged attention does not compute what transformers computes on {what}: "
            f"logits differ by {distance:.2g} of their size, {tolerance:.2g} is allowed"
        )


def measure(runner: ModelRunner) -> SelfTestResult:
    """Runs the fixed ids alone, in two chunks and a decode step, and both in a batch, and compares bit for bit."""
    count = min(NUM_TOKENS, runner.max_model_len)
    token_ids = fixed_token_ids(runner.vocab_size, count)
    alone = _run(runner, [_prompt(runner, token_ids)])[0]
    variants: list[Callable[[], torch.Tensor]] = [
        lambda: _chunked(runner, token_ids, [count * 5 // 8, count - 1, count]),
        lambda: _in_company(runner, token_ids, fixed_token_ids(runner.vocab_size, count * 3 // 4, offset=count)),
        lambda: _decoded_in_company(runner, token_ids),
    ]
    is_exact = all(torch.equal(alone, variant()) for variant in variants)
    return SelfTestResult(is_exact, sha256(alone.numpy().tobytes()).hexdigest())


def _chunked(runner: ModelRunner, token_ids: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    start = 0
    for end in ends:
        if end > start:
            logits = _run(runner, [_prompt(runner, token_ids[start:end], start=start)])
            start = end
    return logits[0]


def _in_company(runner: ModelRunner, token_ids: Sequence[int], company: Sequence[int]) -> torch.Tensor:
    return _run(runner, [_prompt(runner, company, place=1), _prompt(runner, token_ids)])[1]


def _decoded_in_company(runner: ModelRunner, token_ids: Sequence[int]) -> torch.Tensor:
    """The last token as a decode step beside another sequence's, after both prompts in one batch."""
    shorter = token_ids[: max(2, len(token_ids) // 3)]
    _run(runner, [_prompt(runner, token_ids[:-1]), _prompt(runner, shorter, place=1)])
    last = _prompt(runner, token_ids[-1:], start=len(token_ids) - 1)
    return _run(runner, [_prompt(runner, [1], start=len(shorter), place=1), last])[1]


def _prompt(runner: ModelRunner, token_ids: Sequence[int], *, start: int = 0, place: int = 0) -> Segment:
    per_sequence = runner.layout.blocks_for(NUM_TOKENS)
    table = range(place * per_sequence, (place + 1) * per_sequence)
    return Segment(token_ids=token_ids, start=start, block_table=table, wants_logits=True)


def _run(runner: ModelRunner, segments: Sequence[Segment]) -> torch.Tensor:
    try:
        return runner.run(segments).cpu()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise UnsupportedModel(f"the model does not run on paged attention: {error}") from error


@torch.inference_mode()
def _eager_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    paged = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([token_ids], device=model.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    finally:
        model.set_attn_implementation(paged)
    return logits[0, -1].float().cpu()


def _relative_distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    spread = (theirs - theirs.mean()).square().mean().sqrt()
    return float((ours - theirs).square().mean().sqrt() / spread)
