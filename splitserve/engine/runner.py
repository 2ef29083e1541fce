"""Runs a transformers model on the paged pool: one packed forward per call.

Owned and called by the engine thread alone; owns the model, the pool's contents and the count of forwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from splitserve.engine.attention import ForwardContext
from splitserve.engine.backends import Backends
from splitserve.engine.batch import Segment
from splitserve.engine.packing import PackedBatch, check_segment, fill_up, pack
from splitserve.engine.pool import KVPool
from splitserve.engine.report import LoadReport
from splitserve.engine.selftest_result import SelfTestResult


class ModelRunner:
    """A model whose K and V live in `pool`.

    `result` says what its self-test found, `report` what loading made. `on_layer` is called in each layer of a forward:
    a sign of progress for whoever watches.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        backends: Backends,
        *,
        num_heads: int,
        max_model_len: int,
        result: SelfTestResult,
        report: LoadReport,
    ) -> None:
        """`backends` have prepared `model`. A batch of fewer tokens than `result.min_rows` is filled up with copies of
        its last one, which nothing reads."""
        self.layout = pool.layout
        self.pool = pool
        self.attention = backends.attention
        self.linear = backends.linear
        self.vocab_size: int = model.config.vocab_size
        self.max_model_len = max_model_len
        self.num_forwards = 0
        self.result = result
        self.report = report
        self.on_layer: Callable[[], None] = _nothing
        self._model = model
        self._num_heads = num_heads
        self._device = pool.tensor.device
        self._layers = list(range(pool.layout.num_layers))

    @property
    def numerics(self) -> str:
        return self.result.numerics

    @property
    def recompute_exact(self) -> bool:
        return self.result.recompute_exact

    @property
    def model(self) -> Any:
        """transformers' model, for those who measure it; only `run` may call it."""
        return self._model

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes all segments in one forward without padding and writes their K and V into the pool.

        Returns float32 logits `[wanted rows, vocab]` in the order of segments and tokens, on the model's device.
        ValueError, before anything is written, for a segment that no forward can compute.
        """
        if not segments:
            raise ValueError("a forward needs at least one segment")
        for segment in segments:
            check_segment(
                segment,
                block_size=self.layout.block_size,
                num_blocks=self.pool.num_blocks,
                vocab_size=self.vocab_size,
                max_model_len=self.max_model_len,
            )
        batch = pack(segments, self.layout.block_size, self._device)
        # What an earlier owner left behind the tokens of a partial block may be NaN, which no mask can hide from a sum.
        self.pool.clear(batch.started_blocks)
        logits = self._forward(batch)
        return logits[: len(batch.logit_rows)].float()

    def _forward(self, batch: PackedBatch) -> torch.Tensor:
        plan = self.attention.plan(batch, self.pool, self._num_heads)
        context = ForwardContext(batch, plan, self.on_layer)
        min_rows = self.result.min_rows
        logit_rows = torch.tensor(batch.logit_rows, dtype=torch.int64, device=self._device)
        self.num_forwards += 1
        output = self._model(
            input_ids=fill_up(batch.token_ids, min_rows).unsqueeze(0),
            position_ids=fill_up(batch.positions, min_rows).unsqueeze(0),
            use_cache=False,
            logits_to_keep=fill_up(logit_rows, min_rows),
            paged_context=context,
        )
        if context.layers_called != self._layers:
            raise ValueError(
                f"paged attention ran for layers {context.layers_called}, not once for each of {len(self._layers)}"
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def _nothing() -> None:
    """Nobody watches."""
