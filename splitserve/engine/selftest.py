"""What a model must prove at start before it serves: paged attention is used, is right, and recomputes exactly.

Called by the loader. The caller gives a runner on a scratch pool; nothing here touches the serving pool.
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, cast

import torch
from torch import nn

from splitserve.engine.batch import Segment
from splitserve.engine.runner import ModelRunner
from splitserve.engine.support import UnsupportedModel

NUM_TOKENS = 64
WINDOW = 8
COPY_VOCAB_SIZE = 128

# Relative root-mean-square distance between the logits of the paged and of transformers' eager forward. Wrong scaling,
# masks or positions give 0.3 and more; bf16 layers drift by some 0.01.
_TOLERANCE = {"float32": 2e-4, "bfloat16": 0.08}

# How many rows a layer is tried with, beyond the fewest that it will ever see: on both sides of where matmul libraries
# change their way. Layers of many weights are tried with few, for their rows cost most.
_ROW_COUNTS = (4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 48, 63, 64, 65, 96, 130, 257)
_FEW_ROW_COUNTS = (9, 33, 100)
_MANY_WEIGHTS = 4 << 20


def fixed_token_ids(vocab_size: int, count: int, offset: int = 0) -> list[int]:
    """Arbitrary ids, the same on every machine."""
    return [(7919 * (index + 1 + offset) + 104729) % vocab_size for index in range(count)]


def blocks_needed(block_size: int) -> int:
    """Blocks of the scratch pool: two sequences of `NUM_TOKENS` tokens."""
    return 2 * -(-NUM_TOKENS // block_size)


def require_equal_to_eager(runner: ModelRunner, what: str) -> None:
    """UnsupportedModel unless the paged forward of `runner` equals transformers' eager forward of its model."""
    paged = _alone(runner)
    eager = _eager_logits(runner.model, fixed_token_ids(runner.vocab_size, min(NUM_TOKENS, runner.max_model_len)))
    tolerance = _TOLERANCE[runner.layout.dtype]
    distance = _relative_distance(paged, eager)
    if not distance <= tolerance:  # NaN fails too
        raise UnsupportedModel(
            f"paged attention does not compute what transformers computes on {what}: "
            f"logits differ by {distance:.2g} of their size, {tolerance:.2g} is allowed"
        )


def numerics(runner: ModelRunner) -> str:
    """A name for how `runner` rounds: the hash of its logits after the fixed ids alone."""
    return sha256(_alone(runner).numpy().tobytes()).hexdigest()


def why_inexact(runner: ModelRunner) -> str:
    """Why a token's K, V and logits may be other bits in other company or chunks; "" where they are the same.

    ValueError where the linear back end shows no layers.
    """
    if found := _other_weights(runner):
        return f"{found} cannot be tried with any number of rows, as linear layers are"
    if runner.result.min_rows > 1 and (found := _routed_layer(runner)):
        return f"{found} gets some rows of a forward only, perhaps fewer than {runner.result.min_rows}"
    if not is_exact(runner):
        return "the logits after the fixed ids differ with their company or chunks"
    if not linear_rows_are_exact(runner):
        return "linear layers round differently with the number of rows"
    return ""


def is_exact(runner: ModelRunner) -> bool:
    """Whether the fixed ids give the same bits alone, in two chunks and a decode step, and both in a batch."""
    count = min(NUM_TOKENS, runner.max_model_len)
    token_ids = fixed_token_ids(runner.vocab_size, count)
    alone = _alone(runner)
    variants: list[Callable[[], torch.Tensor]] = [
        lambda: _chunked(runner, token_ids, [count * 5 // 8, count - 1, count]),
        lambda: _in_company(runner, token_ids, fixed_token_ids(runner.vocab_size, count * 3 // 4, offset=count)),
        lambda: _decoded_in_company(runner, token_ids),
    ]
    return all(torch.equal(alone, variant()) for variant in variants)


@torch.inference_mode()
def linear_rows_are_exact(runner: ModelRunner) -> bool:
    """Whether each of the model's linear layers gives a row the same bits with any number of rows that a forward has.

    The fixed ids make batches of some rows only; a layer may change its way of computing at any other number. Layers of
    one shape are one case. Plain layers are not believed to be exact with one row: libraries have a way of their own
    for it, whose other order of additions shows in one of thousands of outputs in bfloat16. ValueError where the linear
    back end shows no layers.
    """
    min_rows, device, dtype = runner.result.min_rows, runner.pool.tensor.device, runner.pool.tensor.dtype
    layers: dict[tuple[object, ...], Any] = {}
    for layer in cast("list[Any]", runner.linear.layers(runner.model)):
        layers[type(layer), layer.in_features, layer.out_features, layer.bias is None] = layer
    if not layers:
        raise ValueError(f"the linear back end {runner.linear.name} shows no layers to try")
    if min_rows == 1 and any(isinstance(layer, nn.Linear) for layer in layers.values()):
        return False
    generator = torch.Generator().manual_seed(0)
    for layer in layers.values():
        more = _ROW_COUNTS if layer.in_features * layer.out_features < _MANY_WEIGHTS else _FEW_ROW_COUNTS
        counts = (min_rows, min_rows + 1, *(count for count in more if count > min_rows + 1))
        rows = torch.randn((counts[-1], layer.in_features), generator=generator).to(device, dtype)
        expected = layer(rows)
        # The last rows, not the first: a row's place must not matter either.
        if not all(torch.equal(layer(rows[-count:]), expected[-count:]) for count in counts):
            return False
    return True


def _other_weights(runner: ModelRunner) -> str:
    """The name of a module with matrices that are neither a linear layer's nor looked up row by row: experts have such,
    and may get a single row of a large batch."""
    known = set(runner.linear.layers(runner.model))
    for name, module in runner.model.named_modules():
        has_matrices = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if has_matrices and module not in known and not isinstance(module, nn.Embedding):
            return str(name)
    return ""


def _routed_layer(runner: ModelRunner) -> str:
    """The name of a linear layer that computes neither all rows of a forward nor those of its logits."""
    layers, routed = set(runner.linear.layers(runner.model)), []
    usual = {min(NUM_TOKENS, runner.max_model_len), runner.result.min_rows}

    def look(name: str, layer: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        if arguments[0].shape[:-1].numel() not in usual:
            routed.append(name)

    hooks = [
        module.register_forward_pre_hook(partial(look, name))
        for name, module in runner.model.named_modules()
        if module in layers
    ]
    try:
        _alone(runner)
    finally:
        for hook in hooks:
            hook.remove()
    return routed[0] if routed else ""


def _alone(runner: ModelRunner) -> torch.Tensor:
    token_ids = fixed_token_ids(runner.vocab_size, min(NUM_TOKENS, runner.max_model_len))
    return _run(runner, [_prompt(runner, token_ids)])[0]


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
