"""Workers of one host that share out its GPUs: a GPU that two of them compute on, or that nobody gets any more."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from splitserve.engine.gpus import Gpu
from splitserve.service.errors import InvalidRequest, Unavailable
from splitserve.worker import commands, engine_setup
from splitserve.worker.config import WorkerConfig
from splitserve.worker.gpu_claim import GpuClaim, claim_gpu
from tests.workers.gpu_claimer import fake_gpus

Claimer = subprocess.Popen[str]


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[Callable[..., GpuClaim | None]]:
    """As `claim_gpu`, of two GPUs; gives them back at the end."""
    made: list[GpuClaim] = []

    def claim(device: str, worker_id: str = "w", *, gpus: list[Gpu] | None = None, **settings: int) -> GpuClaim | None:
        claimed = claim_gpu(device, fake_gpus(2) if gpus is None else gpus, tmp_path / "locks", worker_id, **settings)
        made.extend(filter(None, [claimed]))
        return claimed

    yield claim
    for claimed in made:
        os.close(claimed.descriptor)


def start(folder: Path, name: str, count: int) -> Claimer:
    command = [sys.executable, "-m", "tests.workers.gpu_claimer", str(folder), name, str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(claimer: Claimer) -> str:
    assert claimer.stdout is not None
    return claimer.stdout.readline().strip()


def go(claimer: Claimer) -> None:
    assert claimer.stdin is not None
    claimer.stdin.write("go\n")
    claimer.stdin.flush()


def test_two_workers_get_one_gpu_or_it_is_lost_with_its_holder(tmp_path: Path) -> None:
    """Four at the same instant, for three GPUs; then one is killed, and the next worker has its GPU at once."""
    claimers = [start(tmp_path, f"w{index}", 3) for index in range(5)]
    try:
        assert [said(claimer) for claimer in claimers] == ["here"] * 5
        *first, late = claimers
        for claimer in first:
            go(claimer)
        told = {claimer: said(claimer) for claimer in first}
        holders = {answer: claimer for claimer, answer in told.items() if answer.startswith("cuda")}
        assert sorted(holders) == ["cuda:0", "cuda:1", "cuda:2"]
        [refusal] = set(told.values()) - set(holders)
        assert "none of the 3 GPUs here is left" in refusal
        assert str(tmp_path) in refusal
        for device, claimer in holders.items():
            name = f"w{claimers.index(claimer)}"
            assert f"{device} (GPU-0000000{device[-1]}) by {name} (pid {claimer.pid} on " in refusal

        holders["cuda:1"].kill()
        holders["cuda:1"].wait()
        go(late)
        assert said(late) == "cuda:1"
    finally:
        for claimer in claimers:
            claimer.kill()
            claimer.communicate()


@pytest.mark.parametrize(("device", "num_gpus"), [("auto", 0), ("cpu", 2), ("cuda", 0), ("cuda:2", 2)])
def test_claim_of_what_is_not_there(claim: Callable[..., GpuClaim | None], device: str, num_gpus: int) -> None:
    """The processor needs no claim; why there is no such GPU is said by who looks for it."""
    assert claim(device, gpus=fake_gpus(num_gpus)) is None


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpu_that_was_named_goes_to_another(claim: Callable[..., GpuClaim | None], device: str) -> None:
    named = claim("cuda:0", "first")
    assert named is not None
    assert named.device == "cuda:0"
    other = claim(device, "second")
    assert other is not None
    assert (other.device, other.gpu.uuid) == ("cuda:1", "GPU-00000001")
    with pytest.raises(Unavailable, match=rf"cuda:0 is taken: .*GPU-00000000\) by first \(pid {os.getpid()} on "):
        claim("cuda:0")
    with pytest.raises(Unavailable, match="none of the 2 GPUs here is left"):
        claim(device)


def test_gpus_are_known_by_index(claim: Callable[..., GpuClaim | None]) -> None:
    """Two processes that number them otherwise mean the same GPUs."""
    assert claim("cuda:0") is not None
    turned = [Gpu(0, "GPU-00000001", "Fake"), Gpu(1, "GPU-00000000", "Fake")]
    other = claim("auto", gpus=turned)
    assert other is not None
    assert (other.device, other.gpu.uuid) == ("cuda:0", "GPU-00000001")


def test_sharing_leaves_a_gpu_idle_or_knows_no_limit(claim: Callable[..., GpuClaim | None]) -> None:
    """Each has one before any has two."""
    claims = [claim("auto", f"w{index}", workers_per_gpu=2) for index in range(4)]
    assert [claimed and claimed.device for claimed in claims] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert ["others compute on it" in str(claimed) for claimed in claims] == [False, False, True, True]
    with pytest.raises(Unavailable, match=r"by 2 workers each .*by w0 .*by w2 .*by w1 .*by w3 "):
        claim("auto", workers_per_gpu=2)
    fifth = claim("cuda:1", workers_per_gpu=0)
    assert fifth is not None
    assert (fifth.device, fifth.slot) == ("cuda:1", 2)


def test_lock_file_names_an_old_holder_or_cannot_be_opened_again(tmp_path: Path) -> None:
    for worker_id in ("a-worker-of-a-long-name", "w"):
        claimed = claim_gpu("auto", fake_gpus(1), tmp_path, worker_id)
        assert claimed is not None
        holder = json.loads(claimed.lock.read_text())
        assert (holder["worker_id"], holder["pid"]) == (worker_id, os.getpid())
        assert claimed.lock.stat().st_mode & 0o777 == 0o644
        os.close(claimed.descriptor)


def test_child_of_a_dead_worker_keeps_its_gpu(tmp_path: Path) -> None:
    claimed = claim_gpu("auto", fake_gpus(1), tmp_path, "w")
    assert claimed is not None
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        os.close(claimed.descriptor)
        again = claim_gpu("auto", fake_gpus(1), tmp_path, "w")
        assert again is not None
        os.close(again.descriptor)
    finally:
        child.communicate()


def test_gpu_is_lost_to_the_user_who_made_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody holds is claimed, and one that is held is passed over for the next."""
    held = claim_gpu("cuda:0", fake_gpus(1), tmp_path, "other")
    left = claim_gpu("cuda:1", fake_gpus(2), tmp_path, "gone")
    assert held is not None
    assert left is not None
    os.close(left.descriptor)
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_ACCMODE == os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    claimed = claim_gpu("auto", fake_gpus(2), tmp_path, "w")
    assert claimed is not None
    assert claimed.device == "cuda:1"
    with pytest.raises(InvalidRequest, match=r"Permission denied: '.*GPU-00000002\.lock'; --device-locks"):
        claim_gpu("cuda:2", fake_gpus(3), tmp_path, "w")
    os.close(claimed.descriptor)
    os.close(held.descriptor)


def test_role_that_has_no_gpu_is_not_named(claim: Callable[..., GpuClaim | None]) -> None:
    for worker_id in ("decode-1", "decode-2"):
        assert claim("auto", worker_id) is not None
    with pytest.raises(Unavailable, match=r"Those are no prefill workers and 2 decode workers\. Run fewer"):
        claim("auto", "prefill-1")


def test_folder_without_locks_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"cannot lock a GPU in .*file.*--device-locks"):
        claim_gpu("auto", fake_gpus(1), tmp_path / "file", "w")


def test_worker_without_a_gpu_computes_on_the_processor(tmp_path: Path) -> None:
    """It says why before it has fetched a model; one that was told to use the processor asks for no GPU."""
    held = claim_gpu("auto", fake_gpus(1), tmp_path, "other")
    assert held is not None

    def build(device: str) -> None:
        config = WorkerConfig(model="/no/such/model", device=device, device_locks=str(tmp_path))
        configure = commands.Configure(worker_id="w", config=config)
        engine_setup.build_context(configure, lambda report: None, lambda event: None, lambda: fake_gpus(1))

    try:
        for device in ("auto", "cuda"):
            with pytest.raises(Unavailable, match="by other "):
                build(device)
        with pytest.raises(Exception, match="/no/such/model"):
            build("cpu")
    finally:
        os.close(held.descriptor)
