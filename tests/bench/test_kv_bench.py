"""The transfers' benchmark: that the bytes it counts have arrived, and that a row says what was measured."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from kvtransfer.endpoint import KVEndpoint
from splitserve.bench.kv import control, measure, ranks, sink, source, ways
from splitserve.bench.kv.agents import AgentReceiver, AgentSender
from splitserve.bench.kv.measure import KVBenchSettings, KVRow, Sample, run_kv_bench
from splitserve.bench.kv.pool import HostPool
from splitserve.bench.kv.ranks import RankReceiver, RankSender
from splitserve.bench.kv.sink import SinkProcess
from splitserve.bench.kv.sockets import SocketReceiver, SocketSender, tcp_pair, unix_pair
from splitserve.bench.kv.source import Memcpy, Way
from splitserve.bench.kv.zmq_sockets import ZmqReceiver, ZmqSender
from splitserve.cli.main import make_app
from splitserve.engine.pool import KVPool
from splitserve.service.errors import Internal, InvalidRequest, Unavailable

BLOCK_NBYTES = 4096
PRODUCT = {"zmq ipc", "zmq tcp", "gloo"}
FLOORS = {"memcpy", "unix socket", "tcp socket", "raw gloo"}
RAW = {"raw zmq tcp", "raw zmq tcp + CURVE"}
TRANSPORTS = ["ipc", "tcp", "gloo"]


def test_row_is_missing_or_makes_no_sense_or_the_sink_stays(tmp_path: Path) -> None:
    """Two real processes, as a user starts them."""
    output = tmp_path / "kv.json"
    command = [sys.executable, "-P", "-m", "splitserve", "bench", "kv", "--quick"]
    command += ["--block-bytes", str(BLOCK_NBYTES), "--output", str(output)]
    # The path of an ipc socket has to be short, and that of a test's own folder may be long.
    with tempfile.TemporaryDirectory(prefix="kv-") as scratch:
        env = os.environ | {"TMPDIR": scratch, "COLUMNS": "80"}
        # A sink that stayed would hold the pipes open, and this would wait for it.
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert os.listdir(scratch) == [], "the sink has not tidied up"
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert set(report) == {"bench", "version", "date", "machine", "args", "rows"}
    assert report["args"] == {"blocks": [1, 4], "block_bytes": BLOCK_NBYTES, "rounds": 2, "transports": TRANSPORTS}
    rows = {(row["transport"], row["blocks"]): row for row in report["rows"]}
    assert set(rows) == {(name, blocks) for name in PRODUCT | FLOORS | RAW for blocks in (1, 4)}
    shown = done.stdout.splitlines()
    for (name, blocks), row in rows.items():
        assert row["bytes"] == blocks * BLOCK_NBYTES
        assert row["transfers"] == 64
        assert row["best_gb_s"] >= row["gb_s"] > 0
        assert row["source_cpu_s_per_gb"] > 0
        assert (row["sink_cpu_s_per_gb"] or 0) > 0 or name == "memcpy"
        assert (row["of_memcpy"] is None) == (name == "memcpy")
        assert (row["of_floor"] is None) == (name in FLOORS)
        assert any(line.startswith(f"{blocks} {name} ") and f" {row['gb_s']:.2f} " in line for line in shown), shown


def test_field_is_not_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## `splitserve bench kv`")
    section, _, _ = section.partition("\n## ")
    assert [name for name in KVRow.__dataclass_fields__ if f"`{name}`" not in section] == []


# In one process, the sink on a thread


@pytest.fixture
def _sink_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def near(num_blocks: int, block_nbytes: int, gpu: None) -> Iterator[SinkProcess]:
        (link, unix, tcp), theirs = zip(unix_pair(), unix_pair(), tcp_pair(), strict=True)
        thread = threading.Thread(target=sink._serve, args=(control.Control(theirs[0]), *theirs[1:]))
        thread.start()
        channel = control.Control(link)
        channel.send(control.Setup(num_blocks, block_nbytes))
        try:
            yield SinkProcess(channel, unix, tcp)
        finally:
            link.shutdown(socket.SHUT_RDWR)
            thread.join()
            channel.close()

    monkeypatch.setattr(measure, "sink_process", near)
    monkeypatch.setattr(measure, "_ROUND_BYTES", 1)


def run(**changes: object) -> list[KVRow]:
    settings = {"blocks": [3], "block_bytes": BLOCK_NBYTES, "rounds": 1, "transports": TRANSPORTS}
    return run_kv_bench(KVBenchSettings(**(settings | changes)), lambda text: None)[1]  # type: ignore[arg-type]


@pytest.mark.usefixtures("_sink_is_near")
@pytest.mark.parametrize(
    ("transport", "rows"),
    [
        ("ipc", {"memcpy": "", "unix socket": "", "zmq ipc": "unix socket"}),
        ("gloo", {"memcpy": "", "raw gloo": "", "gloo": "raw gloo"}),
    ],
)
def test_one_transport_brings_the_other(transport: str, rows: dict[str, str]) -> None:
    found = {row.transport: row for row in run(transports=[transport])}
    assert list(found) == list(rows)
    for name, floor in rows.items():
        assert found[name].of_floor == (found[name].gb_s / found[floor].gb_s if floor else None)


def nothing(*_: object) -> None:
    """In place of what would write the bytes."""


def last_byte_changed(view: Callable[[KVPool, int], memoryview]) -> Callable[[KVPool, int], memoryview]:
    def changed(pool: KVPool, block_id: int) -> memoryview:
        copy = bytearray(view(pool, block_id))
        copy[-1] ^= block_id == 2
        return memoryview(copy)

    return changed


@pytest.mark.usefixtures("_sink_is_near")
@pytest.mark.parametrize(
    ("transport", "owner", "method", "damaged"),
    [
        ("zmq ipc", KVPool, "write", nothing),
        ("zmq ipc", KVPool, "view", last_byte_changed(KVPool.view)),
        ("unix socket", SocketReceiver, "receive", lambda self: self._socket.sendall(b".")),
        ("memcpy", Memcpy, "send", nothing),
        ("raw gloo", ranks._Rank, "_move", nothing),
        ("gloo", KVPool, "write", nothing),
    ],
    ids=["never written", "changed", "never received", "never copied", "never moved", "never scattered"],
)
def test_bytes_that_are_not_those_sent_are_counted(
    monkeypatch: pytest.MonkeyPatch, transport: str, owner: type, method: str, damaged: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, method, damaged)
    with pytest.raises(Internal, match=f"{transport}: other bytes arrived"):
        run(transports=["gloo" if "gloo" in transport else "ipc"])


@pytest.fixture
def pool() -> HostPool:
    return HostPool(4, BLOCK_NBYTES)


class Still:
    """A sender that is not asked to send."""

    def send(self, transfer_id: str, num_blocks: int) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def test_row_is_a_mean_or_of_another_floor(monkeypatch: pytest.MonkeyPatch, pool: HostPool) -> None:
    """Rounds of 4 kB, three of which count: the median of the rates, beside the floor of the same kind of socket."""
    scripted = {  # seconds on the wall, and of both processors, for 4.096e-6 GB
        "memcpy": [(9.0, 0.0, None), (1e-6, 1e-6, None), (2e-6, 2e-6, None), (4e-6, 4e-6, None)],
        "unix socket": [(9.0, 0.0, 0.0)] + [(4e-6, 1e-6, 1e-6)] * 3,
        "tcp socket": [(9.0, 0.0, 0.0)] + [(8e-6, 1e-6, 1e-6)] * 3,
        "zmq tcp": [(9.0, 0.0, 0.0), (16e-6, 3e-6, 2e-6), (10e-6, 7e-6, 8e-6), (40e-6, 5e-6, 4e-6)],
    }
    kinds = dict.fromkeys(scripted, "floor") | {"zmq tcp": "transfer"}
    floors = {"zmq tcp": "tcp socket"}
    found = [Way(name, kinds[name], floors.get(name, ""), "", pool, Still()) for name in scripted]
    rounds = {name: iter(samples) for name, samples in scripted.items()}
    monkeypatch.setattr(measure._Course, "_round", lambda self, way, *_: Sample(*next(rounds[way.name])))
    monkeypatch.setattr(measure, "_ROUND_BYTES", 1)
    unused: SinkProcess = None  # type: ignore[assignment]
    rows = {row.transport: row for row in measure._Course(unused, found).rows(1, 3)}
    row = rows["zmq tcp"]
    assert (row.rounds, row.transfers, row.bytes, row.kind) == (3, 1, BLOCK_NBYTES, "transfer")
    assert (row.gb_s, row.best_gb_s) == pytest.approx((4.096 / 16, 4.096 / 10))
    assert (row.source_cpu_s_per_gb, row.sink_cpu_s_per_gb) == pytest.approx((5 / 4.096, 4 / 4.096))
    assert (row.of_memcpy, row.of_floor) == pytest.approx((2 / 16, 8 / 16))
    assert (rows["unix socket"].of_memcpy, rows["unix socket"].of_floor) == (pytest.approx(0.5), None)
    assert (rows["memcpy"].of_memcpy, rows["memcpy"].sink_cpu_s_per_gb) == (None, None)


# What does not come to its end


@pytest.fixture
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has patience."""
    from splitserve.bench.kv import agents, sockets, zmq_sockets

    for module in (ways, agents, ranks, sockets, zmq_sockets):
        monkeypatch.setattr(module, "PATIENCE_S", 0.05)


def test_sink_that_does_not_expect_a_transfer_is_waited_for(pool: HostPool) -> None:
    receiver = AgentReceiver(pool, "zmq,gloo")
    sender = AgentSender(pool, receiver.address, "tcp")
    try:
        with pytest.raises(Internal, match="instead of TransferAcked came TransferFailed"):
            sender.send("unheard of", 2)
    finally:
        sender.close()
        receiver.close()


@pytest.mark.usefixtures("_hurried")
def test_source_that_sends_nothing_is_waited_for(pool: HostPool) -> None:
    near, far = unix_pair()
    waiting = [AgentReceiver(pool, "zmq,gloo"), SocketReceiver(pool, far), ZmqReceiver(pool, is_encrypted=True)]
    words = ["came TransferFailed|no TransferComplete", "timed out", "nothing came"]
    for receiver, word in zip(waiting, words, strict=True):
        receiver.prepare(["a"], 1)
        with pytest.raises((Internal, TimeoutError), match=word):
            receiver.receive()
        receiver.close()
    near.close()


@pytest.mark.usefixtures("_hurried")
def test_sink_that_takes_nothing_is_waited_for(pool: HostPool) -> None:
    near, far = unix_pair()
    with pytest.raises(TimeoutError):
        SocketSender(pool, near).send("a", 1)
    near.close()
    far.close()
    receiver = ZmqReceiver(pool, is_encrypted=False)
    sender = ZmqSender(pool, receiver.address)
    with pytest.raises(Internal, match="took nothing"):
        sender.send("a", 1)
    sender.close()
    receiver.close()


def test_tcp_is_measured_as_ipc(pool: HostPool) -> None:
    """A sink that can only be reached by TCP, where the other path was asked for."""
    receiver = AgentReceiver(pool, "zmq,gloo")
    tcp = KVEndpoint(msgspec.json.decode(receiver.address, type=KVEndpoint).tcp)
    try:
        with pytest.raises(Unavailable, match="no ipc between two processes here, only tcp"):
            AgentSender(pool, msgspec.json.encode(tcp), "ipc")
    finally:
        receiver.close()


def test_transport_that_the_sink_does_not_take_is_measured_as_another(pool: HostPool) -> None:
    receiver = AgentReceiver(pool, "zmq")
    try:
        with pytest.raises(Unavailable, match=r"--transports gloo: .*it takes zmq"):
            AgentSender(pool, receiver.address, "gloo")
    finally:
        receiver.close()


@pytest.mark.usefixtures("_hurried")
def test_rank_without_a_second_one_is_waited_for(pool: HostPool) -> None:
    receiver = RankReceiver(pool, "gloo")
    with pytest.raises((Internal, Unavailable), match="gloo"):
        receiver.prepare(["a"], 1)
    receiver.close()


def test_refusal_of_a_library_loses_its_reason(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("invalid usage\nLast error:\nDuplicate GPU detected")

    receiver = RankReceiver(pool, "gloo")
    monkeypatch.setattr(ranks, "_form_gloo", refuses)
    with pytest.raises(Unavailable, match="gloo: invalid usage Last error: Duplicate GPU detected"):
        RankSender(pool, receiver.address, "gloo")
    receiver.close()


def test_raw_nccl_is_asked_for_each_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a common launch torch would connect the two ranks once more, and serialise them."""
    asked: list[object] = []

    class Group:
        """Declares its messages as torch does."""

        def _start_coalescing(self) -> None:
            asked.append("start")

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
            asked.append((tensors[0].tolist(), peer))

        def _end_coalescing(self) -> None:
            asked.append("end")

    monkeypatch.setattr(ranks, "_form_nccl", lambda *_: Group())
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    rank = ranks._Rank("nccl", 0, None, torch.device("cpu"))
    rank.await_other()
    rank._device = torch.device("cuda:0")
    rank.send([torch.tensor([1, 2]), torch.tensor([3])])
    assert asked == ["start", ([1, 2], 1), ([3], 1), "end", rank._device]


def says(replies: Sequence[control.Reply | None]) -> SinkProcess:
    """A sink that says all of this at once and then is silent, or gone where None is the last."""
    ours, theirs = unix_pair()
    channel = control.Control(theirs)
    for reply in replies:
        if reply is None:
            theirs.shutdown(socket.SHUT_WR)
        else:
            channel.send(reply)
    ours.settimeout(0.05)
    silent = SinkProcess(control.Control(ours), ours, ours)
    silent.kept = channel  # type: ignore[attr-defined]
    return silent


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([], "is silent"),
        ([control.Failed("no memory")], "failed: no memory"),
        ([control.Prepared()], "failed: it said Prepared"),
        ([control.Opened(b""), control.Opened(b""), None], "has ended"),
    ],
)
def test_sink_that_is_gone_is_waited_for(replies: list[control.Reply | None], message: str) -> None:
    gone = says(replies)
    for _ in range(len(replies) - 1):
        gone.open("agent")
    with pytest.raises(Internal, match=message):
        gone.open("agent")


def test_sink_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool cannot be."""
    for name in ("end_with_parent", "log_to_nowhere"):
        monkeypatch.setattr(sink, name, nothing)
    (link, unix, tcp), theirs = zip(unix_pair(), unix_pair(), unix_pair(), strict=True)
    monkeypatch.setattr(sys, "argv", ["sink", *(str(end.detach()) for end in theirs)])
    channel = control.Control(link)
    channel.send(control.Setup(0, 64))
    assert sink._main() == 1
    with pytest.raises(Internal, match="failed: ValueError: a pool needs at least 1 block"):
        SinkProcess(channel, unix, tcp).open("agent")
    for end in (link, unix, tcp):
        end.close()


# What is asked for


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--transports", "ipc,pigeon"], "pigeon"),
        (["--blocks", "1,0"], "--blocks 1,0"),
        (["--blocks", "many"], "--blocks many"),
        (["--block-bytes", "4"], "--block-bytes 4"),
        (["--block-bytes", "18"], "--block-bytes 18"),
        (["--output", "/no/such/directory/kv.json"], "there is no directory"),
    ],
)
def test_impossible_is_measured(flags: list[str], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "log_to_nowhere", lambda role: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    with pytest.raises(InvalidRequest, match=word):
        make_app()(["bench", "kv", *flags])


def test_gpu_that_is_not_there_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(Unavailable, match="--transports nccl: there is no GPU"):
        run(transports=["nccl"])
    assert source.default_transports() == TRANSPORTS
    monkeypatch.setattr(source, "why_not", lambda transport, device: "no such library")
    assert source.default_transports() == ["ipc", "tcp"]


@pytest.mark.parametrize(("count", "sink_index", "is_shared"), [(1, 0, True), (2, 1, False), (8, 1, False)])
def test_gpu_is_shared_without_need_or_unannounced(
    monkeypatch: pytest.MonkeyPatch, count: int, sink_index: int, is_shared: bool
) -> None:
    monkeypatch.setenv(source.SHARED_GPU, "to be undone")
    monkeypatch.delenv(source.SHARED_GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert source.gpus() == (torch.device("cuda", 0), torch.device("cuda", sink_index))
    assert os.environ.get(source.SHARED_GPU) == ("1" if is_shared else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(source, "why_not", lambda transport, device: None)
    assert ("nccl" in source.default_transports()) == (not is_shared)
