"""`splitserve bench kv`: how fast KV blocks travel on this machine."""

import signal
from pathlib import Path

from splitserve.cli.bench.output import MESSAGES, RESULTS, require_writable, save, tell
from splitserve.cli.up import interrupt, require_serving
from splitserve.service.config import Positive
from splitserve.service.errors import InvalidRequest

_BLOCKS, _ROUNDS = "1,16,128,1024", 7
_QUICK_BLOCKS, _QUICK_ROUNDS = "1,4", 2


def kv(
    *,
    transports: str | None = None,
    blocks: str | None = None,
    block_bytes: Positive | None = None,
    rounds: Positive | None = None,
    quick: bool = False,
    output: Path | None = None,
) -> int:
    """Measure how fast KV blocks travel between two processes, beside what this machine allows.

    Blocks go from one pool to another as they do between a prefill and a decode worker, by the same code: tickets,
    credit, a digest of each block on both sides, and the copy into the pool. In the same run, in turns, and with the
    same bytes: a plain memcpy, plain sockets, ZeroMQ's own sockets with and without CURVE, and two plain ranks of Gloo
    or NCCL. After every round the bytes at both ends are compared.

    Columns: rate, its share of the memcpy's and of its own floor's (a plain socket, or two plain ranks), and processor
    seconds for each 10^9 bytes on both sides. docs/benchmarks.md explains them. Measure on a machine that does nothing
    else.

    Parameters
    ----------
    transports
        ipc: two workers on one host. tcp: the same over TCP, through loopback. gloo: a pair over Gloo, through
        loopback. nccl: a pair over NCCL, between two GPUs, or on one if its NCCL can. Default: ipc,tcp,gloo as far as
        they can be had, and nccl where there are two GPUs.
    blocks
        How many blocks a transfer has, such as 1,16. Default: 1,16,128,1024.
    block_bytes
        Size of a block. Default: that of the default model, 16 tokens in bfloat16.
    rounds
        How often to measure. Default: 7.
    quick
        Two rounds of small transfers, where nothing else is asked for: a try-out, whose figures mean little.
    output
        Write the report to this file, as JSON.
    """
    require_serving()
    require_writable(output)
    from splitserve.bench.kv.measure import DEFAULT_BLOCK_BYTES, KVBenchSettings, run_kv_bench
    from splitserve.bench.kv.sink import log_to_nowhere
    from splitserve.bench.kv.source import default_transports
    from splitserve.bench.kv.tables import kv_table
    from splitserve.bench.kv.ways import TRANSPORTS
    from splitserve.bench.tables import machine_line

    names = list(dict.fromkeys(transports.split(","))) if transports is not None else default_transports()
    if unknown := set(names) - set(TRANSPORTS):
        raise InvalidRequest(
            f"--transports {', '.join(sorted(unknown))}: there are {', '.join(TRANSPORTS)}", field="transports"
        )
    settings = KVBenchSettings(
        blocks=_counts(blocks or (_QUICK_BLOCKS if quick else _BLOCKS)),
        block_bytes=block_bytes or DEFAULT_BLOCK_BYTES,
        rounds=rounds or (_QUICK_ROUNDS if quick else _ROUNDS),
        transports=names,
    )
    signal.signal(signal.SIGTERM, interrupt)  # a sink must not be left behind
    log_to_nowhere("bench-kv")
    report, rows = run_kv_bench(settings, MESSAGES.print)
    RESULTS.print(machine_line(report.machine), soft_wrap=True)
    RESULTS.print(kv_table(rows))
    save(report, output)
    tell(output)
    return 0


def _counts(text: str) -> list[int]:
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InvalidRequest(f"--blocks {text}: numbers above 0 are needed, such as 1,16", field="blocks")
    return counts
