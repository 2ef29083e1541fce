"""The GPU's benchmark, dry on the CPU: real processes, real tokens, and a verdict that can be no."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.bench import gpu, gpu_pairs, local_cluster, tables
from splitserve.bench.gpu_pairs import PairRow
from splitserve.bench.random_model import TINY, write_random_model
from splitserve.bench.report import Report
from splitserve.bench.tokens import Reference, TokensRow, random_prompts
from splitserve.cli.main import make_app
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import Internal, InvalidRequest, Unavailable
from tests.reference import greedy, logits

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random")
    write_random_model(directory, TINY, CPU)
    return directory


@pytest.mark.cluster
def test_dry_run_finds_other_tokens_or_measures_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    assert make_app()(["bench", "gpu", "--device", "cpu", "--quick", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert set(report) == {"bench", "version", "date", "machine", "args", "rows"}
    workers = {worker["role"]: worker for worker in report["args"]["workers"]}
    assert {worker["device"] for worker in workers.values()} == {"cpu"}
    assert {worker["transport"] for worker in workers.values()} == {"zmq"}
    assert workers["decode"]["kv_bytes_received"] == workers["prefill"]["kv_bytes_sent"] > 0
    tokens = [row for row in report["rows"] if row["kind"] == "tokens"]
    assert [row["prompt_tokens"] for row in tokens] == [1, 17, 100]
    assert all(row["is_equal"] and row["output_tokens"] == 12 for row in tokens)
    assert report["args"]["seconds"] > 1
    *ranks, over_pairs = [row for row in report["rows"] if row["kind"] == "pair"]
    assert [(row["case"], row["path"]) for row in ranks] == [
        (case, path) for case in ("1 block", "4 blocks") for path in ("raw gloo", "gloo")
    ]
    assert all(row["gb_s"] > 0 and not row["refusal"] for row in ranks)
    assert (over_pairs["case"], over_pairs["path"], over_pairs["is_equal"]) == ("cluster", "gloo", True)
    assert over_pairs["bytes"] == workers["prefill"]["kv_bytes_sent"]
    assert [row["case"] for row in report["rows"][8:]] == ["decode 1x32", "decode 8x32", "prefill 64"]
    assert all(row["gflop_s"] > 0 for row in report["rows"][8:])
    shown = capfd.readouterr().out
    assert "prompt of 100" in shown
    assert f"all of it took {report['args']['seconds']:.0f} s" in shown


@pytest.mark.cluster
def test_full_plan_cannot_be_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU is tried with, on a tiny model: flags, prompts and cases. A refusal is an answer, and no failure."""
    refusal = PairRow(case="gloo", refusal="out of order")
    monkeypatch.setattr(gpu, "try_ranks", lambda *_: [refusal])
    directory = tmp_path / "model"
    directory.mkdir()
    write_random_model(directory, dataclasses.replace(TINY, max_model_len=2048), CPU)
    output = tmp_path / "gpu.json"
    assert make_app()(["bench", "gpu", "--device", "cpu", "--model", str(directory), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    tokens, (pair, *steps) = report["rows"][:7], report["rows"][7:]
    assert pair == dataclasses.asdict(refusal)
    assert [row["prompt_tokens"] for row in tokens] == [1, 15, 16, 17, 100, 700, 1500]
    assert all(row["output_tokens"] == 48 and row["ties"] < 5 for row in tokens)
    assert [row["case"] for row in steps] == ["decode 1x1024", "decode 8x1024", "decode 32x1024", "prefill 2048"]
    sent = next(worker["kv_bytes_sent"] for worker in report["args"]["workers"] if worker["role"] == "prefill")
    num_blocks = sum(-(-row["prompt_tokens"] // 16) for row in tokens)
    assert sent == num_blocks * 16 * TINY.num_layers * 2 * TINY.num_kv_heads * 16 * 4  # heads of 16, float32


@pytest.mark.parametrize(("is_equal", "is_pair_equal"), [(True, True), (True, None), (False, None), (True, False)])
def test_wrong_token_ends_in_success(
    monkeypatch: pytest.MonkeyPatch, is_equal: bool, is_pair_equal: bool | None
) -> None:
    pair = PairRow(case="cluster", is_equal=is_pair_equal)
    row = TokensRow(
        kind="tokens",
        prompt_tokens=5,
        output_tokens=9,
        ties=2,
        first_difference=None if is_equal else 3,
        margin=None if is_equal else 0.5,
        is_equal=is_equal,
    )
    machine = {"cpu": "a processor", "cores": 1, "flags": [], "torch": "2", "threads": 1, "load_average": 0.0}
    result = gpu.GpuResult([row], [pair], [], Report("gpu", "0", "now", machine, {}, []), 1.0)
    monkeypatch.setattr(gpu, "run_gpu_bench", lambda settings, say: result)
    is_right = is_equal and is_pair_equal is not False
    assert make_app()(["bench", "gpu", "--device", "cpu"]) == (0 if is_right else 1)


def test_first_difference_is_elsewhere(tiny: Path) -> None:
    reference = Reference(tiny, CPU)
    (prompt,) = random_prompts([20], TINY.vocab_size)
    expected = greedy(tiny, prompt, 8)
    assert reference.compare(prompt, expected) == TokensRow(
        kind="tokens", prompt_tokens=20, output_tokens=8, ties=0, first_difference=None, margin=None, is_equal=True
    )
    wrong = [*expected[:5], (expected[5] + 1) % TINY.vocab_size, expected[6], 0]
    row = reference.compare(prompt, wrong)
    assert (row.is_equal, row.first_difference) == (False, 5)
    expected_margin = logits(tiny, prompt + expected[:5])[-1]
    assert row.margin == pytest.approx(float(expected_margin[expected[5]] - expected_margin[wrong[5]]), abs=1e-4)


@pytest.mark.parametrize(("factor", "is_tie"), [(1.0, True), (1 + 1e-6, True), (0.9, False)])
def test_tie_is_called_a_difference(tiny: Path, factor: float, is_tie: bool) -> None:
    """A token with the same row of the head, or nearly the same, in place of the likeliest; and what follows it."""
    reference = Reference(tiny, CPU)
    (prompt,) = random_prompts([20], TINY.vocab_size)
    expected = greedy(tiny, prompt, 6)
    twin = next(token for token in range(TINY.vocab_size) if token not in expected)
    head = reference._model.lm_head.weight
    with torch.no_grad():
        head[twin] = head[expected[5]] * factor
    row = reference.compare(prompt, [*expected[:5], twin])
    assert (row.is_equal, row.first_difference) == ((True, None) if is_tie else (False, 5))
    # The twins are tied wherever one of them is the likeliest.
    assert row.ties == (expected.count(expected[5]) if is_tie else 0)
    assert not reference.compare(prompt, [*expected[:4], twin, expected[5]]).is_equal


def test_random_model_says_the_same_whatever_it_is_asked(tiny: Path) -> None:
    """A model that echoes, or repeats itself at once, would hide wrong KV."""
    first, second = random_prompts([30, 30], TINY.vocab_size)
    assert first != second
    assert greedy(tiny, first, 16) != greedy(tiny, second, 16)
    assert greedy(tiny, [*second[:1], *first[1:]], 16) != greedy(tiny, first, 16)
    assert len(set(greedy(tiny, first, 16))) > 4


def test_random_model_cannot_be_served(tiny: Path) -> None:
    description = locate_model(str(tiny))
    assert (description.vocab_size, description.max_model_len) == (TINY.vocab_size, TINY.max_model_len)
    assert description.eos_token_ids == ()
    tokenizer = Tokenizer.load(tiny)
    assert tokenizer.decode(tokenizer.encode("a brown fox, één")) == "a brown fox, één"


def test_device_that_is_not_here_is_noticed_after_the_model_is_made() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InvalidRequest, match="cuda:0"):
        make_app()(["bench", "gpu"])


class FakeUp:
    """A process that ends, or does not, and never answers."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.status

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout: float | None = None) -> int:
        return 0


@pytest.fixture
def _never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_is_ready", lambda cluster: False)
    monkeypatch.setattr(local_cluster, "_POLL_S", 0.001)


@pytest.mark.usefixtures("_never_ready")
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(1, Internal, "ended before it was ready: no room"), (None, Unavailable, "not ready within 0.01 s: no room")],
)
def test_cluster_that_does_not_start_is_waited_for_or_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int | None, error: type[Exception], message: str
) -> None:
    process = FakeUp(status)

    def popen(command: list[str], *, stdout: Any, **_: Any) -> FakeUp:
        assert command[3:7] == ["splitserve", "up", "--model", "somewhere"]
        assert command[-2:] == ["--device", "cuda:1"]
        stdout.write(b"starting\nno room\n\n")
        stdout.flush()
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    with (
        pytest.raises(error, match=message),
        local_cluster.local_cluster(Path("somewhere"), {"--device": "cuda:1"}, tmp_path / "log", 0.01),
    ):
        pass
    assert process.signals == [2]


def test_workers_are_shown_before_they_have_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bytes are told after the last token; blocks that nobody gives back are a fault."""
    monkeypatch.setattr(local_cluster, "_POLL_S", 0.001)
    monkeypatch.setattr(local_cluster, "_IDLE_S", 0.5)
    states = [{"pool": {"in_use": n, "reserved": m}, "workers": [n]} for n, m in ((2, 1), (1, 0), (0, 1), (0, 0))]
    coming = iter(states)
    monkeypatch.setattr(local_cluster.LocalCluster, "state", lambda _: next(coming))
    cluster = local_cluster.LocalCluster("", "")
    assert cluster.idle_state() is states[-1]
    monkeypatch.setattr(local_cluster.LocalCluster, "state", lambda _: states[0])
    with pytest.raises(Internal, match="blocks are still held"):
        cluster.idle_state()


def test_gpu_tables_hide_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    row = TokensRow(
        kind="tokens", prompt_tokens=5, output_tokens=9, ties=2, first_difference=3, margin=0.000123, is_equal=False
    )
    same = dataclasses.replace(row, prompt_tokens=6, is_equal=True, first_difference=None, margin=None)
    Console(width=80).print(tables.gpu_tables([row, same], [], [])[0])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["prompt", "of", "5", "9", "2", "NO", "3", "0.00012"] for line in lines)
    assert any(line.split() == ["prompt", "of", "6", "9", "2", "yes"] for line in lines)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """In place of the process that tries a library: a shell script."""

    def instead(script: str) -> None:
        file = tmp_path / "child"
        file.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n")
        file.chmod(0o700)
        monkeypatch.setattr(gpu_pairs.sys, "executable", str(file))

    return instead


@pytest.mark.parametrize(
    ("script", "refusal"),
    [
        ("echo splitserve: nccl: Duplicate GPU detected >&2; echo a hint; exit 1", "nccl: Duplicate GPU detected"),
        ("echo terminate called; echo; kill -ABRT $$", "ended by SIGABRT: terminate called"),
        ("echo 1 blocks; exec sleep 60", "no answer within 0.5 s: 1 blocks"),
    ],
    ids=["refused", "crashed", "hanging"],
)
def test_library_that_fails_ends_the_benchmark(
    tmp_path: Path, child: Callable[[str], None], script: str, refusal: str
) -> None:
    """It is an answer, and nothing of it is left behind."""
    child(script)
    assert gpu_pairs.try_ranks("nccl", "1", 1, tmp_path, 0.5) == [PairRow(case="nccl", refusal=refusal)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_cluster_over_a_pair_ends_the_benchmark_or_its_difference_is_hidden(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [PairRow(case="1 block", path="nccl P2P/CUMEM", gb_s=1.0)]
    monkeypatch.setattr(gpu, "try_ranks", lambda library, *_: works if library == "nccl" else [])
    monkeypatch.setattr(gpu, "gpus", lambda: (torch.device("cuda:0"), torch.device("cuda:1")))
    asked: list[dict[str, object]] = []
    links = {"d0": {"detail": "nccl P2P/CUMEM"}}
    workers = [{"kv_bytes_sent": 7, "links": links}, {"kv_bytes_sent": 0, "links": {}}]

    def ask(description: object, plan: object, flags: dict[str, object], log: Path) -> Any:
        asked.append(flags)
        if len(asked) == 3:
            raise Unavailable("the cluster was not ready")
        return [[1, 2]], workers

    monkeypatch.setattr(gpu, "_ask_cluster", ask)
    cuda = torch.device("cuda:0")

    def tried(expected: list[list[int]]) -> PairRow:
        *first, last = gpu._try_pairs(locate_model(str(tiny)), gpu._QUICK, cuda, expected, tmp_path, lambda text: None)
        assert first == works
        return last

    assert tried([[1, 2]]) == PairRow(case="cluster", path="nccl P2P/CUMEM", bytes=7, is_equal=True)
    assert tried([[1, 3]]).is_equal is False
    assert tried([[1, 2]]) == PairRow(case="cluster", refusal="the cluster was not ready")
    assert asked[0] == {"--device": "auto", "--kv-transport": "nccl"}
    monkeypatch.setattr(gpu, "gpus", lambda: (cuda, cuda))
    tried([[1, 2]])
    assert asked[-1] == {"--device": cuda, "--kv-transport": "nccl"}


def test_refusal_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = [
        PairRow(case="1 block", path="raw nccl", bytes=1 << 20, gb_s=12.345),
        PairRow(case="cluster", path="nccl SHM", bytes=1 << 21, is_equal=False),
        PairRow(case="nccl", refusal="Duplicate GPU detected"),
    ]
    _, table, refusal, _ = tables.gpu_tables([], rows, [])
    Console(width=80).print(table)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "block", "raw", "nccl", "1.0", "12.35"] in lines
    assert ["cluster", "nccl", "SHM", "2.0", "NO"] in lines
    assert ["nccl", "refused"] in lines
    assert refusal == "nccl: Duplicate GPU detected"
