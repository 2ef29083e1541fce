"""The second road on this machine: what `splitserve bench gpu` finds out of blocks between two ranks.

Each try is a process of its own with a deadline, since a library that nobody has tried here may end or stop it: an
answer of it is a row, whatever it is.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ERROR = "splitserve: "  # what the command line puts before the reason that it ends with


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """One answer. A `refusal` is the reason why there is no other, word for word; `path` is the way taken.

    Of two processes: `bytes` of one transfer and `gb_s`, 10^9 bytes per second. Of a cluster: all `bytes` of its KV
    that travelled, and whether its outputs are those over ZeroMQ.
    """

    kind: str = "pair"
    case: str
    path: str = ""
    bytes: int | None = None
    gb_s: float | None = None
    is_equal: bool | None = None
    refusal: str = ""


def try_ranks(library: str, blocks: str, rounds: int, folder: Path, deadline_s: float) -> list[PairRow]:
    """Two processes, a pool each, by the same code as `splitserve bench kv --transports` has it."""
    report, log_file = folder / "pair.json", folder / "pair.log"
    command = [sys.executable, "-P", "-m", "splitserve", "bench", "kv", "--transports", library]
    command += ["--blocks", blocks, "--rounds", str(rounds), "--output", str(report)]
    with log_file.open("wb") as log:
        # In a session of its own: Ctrl-C reaches this process, which then ends it.
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return [PairRow(case=library, refusal=f"no answer within {deadline_s:g} s: {_last_words(log_file)}")]
    finally:
        process.kill()  # the other rank's process ends with it
        process.wait()
    if status != 0:
        end = f"ended by {signal.Signals(-status).name}: " if status < 0 else ""
        return [PairRow(case=library, refusal=f"{end}{_last_words(log_file)}")]
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    return [
        PairRow(
            case=f"{row['blocks']} block{'s' if row['blocks'] > 1 else ''}",
            path=row["transport"],
            bytes=row["bytes"],
            gb_s=row["gb_s"],
        )
        for row in rows
        if row["transport"].removeprefix("raw ").startswith(library)
    ]


def _last_words(log_file: Path) -> str:
    """The reason given last, else the last line that says something."""
    lines = [line.strip() for line in log_file.read_text(encoding="utf-8", errors="replace").splitlines()]
    reasons = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (reasons or [line for line in lines if line] or [""])[-1]


def is_refused(rows: Sequence[PairRow]) -> bool:
    return any(row.refusal for row in rows)
