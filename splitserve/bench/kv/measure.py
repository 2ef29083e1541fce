"""`splitserve bench kv`: how fast KV blocks travel between two processes, beside what the machine allows.

From what was asked for to a report. The source is this process, the sink another one; nothing outlives the call.
"""

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from splitserve.bench.kv.pool import CPU, HostPool
from splitserve.bench.kv.sink import SinkProcess, sink_process
from splitserve.bench.kv.source import MEMCPY, Memcpy, Way, gpus, open_ways, require
from splitserve.bench.progress import Say
from splitserve.bench.report import Report, make_report
from splitserve.service.errors import Internal

DEFAULT_BLOCK_BYTES = 16 * 23_040
"A block of the default model: 16 tokens in bfloat16."
# A round of less would be over before it can be timed: small transfers are repeated, one after the other.
_ROUND_BYTES = 16 << 20
# More than an agent has at once would be another measurement.
_MAX_TRANSFERS = 64
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class KVBenchSettings:
    """As the command line has them; `transports` of TRANSPORTS."""

    blocks: Sequence[int]
    block_bytes: int
    rounds: int
    transports: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class KVRow:
    """One way and one number of blocks. GB are 10^9 bytes; rates are medians of `rounds`, each of `transfers` of so
    many `bytes`. `of_memcpy` and `of_floor` are `gb_s` by that of the memcpy and of the way's own floor, with
    the same bytes."""

    transport: str
    kind: str  # "transfer", the product's; "floor"; "zmq", raw ZeroMQ sockets
    blocks: int
    bytes: int
    rounds: int
    transfers: int
    gb_s: float
    best_gb_s: float
    source_cpu_s_per_gb: float
    sink_cpu_s_per_gb: float | None  # None where one process does it all
    of_memcpy: float | None  # None where blocks are not in host memory
    of_floor: float | None


@dataclass(frozen=True)
class Sample:
    """One round, in seconds."""

    wall: float
    source_cpu: float
    sink_cpu: float | None


def run_kv_bench(settings: KVBenchSettings, say: Say) -> tuple[Report, list[KVRow]]:
    """Raises Internal where bytes do not arrive, or arrive changed, and InvalidRequest or Unavailable for what cannot
    be measured here."""
    require(settings.transports)
    num_blocks = max(settings.blocks)
    device, sink_device = gpus() if "nccl" in settings.transports else (CPU, None)
    pool = HostPool(num_blocks, settings.block_bytes)
    rows: list[KVRow] = []
    with (
        sink_process(num_blocks, settings.block_bytes, sink_device) as sink,
        open_ways(sink, pool, settings.transports, say) as ways,
    ):
        course = _Course(sink, ways)
        for count in settings.blocks:
            say(f"{count} blocks")
            rows += course.rows(count, settings.rounds)
    return make_report("kv", asdict(settings), [asdict(row) for row in rows], device=device), rows


class _Course:
    """Rounds on all ways in turns, so that a noisy machine disturbs all of them alike."""

    def __init__(self, sink: SinkProcess, ways: Sequence[Way]) -> None:
        self._sink, self._ways = sink, ways
        self._numbers = itertools.count()

    def rows(self, num_blocks: int, num_rounds: int) -> list[KVRow]:
        num_bytes = num_blocks * self._ways[0].pool.block_nbytes
        num_transfers = min(math.ceil(_ROUND_BYTES / num_bytes), _MAX_TRANSFERS)
        samples: dict[str, list[Sample]] = {way.name: [] for way in self._ways}
        for number in range(-1, num_rounds):  # before the first one, all touch their memory
            for way in self._ways:
                sample = self._round(way, num_blocks, num_transfers)
                if number >= 0:
                    samples[way.name].append(sample)
        rates = {
            name: statistics.median(num_transfers * num_bytes / _GB / sample.wall for sample in taken)
            for name, taken in samples.items()
        }
        return [self._row(way, num_blocks, num_transfers, samples[way.name], rates) for way in self._ways]

    def _row(
        self, way: Way, num_blocks: int, num_transfers: int, samples: list[Sample], rates: dict[str, float]
    ) -> KVRow:
        num_bytes = num_blocks * way.pool.block_nbytes
        gigabytes = num_transfers * num_bytes / _GB
        sink_cpu = [sample.sink_cpu for sample in samples if sample.sink_cpu is not None]
        rate = rates[way.name]
        return KVRow(
            transport=way.name,
            kind=way.kind,
            blocks=num_blocks,
            bytes=num_bytes,
            rounds=len(samples),
            transfers=num_transfers,
            gb_s=rate,
            best_gb_s=gigabytes / min(sample.wall for sample in samples),
            source_cpu_s_per_gb=statistics.median(sample.source_cpu for sample in samples) / gigabytes,
            sink_cpu_s_per_gb=statistics.median(sink_cpu) / gigabytes if sink_cpu else None,
            of_memcpy=rate / rates[MEMCPY] if way.pool.device.type == "cpu" and way.name != MEMCPY else None,
            of_floor=rate / rates[way.floor] if way.floor else None,
        )

    def _round(self, way: Way, num_blocks: int, num_transfers: int) -> Sample:
        """Bytes that were never sent before, and are the same at the other end."""
        number = next(self._numbers)
        way.pool.stamp(number, num_blocks)
        transfer_ids = [f"{number}/{index}" for index in range(num_transfers)]
        if way.sink_end:
            self._sink.prepare(way.sink_end, transfer_ids, num_blocks)
        began, cpu_began = time.perf_counter(), time.process_time()
        for transfer_id in transfer_ids:
            way.sender.send(transfer_id, num_blocks)
        wall, source_cpu = time.perf_counter() - began, time.process_time() - cpu_began
        if isinstance(way.sender, Memcpy):
            arrived, sink_cpu = way.sender.digest(num_blocks * way.pool.block_nbytes), None
        else:
            received = self._sink.received()
            arrived, sink_cpu = received.digest, received.cpu_s
        if arrived != way.pool.digest(num_blocks):
            raise Internal(f"{way.name}: other bytes arrived than were sent")
        return Sample(wall, source_cpu, sink_cpu)
