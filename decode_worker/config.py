"""The settings of a decode worker: those of every worker, with a step of its own."""

from dataclasses import dataclass

from splitserve.service.config import Positive
from splitserve.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    max_num_batched_tokens: Positive = 256
    """Tokens that one step computes at most: one of every running sequence, and chunks of prompts computed here, which
    get two blocks, or half of this if that is less, however many run."""
