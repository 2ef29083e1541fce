"""Runs a transformers model on the paged pool: one packed forward per call.

Owned and called by the engine thread alone; owns the model, the pool's contents and the count of forwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from splitserve.engine.attention import AttentionBackend, ForwardContext
from splitserve.engine.batch import Segment
from splitserve.engine.packing import PackedBatch, check_segment, fill_up, pack
from splitserve.engine.pool import KVPool
from splitserve.engine.report import LoadReport


class ModelRunner:
    """A model whose K and V live in `pool`.

    `numerics` names how this process rounds (a hash of fixed logits) and `recompute_exact` says whether a token's K, V
    and logits are the same bits alone, in a batch and in any chunk; `loading.load_runner` sets both, and `report`.
    `on_layer` is called in each layer of a forward: a sign of progress for whoever watches.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        num_heads: int,
        max_model_len: int,
        min_rows: int,
    ) -> None:
        """`min_rows`: a batch of fewer tokens is filled up with copies of its last one, which nothing reads."""
        self.layout = pool.layout
        self.pool = pool
        self.attention = attention
        self.vocab_size: int = model.config.vocab_size
        self.max_model_len = max_model_len
        self.num_forwards = 0
        self.numerics = ""
        self.recompute_exact = False
        self.report = LoadReport()
        self.on_layer: Callable[[], None] = _nothing
        self._model = model
        self._num_heads = num_heads
        self._min_rows = min_rows
        self._device = pool.tensor.device
        self._layers = list(range(pool.layout.num_layers))

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
        logit_rows = torch.tensor(batch.logit_rows, dtype=torch.int64, device=self._device)
        self.num_forwards += 1
        output = self._model(
            input_ids=fill_up(batch.token_ids, self._min_rows).unsqueeze(0),
            position_ids=fill_up(batch.positions, self._min_rows).unsqueeze(0),
            use_cache=False,
            logits_to_keep=fill_up(logit_rows, self._min_rows),
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
