"""One case after the other: its step and its floor, measured in turns.

Called by the engine's benchmark; owns the material of the floors, and has the machine to itself meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from splitserve.bench.floor import LinearLayers, MatmulRate, merge_siblings
from splitserve.bench.parts import breakdown
from splitserve.bench.timing import Rounds, Span, measure
from splitserve.bench.workload import Case, decode_segments, prefill_chunks
from splitserve.engine.batch import Segment
from splitserve.engine.floor import Rates, StepFloor
from splitserve.engine.pool import DTYPES
from splitserve.engine.rates import READ_BYTES, ReadBandwidth
from splitserve.engine.runner import ModelRunner
from splitserve.engine.sampler import SampleRow, sample
from splitserve.engine.sampling_params import SamplingParams
from splitserve.engine.stopwatch import Stopwatch, Task

_ROUNDS = {
    "decode": Rounds(at_least=5, at_most=50, seconds=5.0),
    "prefill": Rounds(at_least=1, at_most=10, seconds=30.0),
}
_QUICK_ROUNDS = Rounds(at_least=2, at_most=2, seconds=0.0)
_QUICK_READ_BYTES = 8 << 20

_SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "top_p": SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95, seed=1),
}


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One case. Times are milliseconds, rates come from the same rounds; `ratio` divides the least times."""

    case: str
    kind: Literal["decode", "prefill"]
    batch: int
    context: int
    chunk: int | None
    rounds: int
    step_ms: Span
    floor_ms: Span
    ratio: float
    tokens_per_s: float
    gflop_s: float
    floor_parts_ms: Mapping[str, Span]
    read_gb_s: float | None
    matmul_gflop_s: float | None
    matmul: str | None
    parts_ms: Mapping[str, float]
    sampler_ms: Mapping[str, Span]


@dataclass(frozen=True)
class _Floor:
    """The parts of a case's floor, and the rates that two of them were made of."""

    parts: Mapping[str, Span]
    read_gb_s: float | None = None
    matmul_gflop_s: float | None = None
    matmul: str | None = None


class StepBench:
    """What the cases share: the runner and the material of the floors."""

    def __init__(self, runner: ModelRunner, stopwatch: Stopwatch, *, chunk: int, is_quick: bool) -> None:
        """`chunk` is how many tokens of a prompt one forward computes.

        Quick means two rounds, and too small a buffer to tell the machine's bandwidth.
        """
        self._runner = runner
        self._chunk = chunk
        self._is_quick = is_quick
        self._stopwatch = stopwatch
        device = stopwatch.device
        dtype = DTYPES[runner.layout.dtype]
        self._shape = runner.report.shape
        shapes = {"linear": self._shape.linears, "merged linear": merge_siblings(self._shape.linears)}
        self._linears = {name: LinearLayers(each, dtype, device) for name, each in shapes.items()}
        self._bandwidth = ReadBandwidth.of_new_buffer(_QUICK_READ_BYTES if is_quick else READ_BYTES, device)
        self._matmuls = MatmulRate(self._shape, dtype, device)

    def expected_minutes(self, cases: Sequence[Case]) -> float:
        """A guess from this machine's rates, if steps take twice their floors."""
        reads, tiles = self._bandwidth.tasks(), self._matmuls.tasks()
        _, spans = measure(reads | tiles, self._stopwatch, _QUICK_ROUNDS)
        bytes_per_ms = self._bandwidth.num_bytes / min(spans[name].min for name in reads)
        _, flops_per_ms = self._matmuls.best({name: spans[name].min for name in tiles})
        floor = StepFloor(self._shape, Rates(bytes_per_ms * 1e3, flops_per_ms * 1e3))
        total_ms = 0.0
        for case in cases:
            rounds = _QUICK_ROUNDS if self._is_quick else _ROUNDS[case.kind]
            floor_ms = floor.seconds(case.sequences, case.num_logit_rows) * 1e3
            # A round is a step and its floor; the instrumented step and the first one come on top.
            total_ms += max(rounds.seconds * 1e3, rounds.at_least * 4 * floor_ms) + 4 * floor_ms
        return total_ms / 60e3

    def run(self, case: Case) -> EngineRow:
        return self._decode(case) if case.kind == "decode" else self._prefill(case)

    def _decode(self, case: Case) -> EngineRow:
        step = partial(self._runner.run, decode_segments(self._runner, case.batch, case.context))
        samplers = _samplers(step())
        reads = self._bandwidth.tasks()
        linears = {name: layers.task([(case.batch, case.batch)]) for name, layers in self._linears.items()}
        rounds, spans = self._measure({"step": step} | linears | reads | samplers, case)
        linear = min((spans[name] for name in linears), key=lambda span: span.min)
        read = min((spans[name] for name in reads), key=lambda span: span.min)
        num_read = self._bandwidth.num_bytes
        kv = read.scaled(case.batch * self._shape.kv_nbytes(case.context) / num_read)
        floor = _Floor({"linear": linear, "kv": kv}, read_gb_s=num_read / read.min / 1e6)
        return self._row(case, rounds, spans, floor, step)

    def _prefill(self, case: Case) -> EngineRow:
        chunks = prefill_chunks(self._runner, case.context, self._chunk)
        step = partial(self._run_each, chunks)
        samplers = _samplers(self._runner.run(chunks[-1:]))
        in_chunks = [(len(chunk.token_ids), int(chunk.wants_logits)) for chunk in chunks]
        linears = {f"{name} in chunks": layers.task(in_chunks) for name, layers in self._linears.items()}
        linears["linear at once"] = self._linears["linear"].task([(case.context, 1)])
        tiles = self._matmuls.tasks()
        rounds, spans = self._measure({"step": step} | linears | tiles | samplers, case)
        name, flops_per_ms = self._matmuls.best({name: spans[name].min for name in tiles})
        attention_ms = self._shape.attention_flops(case.context, case.context) / flops_per_ms
        attention = spans[name].scaled(attention_ms / spans[name].min)
        linear = min((spans[name] for name in linears), key=lambda span: span.min)
        parts = {"linear": linear, "attention": attention}
        floor = _Floor(parts, matmul_gflop_s=flops_per_ms / 1e6, matmul=name)
        return self._row(case, rounds, spans, floor, step)

    def _run_each(self, chunks: Sequence[Segment]) -> None:
        for chunk in chunks:
            self._runner.run([chunk])

    def _measure(self, tasks: Mapping[str, Task], case: Case) -> tuple[int, dict[str, Span]]:
        if case.kind == "decode":  # a long prompt takes too long for a warm-up, and its first forward matters little
            for task in tasks.values():
                task()
        return measure(tasks, self._stopwatch, _QUICK_ROUNDS if self._is_quick else _ROUNDS[case.kind])

    def _row(self, case: Case, rounds: int, spans: Mapping[str, Span], floor: _Floor, step: Task) -> EngineRow:
        floor_ms = sum(floor.parts.values(), Span(0.0, 0.0))
        num_tokens = case.batch if case.kind == "decode" else case.context
        return EngineRow(
            case=str(case),
            kind=case.kind,
            batch=case.batch,
            context=case.context,
            chunk=self._chunk if case.kind == "prefill" else None,
            rounds=rounds,
            step_ms=spans["step"],
            floor_ms=floor_ms,
            ratio=spans["step"].min / floor_ms.min,
            tokens_per_s=num_tokens / spans["step"].min * 1e3,
            gflop_s=self._shape.flops(case.sequences, case.num_logit_rows) / spans["step"].min / 1e6,
            floor_parts_ms=floor.parts,
            read_gb_s=floor.read_gb_s,
            matmul_gflop_s=floor.matmul_gflop_s,
            matmul=floor.matmul,
            parts_ms=breakdown(self._runner, step, self._stopwatch),
            sampler_ms={name: spans[name] for name in _SAMPLINGS},
        )


def _samplers(logits: torch.Tensor) -> dict[str, Task]:
    """Choosing one token per row, once for each kind of sampling."""
    tasks: dict[str, Task] = {}
    for name, params in _SAMPLINGS.items():
        rows = [SampleRow(params, sample_index=0, position=row) for row in range(logits.shape[0])]
        tasks[name] = partial(sample, logits, rows, frozenset())
    return tasks
