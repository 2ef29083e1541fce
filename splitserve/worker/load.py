"""A role engine's load as one report, from the books of its allocator and its KV agent; and how large a step was."""

from dataclasses import dataclass

from kvtransfer.counters import KVStats
from splitserve.engine.allocator import BlockCounts
from splitserve.worker import reports


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one step computed: the next token of each of so many sequences, and tokens of prompts; and the least time
    that this could take here (see `engine.floor`)."""

    num_sequences: int
    num_prompt_tokens: int
    floor_s: float


def load_report(
    blocks: BlockCounts,
    transfers: KVStats,
    *,
    num_running: int,
    num_waiting: int,
    waiting_tokens: int,
    tokens_ahead: int,
) -> reports.Load:
    return reports.Load(
        blocks_free=blocks.free,
        blocks_cached=blocks.cached,
        blocks_in_use=blocks.in_use,
        blocks_reserved=blocks.reserved,
        num_running=num_running,
        num_waiting=num_waiting,
        waiting_tokens=waiting_tokens,
        tokens_ahead=tokens_ahead,
        kv_bytes_sent=transfers.bytes_sent,
        kv_bytes_received=transfers.bytes_received,
        kv_messages_dropped=transfers.messages_dropped,
    )
