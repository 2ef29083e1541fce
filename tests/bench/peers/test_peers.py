"""`bench peers`: who cannot be had is named with the reason, who runs is measured, and nobody is left behind."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitserve.bench.load.openai_client import Answer
from splitserve.bench.peers import catalog, run
from splitserve.bench.peers.catalog import PEERS, Peer, Setup, Site
from splitserve.bench.peers.environments import BUILDERS, build, environment
from splitserve.bench.peers.proxy import proxy
from splitserve.bench.peers.run import NAMES, PeerSettings, chosen, rate, run_peers
from splitserve.bench.peers.servers import Process, running
from splitserve.bench.peers.tables import peer_tables
from splitserve.service.errors import InvalidRequest, Unavailable
from splitserve.service.http_server import serve_http
from splitserve.service.ports import LOOPBACK, claim
from tests import tiny_models
from tests.bench.load.scripted import scripted
from tests.bench.load.test_openai_client import event, text_event

CORES = sorted(os.sched_getaffinity(0))


def site(root: Path) -> Site:
    return Site(root, root, CORES, lambda: claim({"port": 0})["port"])


def ticking(port: int, *, name: str = "ticks", cores: Sequence[int] = CORES) -> Process:
    """A peer that says a token every 2 ms."""
    command = [sys.executable, "-P", "-m", "splitserve.bench.load.metronome", str(port), "0.002"]
    return Process(name=name, command=command, cores=cores, ready_url=f"http://{LOOPBACK}:{port}/v1/models")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def settings(root: Path, names: Sequence[str]) -> PeerSettings:
    return PeerSettings(
        names=names,
        root=str(root),
        cores=CORES,
        burst=2,
        prompt_tokens=30,
        output_tokens=8,
        rate_tokens=10,
        quiet_gaps=40,
        gaps=40,
        seed=1,
    )


def test_peer_that_cannot_be_had_ends_the_run_or_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Site) -> Setup:
        raise Unavailable("no environment there: no compiler")

    def broken(where: Site) -> Setup:
        command = [sys.executable, "-c", "print('starting'); print('cannot open the model'); raise SystemExit(3)"]
        return Setup([Process(name="broken", command=command, cores=where.cores, ready_url="http://127.0.0.1:9")], "")

    def ticks(where: Site) -> Setup:
        port = where.port()
        return Setup([ticking(port)], f"http://{LOOPBACK}:{port}", stream_tokens=100)

    peers = (Peer("missing", "Missing", missing), Peer("broken", "Broken", broken), Peer("ticks", "Ticks", ticks))
    monkeypatch.setattr(run, "PEERS", peers)
    before, seen = children(), []
    rows = run_peers(settings(tmp_path, [peer.name for peer in peers]), print, lambda rows: seen.append(len(rows)))
    assert seen == [1, 2, 3]
    assert rows[0].skipped == "no environment there: no compiler"
    assert rows[1].skipped is not None
    assert "cannot open the model" in rows[1].skipped
    assert rows[2].skipped is None
    assert rows[2].burst is not None
    assert rows[2].burst.quiet.count >= 40
    assert min(rows[2].b8_tokens_per_s or 0, rows[2].b1_tokens_per_s or 0) > 0
    assert children() == before
    table, *lines = peer_tables(rows)
    assert getattr(table, "row_count", 0) == 1
    assert [str(line).partition(":")[0] for line in lines] == ["Missing", "Broken"]
    assert json.loads(json.dumps([row.as_json() for row in rows]))[2]["burst"]["ratio_p99"] > 0


def test_server_outlives_its_measurement_or_leaves_its_cores(tmp_path: Path) -> None:
    port, other = claim({"a": 0, "b": 0}).values()
    before = children()
    with running([ticking(port, name="a", cores=CORES[:1]), ticking(other, name="b")], tmp_path, 60.0) as start_s:
        assert start_s > 0
        started = children() - before
        assert len(started) == 2
        assert sorted(psutil.Process(pid).cpu_affinity() for pid in started) == sorted([CORES[:1], CORES])
    assert children() == before


def test_sum_of_streams_counts_first_tokens_or_one_streams_time() -> None:
    first = Answer(0.0, [1.0, 1.5, 2.0], 3)
    second = Answer(0.0, [1.25, 2.0, 3.0], 5)
    assert rate([first]) == pytest.approx(2 / 1.0)
    assert rate([first, second]) == pytest.approx(6 / 2.0)


def test_name_that_is_none_is_measured() -> None:
    assert chosen("all") == list(NAMES)
    assert chosen("vllm,split") == ["vllm", "split"]
    with pytest.raises(InvalidRequest, match=r"nobody.*split"):
        chosen("split,nobody")


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.name not in ("split", "aggregated")])
def test_peer_starts_without_its_environment(peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="make peers"):
        peer.set_up(site(tmp_path))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peer_gets_cores_or_a_model_of_its_own(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BUILDERS:
        folder = environment(tmp_path, name).folder
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "libiomp5.so").touch()
        (folder / "built.txt").touch()
    monkeypatch.setattr(catalog, "_gguf", lambda _, model: model / "model.gguf")
    setup = peer.set_up(site(tmp_path))
    assert {core for process in setup.processes for core in process.cores} <= set(CORES)
    loading = [process for process in setup.processes if process.name != "proxy"]
    assert loading
    assert all(any(str(tmp_path) == arg or arg.endswith(".gguf") for arg in process.command) for process in loading)


def test_environment_that_failed_is_taken_for_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([Unavailable("pip install failed: no such version"), None])

    def builder(_: Any) -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    monkeypatch.setitem(BUILDERS, "vllm", builder)  # type: ignore[arg-type]
    env = environment(tmp_path, "vllm")
    with pytest.raises(Unavailable, match="make peers"):
        env.require()
    with pytest.raises(Unavailable):
        build(env)
    with pytest.raises(Unavailable, match="no such version"):
        env.require()
    build(env)
    env.require()
    build(env)  # a third builder call would be one too many
    assert next(outcomes, "none left") == "none left"


def test_sequential_baseline_measures_another_work(tmp_path: Path) -> None:
    model = tiny_models.build("llama", tmp_path / "model")
    row = run._sequential("generate-no-cache", Site(tmp_path, model, CORES, lambda: 0), settings(tmp_path, []))
    assert row.skipped is None
    assert (row.b1_tokens_per_s or 0) > 0
    # The second of two prompts waits for the whole answer of the first.
    assert 0 < (row.ttft_median_s or 0) < (row.ttft_max_s or 0)
    nowhere = Site(tmp_path, tmp_path / "nowhere", CORES, lambda: 0)
    assert "nowhere" in (run._sequential("generate", nowhere, settings(tmp_path, [])).skipped or "")


async def test_proxy_sends_all_to_one_server_or_loses_the_parameters_of_a_transfer() -> None:
    asked: dict[str, list[dict[str, Any]]] = {"first": [], "second": []}

    def reply(name: str) -> Any:
        def answer(body: dict[str, Any]) -> list[bytes]:
            asked[name].append(body)
            if body.get("stream"):
                return [text_event(name), event(choices=[], usage={"completion_tokens": 1})]
            return [json.dumps({"kv_transfer_params": {"remote_port": 7}}).encode()]

        return answer

    async with scripted(reply("first")) as first, scripted(reply("second")) as second:
        for mode in ("round-robin", "prefill-decode"):
            server = await serve_http(proxy(mode, [first, second]), LOOPBACK, 0)
            try:
                texts = await asyncio.gather(*(post(server.port, number) for number in range(2)))
            finally:
                await server.stop()
            if mode == "round-robin":
                assert [len(bodies) for bodies in asked.values()] == [1, 1]
            else:
                assert all("second" in text and "first" not in text for text in texts)
    prefills, decodes = asked["first"][1:], asked["second"][1:]
    assert [(body["max_tokens"], body["stream"]) for body in prefills] == [(1, False)] * 2
    assert all(body["kv_transfer_params"]["do_remote_decode"] for body in prefills)
    assert all(body["kv_transfer_params"] == {"remote_port": 7} and body["max_tokens"] == 5 for body in decodes)


async def post(port: int, number: int) -> str:
    import httpx

    body = {"prompt": str(number), "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body)).text
