"""`splitserve bench peers`: this server beside others."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.cli.bench.output import MESSAGES, require_writable, save, show
from splitserve.cli.placement import usable_cores
from splitserve.cli.up import interrupt, require_serving
from splitserve.service.config import Positive

if TYPE_CHECKING:
    from splitserve.bench.peers.run import PeerRow
    from splitserve.bench.report import Report


def peers(
    *,
    peers: str = "all",
    environments: Path = Path(".peers"),
    cores: str = "auto",
    burst: Positive = 8,
    prompt_tokens: Positive = 1500,
    output_tokens: Positive = 16,
    rate_tokens: Positive = 128,
    quiet_gaps: Positive = 600,
    gaps: Positive = 2000,
    seed: int | None = None,
    output: Path | None = None,
) -> int:
    """Measure this server beside others: same work, cores, weights and dtype, in one run. Takes long.

    `make peers` installs the others, each in an environment of its own; one that cannot be had is skipped with the
    reason. Every one is started, measured and ended before the next. Leave the machine alone meanwhile.

    Parameters
    ----------
    peers
        all, or some of their names, such as split,vllm.
    environments
        Where `make peers` put them.
    cores
        Cores that each of them may use, such as 0-3; auto: all.
    burst
        Prompts that come at once.
    prompt_tokens
        Length of each of them.
    output_tokens
        Tokens of each of their answers.
    rate_tokens
        Tokens of each answer when one stream, and eight, are measured without a burst.
    quiet_gaps
        Gaps between tokens to see before the first burst.
    gaps
        Gaps to see under bursts.
    seed
        Draws the same prompts again. Default: others each time.
    output
        Write the report to this file, as JSON, anew after each peer.
    """
    require_serving()
    require_writable(output)
    from splitserve.bench.peers.run import PeerSettings, chosen, run_peers
    from splitserve.bench.peers.tables import peer_tables

    settings = PeerSettings(
        names=chosen(peers),
        root=str(environments),
        cores=usable_cores(cores),
        burst=burst,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rate_tokens=rate_tokens,
        quiet_gaps=quiet_gaps,
        gaps=gaps,
        seed=time.time_ns() if seed is None else seed,
    )
    signal.signal(signal.SIGTERM, interrupt)  # no server may be left behind

    def report(rows: "Sequence[PeerRow]") -> "Report":
        from splitserve.bench.report import make_load_report

        return make_load_report("peers", settings, [row.as_json() for row in rows], {})

    rows = run_peers(settings, MESSAGES.print, lambda rows: save(report(rows), output))
    show(report(rows), peer_tables(rows), output)
    return 0
