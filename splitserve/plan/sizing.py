"""From a model's size, a GPU and a workload to a cluster: what one worker of each role does, and how many of each.

A roofline: a prompt is bound by matmuls, or by reading weights where its steps have few tokens for each; a decode step
by reading weights and KV cache. Neither reaches the data sheet's figures; the two shares assumed here are what good
engines reach. Pure functions.
"""

import itertools
import math
from dataclasses import dataclass

from splitserve.plan.gpus import Gpu
from splitserve.plan.model_size import ModelSize
from splitserve.service.errors import InvalidRequest
from splitserve.worker.config import WorkerConfig

MATMUL_SHARE = 0.5
BANDWIDTH_SHARE = 0.7
# A prefill worker that is busy all the time has a queue that never ends.
MAX_BUSY = 0.8
# Prompts are computed in steps of so many tokens, unless told otherwise.
PREFILL_STEP_TOKENS = WorkerConfig().max_num_batched_tokens
MIB = 1 << 20
_MOST_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean lengths in tokens, goals in seconds."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Of one worker on one GPU, unless said otherwise. `pool_nbytes` are whole MiB, which a flag can say; `num_seqs`
    run at once on a decode worker, `limit` says what allows no more of them."""

    pool_nbytes: int
    num_blocks: int
    num_cached_tokens: int
    num_seqs: int
    limit: str
    step_s: float
    decode_tokens_per_s: float
    prompt_s: float
    prefill_busy: float
    prefill_tokens_per_s: float
    ttft_s: float
    requests_per_prefill: float
    requests_per_decode: float
    ratio: tuple[int, int]


def make_plan(size: ModelSize, gpu: Gpu, workload: Workload, memory_share: float) -> Plan:
    """Raises InvalidRequest where the model does not fit, or a goal is out of reach even of an idle worker."""
    pool_nbytes = _pool_nbytes(size, gpu, memory_share)
    num_blocks = pool_nbytes // size.layout.block_nbytes
    length = workload.prompt_tokens + workload.output_tokens
    if length > size.max_model_len:
        raise InvalidRequest(f"{length} tokens a request, and the context has {size.max_model_len}")
    blocks_per_seq = size.layout.blocks_for(length)
    if num_blocks < blocks_per_seq:
        raise InvalidRequest(
            f"{gpu.name} has room for {num_blocks} blocks beside {size.weight_nbytes / 1e9:.2f} GB of weights, and a "
            f"request needs {blocks_per_seq}"
        )
    prompt_s = prefill_s(size, gpu, workload.prompt_tokens)
    if prompt_s >= workload.ttft_s:
        raise InvalidRequest(
            f"a prompt of {workload.prompt_tokens} tokens alone takes {1e3 * prompt_s:.0f} ms: no first token comes "
            f"within {1e3 * workload.ttft_s:.0f} ms",
            field="ttft_ms",
        )
    context = workload.prompt_tokens + (workload.output_tokens + 1) // 2
    num_seqs, limit = _num_seqs(size, gpu, context, workload.itl_s, num_blocks // blocks_per_seq)
    step = step_s(size, gpu, num_seqs, context)
    busy = _busy(prompt_s, workload.ttft_s)
    requests_per_prefill = busy / prompt_s
    requests_per_decode = num_seqs / (step * workload.output_tokens)
    return Plan(
        pool_nbytes=pool_nbytes,
        num_blocks=num_blocks,
        num_cached_tokens=num_blocks * size.layout.block_size,
        num_seqs=num_seqs,
        limit=limit,
        step_s=step,
        decode_tokens_per_s=num_seqs / step,
        prompt_s=prompt_s,
        prefill_busy=busy,
        prefill_tokens_per_s=busy * workload.prompt_tokens / prompt_s,
        ttft_s=prompt_s + _wait_s(prompt_s, busy),
        requests_per_prefill=requests_per_prefill,
        requests_per_decode=requests_per_decode,
        ratio=_ratio(requests_per_prefill, requests_per_decode),
    )


def workers_for(plan: Plan, requests_per_s: float) -> tuple[int, int]:
    """Prefill and decode workers that carry so many requests."""
    return math.ceil(requests_per_s / plan.requests_per_prefill), math.ceil(requests_per_s / plan.requests_per_decode)


def worker_flags(plan: Plan, block_size: int) -> dict[str, list[str]]:
    """By role, what makes a worker the one that the plan speaks of."""
    pool = ["--kv-cache-memory", f"{plan.pool_nbytes // MIB}MiB", "--block-size", str(block_size)]
    return {"prefill": pool, "decode": ["--max-num-seqs", str(plan.num_seqs), *pool]}


def prefill_s(size: ModelSize, gpu: Gpu, num_tokens: int) -> float:
    """Whichever takes longer: computing, of the head for the last token alone, or reading the weights in each step."""
    compute_s = size.shape.flops([(num_tokens, num_tokens)], 1) / (gpu.flops * MATMUL_SHARE)
    num_steps = math.ceil(num_tokens / PREFILL_STEP_TOKENS)
    read_s = num_steps * size.read_nbytes(min(num_tokens, PREFILL_STEP_TOKENS)) / (gpu.bandwidth * BANDWIDTH_SHARE)
    return max(compute_s, read_s)


def step_s(size: ModelSize, gpu: Gpu, num_seqs: int, context: int) -> float:
    """Whichever takes longer: reading weights and KV cache, or computing."""
    read = size.read_nbytes(num_seqs) + num_seqs * size.shape.kv_nbytes(context)
    compute_s = num_seqs * size.shape.flops([(1, context)], 1) / (gpu.flops * MATMUL_SHARE)
    return max(read / (gpu.bandwidth * BANDWIDTH_SHARE), compute_s)


def _pool_nbytes(size: ModelSize, gpu: Gpu, memory_share: float) -> int:
    room = gpu.memory * memory_share - size.weight_nbytes
    if room < size.layout.block_nbytes:
        raise InvalidRequest(
            f"the weights take {size.weight_nbytes / 1e9:.1f} GB, {gpu.name} has {gpu.memory * memory_share / 1e9:.1f} "
            f"GB to use: the model does not fit on one, and cannot be split over several"
        )
    return int(room // MIB) * MIB


def _num_seqs(size: ModelSize, gpu: Gpu, context: int, itl_s: float, most: int) -> tuple[int, str]:
    """As many as memory holds and the goal allows: a step takes longer with each."""
    if step_s(size, gpu, 1, context) > itl_s:
        alone_ms = 1e3 * step_s(size, gpu, 1, context)
        raise InvalidRequest(
            f"a step of one sequence takes {alone_ms:.1f} ms: no token comes every {1e3 * itl_s:.1f} ms", field="itl_ms"
        )
    if step_s(size, gpu, most, context) <= itl_s:
        return most, "memory"
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(size, gpu, middle, context) <= itl_s else (low, middle)
    return low, "itl"


def _wait_s(prompt_s: float, busy: float) -> float:
    """The mean wait of random arrivals in front of one server whose work always takes as long (M/D/1)."""
    return prompt_s * busy / (2 * (1 - busy))


def _busy(prompt_s: float, ttft_s: float) -> float:
    """The highest share of its time that a prefill worker may compute if prompts, with their wait, meet the goal."""
    slack = (ttft_s - prompt_s) / prompt_s
    return min(MAX_BUSY, 2 * slack / (1 + 2 * slack))


def _ratio(per_prefill: float, per_decode: float) -> tuple[int, int]:
    """Small numbers of prefill and decode workers that carry about as many requests; the smallest within a tenth of the
    best. Beyond one to _MOST_WORKERS it is one to so many as it takes."""
    if max(per_prefill, per_decode) > _MOST_WORKERS * min(per_prefill, per_decode):
        prefill, decode = math.ceil(per_decode / per_prefill), math.ceil(per_prefill / per_decode)
        return prefill, decode
    counts = range(1, _MOST_WORKERS + 1)
    choices = list(itertools.product(counts, counts))

    def mismatch(choice: tuple[int, int]) -> float:
        return abs(math.log(choice[0] * per_prefill / (choice[1] * per_decode)))

    best = min(map(mismatch, choices))
    return min((choice for choice in choices if mismatch(choice) <= best + math.log(1.1)), key=sum)
