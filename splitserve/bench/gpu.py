"""`splitserve bench gpu`: does a cluster on this GPU give transformers' tokens, how fast is the engine on it, and what
does NCCL say?

From what was asked for to a report; the command line calls it. On `--device cpu` it is its own dry run, over Gloo.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from splitserve.bench import tokens
from splitserve.bench.engine import find_device, load_for
from splitserve.bench.gpu_pairs import PairRow, is_refused, try_ranks
from splitserve.bench.kv.source import gpus
from splitserve.bench.local_cluster import local_cluster
from splitserve.bench.progress import Say
from splitserve.bench.random_model import SMALL, TINY, write_random_model
from splitserve.bench.report import Report, make_report
from splitserve.bench.steps import EngineRow, StepBench
from splitserve.bench.tokens import Reference, TokensRow
from splitserve.bench.workload import choose_cases
from splitserve.engine.stopwatch import Stopwatch
from splitserve.models.description import ModelDescription
from splitserve.models.locate import locate_model
from splitserve.models.progress import progress_bar
from splitserve.service.errors import InvalidRequest, SplitserveError

RANDOM = "random"

_READY_S = 180.0
_PAIR_DEADLINE_S = 180.0


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How much to do. Prompts are shorter and longer than a block and than a chunk."""

    prompt_lengths: tuple[int, ...]
    max_tokens: int
    decode: str
    prefill: str
    chunk: int
    cluster_flags: dict[str, object]
    pair_blocks: str
    pair_rounds: int


_FULL = _Plan(
    prompt_lengths=(1, 15, 16, 17, 100, 700, 1500),
    max_tokens=48,
    decode="1x1024,8x1024,32x1024",
    prefill="2048",
    chunk=2048,
    cluster_flags={"--kv-cache-memory": "2GiB"},
    pair_blocks="1,16,128,1024",
    pair_rounds=5,
)
_QUICK = _Plan(
    prompt_lengths=(1, 17, 100),
    max_tokens=12,
    decode="1x32,8x32",
    prefill="64",
    chunk=64,
    cluster_flags={"--kv-cache-memory": "16MiB", "--max-num-batched-tokens": 48},
    pair_blocks="1,4",
    pair_rounds=2,
)


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """As the command line has them; `model` is "random" or what `splitserve up` takes."""

    device: str
    model: str
    is_quick: bool


@dataclass(frozen=True)
class GpuResult:
    """`seconds`: how long all of it took."""

    tokens: Sequence[TokensRow]
    pairs: Sequence[PairRow]
    steps: Sequence[EngineRow]
    report: Report
    seconds: float

    @property
    def is_exact(self) -> bool:
        """What could not be tried is no difference."""
        return all(row.is_equal for row in self.tokens) and all(row.is_equal is not False for row in self.pairs)


def run_gpu_bench(settings: GpuSettings, say: Say) -> GpuResult:
    """Raises InvalidRequest for what cannot be measured here."""
    began = time.monotonic()
    device = find_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    plan = _QUICK if settings.is_quick else _FULL
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder:
        description = _describe(settings, Path(folder), device, say)
        say(f"starting a router, a prefill and a decode worker on {device}")
        flags = {"--device": device, "--kv-transport": "zmq"}
        outputs, workers = _ask_cluster(description, plan, flags, Path(folder) / "cluster.log")
        pair_rows = _try_pairs(description, plan, device, outputs, Path(folder), say)
        say("comparing with transformers")
        token_rows = _compare(description, plan, outputs, device)
        say("measuring steps")
        step_rows = _measure_steps(description, plan, device, settings.is_quick, say)
    seconds = round(time.monotonic() - began, 1)
    args = asdict(settings) | {"model": description.name, "workers": workers, "seconds": seconds}
    rows = [asdict(row) for row in token_rows] + [asdict(row) for row in pair_rows] + [asdict(row) for row in step_rows]
    report = make_report("gpu", args, rows, device=device)
    return GpuResult(token_rows, pair_rows, step_rows, report, seconds)


def _describe(settings: GpuSettings, folder: Path, device: torch.device, say: Say) -> ModelDescription:
    if settings.model != RANDOM:
        with progress_bar() as progress:
            return locate_model(settings.model, progress=progress)
    say("making a model of random weights")
    directory = folder / RANDOM
    directory.mkdir()
    size = TINY if settings.is_quick else SMALL
    write_random_model(directory, size, device)
    return locate_model(str(directory))


def _ask_cluster(
    description: ModelDescription, plan: _Plan, flags: Mapping[str, object], log_file: Path
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The outputs, and what /cluster says of the workers that gave them: device, transport, bytes of KV moved, and by
    which path to which worker."""
    flags = {"--dtype": "float32", **plan.cluster_flags, **flags}
    prompts = _prompts(description, plan)
    with local_cluster(description.directory, flags, log_file, _READY_S) as cluster:
        outputs = tokens.from_cluster(cluster.target, prompts, plan.max_tokens)
        shown = ("role", "device", "transport", "kv_bytes_sent", "kv_bytes_received", "links", "recompute_exact")
        return outputs, [{name: worker[name] for name in shown} for worker in cluster.idle_state()["workers"]]


def _try_pairs(
    description: ModelDescription,
    plan: _Plan,
    device: torch.device,
    expected: Sequence[Sequence[int]],
    folder: Path,
    say: Say,
) -> list[PairRow]:
    """Blocks between two ranks, and if that can be, a cluster whose blocks travel so: `expected` are its outputs over
    ZeroMQ."""
    library = "gloo" if device.type == "cpu" else "nccl"
    say(f"trying {library}")
    rows = try_ranks(library, plan.pair_blocks, plan.pair_rounds, folder, _PAIR_DEADLINE_S)
    if is_refused(rows):
        return rows
    say(f"starting the same cluster over {library}")
    # Two GPUs take a worker each; on one, NCCL has to be told.
    is_shared = device.type == "cpu" or gpus()[0] == gpus()[1]
    flags = {"--device": device if is_shared else "auto", "--kv-transport": library}
    try:
        outputs, workers = _ask_cluster(description, plan, flags, folder / "pair-cluster.log")
    except SplitserveError as error:
        return [*rows, PairRow(case="cluster", refusal=error.message)]
    links = [link["detail"] for worker in workers for link in worker["links"].values()]
    sent = sum(worker["kv_bytes_sent"] for worker in workers)
    is_equal = [list(output) for output in expected] == outputs
    return [*rows, PairRow(case="cluster", path=", ".join(sorted(set(links))), bytes=sent, is_equal=is_equal)]


def _prompts(description: ModelDescription, plan: _Plan) -> list[list[int]]:
    lengths = [n for n in plan.prompt_lengths if n + plan.max_tokens <= description.max_model_len]
    return tokens.random_prompts(lengths, description.vocab_size)


def _compare(
    description: ModelDescription, plan: _Plan, outputs: Sequence[Sequence[int]], device: torch.device
) -> list[TokensRow]:
    reference = Reference(description.directory, device)
    pairs = zip(_prompts(description, plan), outputs, strict=True)
    return [reference.compare(prompt, output) for prompt, output in pairs]


def _measure_steps(
    description: ModelDescription, plan: _Plan, device: torch.device, is_quick: bool, say: Say
) -> list[EngineRow]:
    cases = choose_cases(plan.decode, plan.prefill, description.max_model_len)
    try:
        runner = load_for(description, cases, dtype="auto", device=device, say=say)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    steps = StepBench(runner, Stopwatch(device), chunk=plan.chunk, is_quick=is_quick)
    return [steps.run(case) for case in cases]
