"""The least time that a step could take on this machine: a roofline of two rates.

The role engines ask for each step's floor, for the metrics, and the benchmark guesses with it how long it will take.
Pure: `rates` measures what it divides by.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from splitserve.engine.shape import ModelShape


@dataclass(frozen=True)
class Rates:
    """What a machine gives: bytes read per second, and operations of a matmul per second."""

    bytes_per_s: float
    flops_per_s: float

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:,.1f} GB/s read, {self.flops_per_s / 1e9:,.0f} GFLOP/s multiplied"


class StepFloor:
    """Floors of one model's steps.

    Linear layers read their weights once or multiply them with every row, whichever takes longer; the head, which has
    other rows, is a case of its own. So is each sequence's attention: it reads K and V once, or multiplies. A single
    token is bound by reading, a long prompt by multiplying. Blocks that sequences share count for each of them. What is
    in no floor: norms, rotary embeddings, activations, sampling and Python.
    """

    def __init__(self, shape: ModelShape, rates: Rates) -> None:
        self._shape = shape
        self._weights_s = shape.num_weights * shape.weight_nbytes / rates.bytes_per_s
        self._row_s = 2 * shape.num_weights / rates.flops_per_s
        self._head_s = shape.num_head_weights * shape.weight_nbytes / rates.bytes_per_s
        self._logit_row_s = 2 * shape.num_head_weights / rates.flops_per_s
        self._key_s = shape.layer_token_nbytes / rates.bytes_per_s
        self._pair_s = shape.pair_flops / rates.flops_per_s
        self._lone_key_s = max(self._key_s, self._pair_s)

    def seconds(self, sequences: Iterable[tuple[int, int]], num_logit_rows: int) -> float:
        """Of a forward over `sequences`: (new tokens, context with them). Takes a microsecond or two, and a quarter of
        one for each sequence that decodes."""
        num_tokens = num_lone_keys = 0
        prompts_s = 0.0
        for num_new, context in sequences:
            num_tokens += num_new
            num_keys = self._shape.num_keys(num_new, context)
            if num_new == 1:  # as many pairs as keys
                num_lone_keys += num_keys
            else:
                prompts_s += max(self._key_s * num_keys, self._pair_s * self._shape.num_pairs(num_new, context))
        linear_s = max(self._weights_s, self._row_s * num_tokens) if num_tokens else 0.0
        head_s = max(self._head_s, self._logit_row_s * num_logit_rows) if num_logit_rows else 0.0
        return linear_s + head_s + self._lone_key_s * num_lone_keys + prompts_s
