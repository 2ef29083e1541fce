"""`bench burst`: its figures against streams whose stalls are known, and the whole of it against a server of ticks."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from splitserve.bench.load.burst import Burst, Measured, rows_of, summarize
from splitserve.bench.load.gaps import Window, spread
from splitserve.bench.load.metronome import metronome
from splitserve.bench.load.prompts import Prompts
from splitserve.bench.load.tables import burst_tables
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import Internal
from splitserve.service.http_server import serve_http
from splitserve.service.ports import LOOPBACK

JITTER = spread([0.0001])


def ticks(start: float, end: float, gap_s: float) -> list[float]:
    return [float(t) for t in np.arange(start, end, gap_s)]


def known() -> Measured:
    """One stream: 10 ms gaps until 10 s, then 30 ms gaps in two bursts of 3 s, 10 ms between them; then another answer
    under the control, at 12 ms."""
    first = [*ticks(0, 10, 0.01), *ticks(10, 13, 0.03), *ticks(13, 15, 0.01), *ticks(15, 18, 0.03)]
    second = ticks(20, 30, 0.012)
    bursts = [
        Burst(Window(10.001, 12.999), [0.5, 1.0, 3.0], [1500, 1500, 1500], 48),
        Burst(Window(15.001, 17.999), [0.7, 2.0, 2.5], [1500, 1500, 1500], 48),
    ]
    return Measured([first, second], Window(0.0, 10.0), bursts, Window(20.0, 30.0), JITTER, 1.0)


def test_stalls_of_a_known_stream_come_out_otherwise() -> None:
    result = summarize(known())
    assert (result.quiet.p50_ms, result.quiet.p99_ms) == pytest.approx((10, 10))
    assert (result.burst.p50_ms, result.burst.p99_ms) == pytest.approx((30, 30))
    assert result.burst.count == pytest.approx(200, abs=4)
    assert result.control is not None
    assert result.control.p99_ms == pytest.approx(12)
    assert (result.ratio_p99, result.ratio_p99_control) == pytest.approx((3.0, 1.2))
    assert (result.ttft_median_s, result.ttft_max_s) == (1.5, 3.0)
    assert result.stalled_share == pytest.approx(1 / 3)
    assert result.stream_tokens_per_s == pytest.approx(1 / 0.03)
    seconds = 2 * 2.998
    assert result.burst_tokens_per_s == pytest.approx(96 / seconds)
    assert result.prompt_tokens_per_s == pytest.approx(9000 / seconds)


def test_gap_between_two_answers_counts_as_a_stall() -> None:
    measured = known()
    assert max(gap for gap in [summarize(measured).burst.max_ms, summarize(measured).quiet.max_ms]) < 31


def test_report_lacks_what_others_read_from_it() -> None:
    shown = summarize(known()).as_json()
    assert {"p50_ms", "p99_ms", "max_ms"} <= shown["quiet"].keys()
    assert {"p50_ms", "p95_ms", "p99_ms", "max_ms"} <= shown["burst"].keys()
    assert shown["ttft"].keys() == {"median_s", "max_s"}
    assert shown["ratio_p99"] == pytest.approx(3.0)
    assert shown["ratio_p99_control"] == pytest.approx(1.2)
    kinds = [row["kind"] for row in rows_of(known())]
    assert kinds == ["quiet", "burst", "burst", "control", "stream", "stream"]


def test_table_hides_that_a_piece_has_several_tokens() -> None:
    def told(tokens_per_piece: float) -> bool:
        measured = known()
        several = Measured(
            measured.arrivals, measured.quiet, measured.bursts, measured.control, JITTER, tokens_per_piece
        )
        return any("in a piece" in line for line in burst_tables(summarize(several)) if isinstance(line, str))

    assert told(1.5)
    assert not told(1.0)


def test_window_without_tokens_gives_figures() -> None:
    measured = known()
    with pytest.raises(Internal, match="no stream"):
        summarize(Measured([[0.0], [50.0]], measured.quiet, measured.bursts, None, JITTER, 1.0))


def test_prompts_have_another_length_or_repeat() -> None:
    tokenizer = Tokenizer.load(locate_model(None, loads_weights=False).directory)
    prompts, again = Prompts(tokenizer, 1), Prompts(tokenizer, 1)
    drawn = [prompts.draw(length) for length in (1, 2, 50, 50, 1500)]
    assert [len(tokenizer.encode(text)) for text in drawn] == [1, 2, 50, 50, 1500]
    assert len(set(drawn)) == len(drawn)
    assert [again.draw(length) for length in (1, 2, 50, 50, 1500)] == drawn


def run_bench(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "splitserve", "bench", "burst", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


async def test_small_run_leaves_no_table_json_or_picture(tmp_path: Path) -> None:
    report, plot = tmp_path / "burst.json", tmp_path / "burst.png"
    server = await serve_http(metronome(0.002), LOOPBACK, 0)
    try:
        done = await asyncio.to_thread(
            run_bench,
            *("--url", f"http://{LOOPBACK}:{server.port}", "--quiet-gaps", "60", "--gaps", "120"),
            *("--streams", "2", "--burst", "3", "--prompt-tokens", "40", "--stream-tokens", "150"),
            *("--control", "--control-cores", "0", "--output", str(report), "--plot", str(plot)),
        )
    finally:
        await server.stop()
    assert done.returncode == 0, done.stderr
    assert "own jitter" in done.stdout
    body = json.loads(report.read_text())
    assert {"bench", "version", "date", "machine", "args", "rows", "quiet", "burst", "control"} <= body.keys()
    assert body["args"]["burst"] == 3
    # What the report says of gaps is what its own times say.
    windows = {row["kind"]: row for row in body["rows"] if row["kind"] in ("quiet", "control")}
    streams = [row["arrivals_s"] for row in body["rows"] if row["kind"] == "stream"]
    assert len(streams) > 2, "streams go on after an answer has ended"
    for kind, window in windows.items():
        gaps = [
            end - start
            for stream in streams
            for start, end in itertools.pairwise(stream)
            if window["start"] <= start and end <= window["end"]
        ]
        assert body[kind]["count"] == pytest.approx(len(gaps), abs=2)
        assert body[kind]["max_ms"] == pytest.approx(1e3 * max(gaps), abs=0.01)
    shown = re.search(r"^quiet +(\d+)", done.stdout, re.M)
    assert shown is not None
    assert int(shown[1]) == body["quiet"]["count"] >= 60
    assert sum(row["kind"] == "burst" for row in body["rows"]) >= 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--url", "http://127.0.0.1:9"), "names no model"),
        (("--extra-body", "{"), "no JSON"),
        (("--extra-body", "[]"), "a JSON object"),
        (("--plot", "/nowhere/x.png"), "no directory"),
        (("--url", "http://127.0.0.1:9", "--control"), "--control-cores"),
    ],
)
def test_mistake_is_found_after_minutes(args: tuple[str, ...], told: str) -> None:
    done = run_bench(*args)
    assert done.returncode == 1
    assert told in done.stderr
