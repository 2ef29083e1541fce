"""What an engine process does once, before its loop: the model in memory, the KV endpoint open, the cores chosen."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvtransfer.agent import KVAgent
from kvtransfer.events import KVEvent
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.store import BlockStore
from splitserve.engine.device import choose_device, list_gpus
from splitserve.engine.floor import StepFloor
from splitserve.engine.gpus import Gpu
from splitserve.engine.loading import load_runner
from splitserve.engine.pool import DTYPES, KVPool
from splitserve.engine.rates import measure_rates
from splitserve.engine.report import PartTimes
from splitserve.engine.runner import ModelRunner
from splitserve.engine.staging import CudaLane, StagedStore
from splitserve.engine.trust import Trust
from splitserve.models.cache import cache_root
from splitserve.models.description import ModelDescription
from splitserve.models.locate import locate_model
from splitserve.service.errors import Unavailable
from splitserve.service.huge_pages import huge_page_nbytes
from splitserve.service.startup import process_age_s
from splitserve.worker import commands, reports
from splitserve.worker.config import WorkerConfig
from splitserve.worker.gpu_claim import GpuClaim, claim_gpu
from splitserve.worker.kv import make_agent, model_fingerprint, transports

# This process's own context, which torch does not count, and what a desktop takes are less.
_TAKEN_NBYTES = 2 << 30

Publish = Callable[[reports.Report], None]


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What a role's engine works with: on the processor without a `claim`. `floor` knows the least time of a step here;
    `startup` names the parts of the start in order, in seconds; deadlines are times of `clock`."""

    worker_id: str
    config: WorkerConfig
    description: ModelDescription
    runner: ModelRunner
    floor: StepFloor
    agent: KVAgent
    fingerprint: Fingerprint
    publish: Publish
    max_model_len: int
    claim: GpuClaim | None = None
    startup: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic


def build_context(
    configure: commands.Configure,
    publish: Publish,
    on_event: Callable[[KVEvent], None],
    find_gpus: Callable[[], Sequence[Gpu]] = list_gpus,
) -> EngineContext:
    """Claims a device, loads the model and opens the KV endpoint; raises SplitserveError or ValueError with the reason
    if it cannot."""
    config = configure.config
    times = PartTimes()
    times.add("imports", process_age_s())

    def progress(text: str) -> None:
        publish(reports.Progress(text=text))

    def fetch_progress(what: str, done: int, total: int) -> None:
        if done == total:
            progress(what)

    # First of all: who gets no device need not fetch a model.
    with times.part("device"):
        claim = _claim(configure, find_gpus)
        device = choose_device(claim.device if claim else config.device)
    if claim:
        progress(f"computes on {claim}")
    with times.part("model"):
        description = locate_model(
            config.model,
            revision=config.revision,
            progress=fetch_progress,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )
    torch.set_num_threads(config.threads)
    with _pinned(config.cores), _memory_errors(device):
        runner = load_runner(
            description.directory,
            dtype=config.dtype,
            device=str(device),
            block_size=config.block_size,
            kv_cache_bytes=config.kv_cache_memory,
            progress=progress,
            trust=Trust(remote_code=config.trust_remote_code, pickle=config.allow_pickle),
            kernel_folder=cache_root() / "kernels",
            selftest_folder=cache_root() / "self-tests",
        )
    for part, seconds in runner.report.seconds.items():
        times.add(part, seconds)
    fingerprint = model_fingerprint(config.served_model_name or description.name, description.revision, runner.layout)
    # Started unpinned: the KV thread and ZeroMQ's I/O thread inherit every core, so that they stay off the engine's.
    with times.part("KV endpoint"):
        store = block_store(runner.pool)
        agent = make_agent(config, configure.worker_id, fingerprint, store, device, on_event)
        agent.start()
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    with times.part("rates"):
        floor = _step_floor(runner, progress)
    return EngineContext(
        worker_id=configure.worker_id,
        config=config,
        description=description,
        runner=runner,
        floor=floor,
        agent=agent,
        fingerprint=fingerprint,
        publish=publish,
        max_model_len=min(config.max_model_len or runner.max_model_len, runner.max_model_len),
        claim=claim,
        startup=times.seconds,
    )


def _step_floor(runner: ModelRunner, progress: Callable[[str], None]) -> StepFloor:
    layers, dtype = runner.linear.layers(runner.model), DTYPES[runner.layout.dtype]
    rates = measure_rates(layers, dtype, runner.pool.tensor.device)
    progress(f"rates: {rates}")
    return StepFloor(runner.report.shape, rates)


def ready_report(context: EngineContext) -> reports.Ready:
    runner, config, made = context.runner, context.config, context.runner.report
    return reports.Ready(
        fingerprint=context.fingerprint,
        num_blocks=runner.pool.num_blocks,
        block_size=runner.layout.block_size,
        block_nbytes=runner.layout.block_nbytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_threshold=config.long_prefill_threshold,
        max_model_len=context.max_model_len,
        kv_endpoint=context.agent.endpoint,
        device=str(runner.pool.tensor.device),
        topology_group=context.claim.gpu.topology_group if context.claim else "",
        transport=",".join(transports(config.kv_transport, runner.pool.tensor.device)),
        numerics=runner.numerics,
        recompute_exact=runner.recompute_exact,
        linear=made.linear,
        attention=made.attention,
        layers=str(made.layers),
        memory=reports.Memory(made.weights.plain, made.weights.packed, made.pool_nbytes, huge_page_nbytes()),
        startup=context.startup,
    )


def block_store(pool: KVPool) -> BlockStore:
    """What the KV thread works on: the pool itself in host memory, copies of its blocks where it is a device's."""
    device = pool.tensor.device
    return pool if device.type == "cpu" else StagedStore(pool, CudaLane(device))


def _claim(configure: commands.Configure, find_gpus: Callable[[], Sequence[Gpu]]) -> GpuClaim | None:
    config = configure.config
    if config.device == "cpu":
        return None
    folder = Path(config.device_locks) if config.device_locks else cache_root() / "device-locks"
    return claim_gpu(config.device, find_gpus(), folder, configure.worker_id, config.workers_per_gpu)


@contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """A device that is too small is a wrong setting, no failure: ValueError. Unavailable where others hold much of it,
    such as a predecessor that is about to let go."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        taken = _taken_by_others(device)
        message = f"model and KV pool do not fit into the memory of {device}: {error}"
        if taken > _TAKEN_NBYTES:
            raise Unavailable(f"{message}. Other processes hold {taken / (1 << 30):.1f} GiB of it") from error
        raise ValueError(message) from error


def _taken_by_others(device: torch.device) -> int:
    """Bytes of its memory that are not this process's."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


@contextmanager
def _pinned(cores: tuple[int, ...] | None) -> Iterator[None]:
    """Runs the body on `cores` only: threads that torch starts in it inherit the choice."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
