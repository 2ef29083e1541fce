"""The directories of ipc sockets: those of killed workers go, those of living ones stay, whoever starts when."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtransfer import same_host
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.same_host import PREFIX, IpcDirectory, is_same_host
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings
from tests.kvtransfer.worlds import PATIENCE_S

OWNER = """
import sys
from pathlib import Path
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings
carrier = ZeroMQCarrier(ZeroMQSettings(ipc_parent=Path(sys.argv[1])))
carrier.start()
print(carrier.endpoint.ipc_path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    """Short enough for a socket's path."""
    made = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield made
    shutil.rmtree(made)


def made_in(parent: Path) -> IpcDirectory:
    made = IpcDirectory.create(parent)
    assert made is not None
    return made


def test_a_killed_worker_leaves_its_directory_for_ever(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        killed = Path(owner.stdout.readline().strip())
        assert killed.is_socket()
        made_in(parent).remove()
        assert killed.is_socket(), "removed from under a living worker"
        owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE_S)
    assert killed.is_socket()
    made = made_in(parent)
    assert list(parent.iterdir()) == [made.directory]
    made.remove()
    assert list(parent.iterdir()) == []


def test_a_worker_killed_while_it_made_its_directory_leaves_it_for_ever(parent: Path) -> None:
    tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    made_in(parent).remove()
    assert list(parent.iterdir()) == []


def test_a_second_worker_of_one_process_removes_the_first_ones(parent: Path) -> None:
    first = ZeroMQCarrier(ZeroMQSettings(ipc_parent=parent))
    first.start()
    second = ZeroMQCarrier(ZeroMQSettings(ipc_parent=parent))
    second.start()
    assert is_same_host(first.endpoint)
    assert is_same_host(second.endpoint)
    for carrier in (first, second):
        carrier.close()
    assert list(parent.iterdir()) == []


def a_link(stale: Path, elsewhere: Path) -> None:
    stale.symlink_to(elsewhere)


def another_name(stale: Path, elsewhere: Path) -> None:
    stale.with_name("splitserve-other").mkdir(mode=0o700)


def open_to_others(stale: Path, elsewhere: Path) -> None:
    stale.mkdir()
    stale.chmod(0o755)


def a_file(stale: Path, elsewhere: Path) -> None:
    stale.touch()


def with_more_in_it(stale: Path, elsewhere: Path) -> None:
    stale.mkdir(mode=0o700)
    (stale / "precious").touch()


@pytest.mark.parametrize("other", [a_link, another_name, open_to_others, a_file, with_more_in_it])
def test_what_no_worker_left_is_removed(parent: Path, tmp_path: Path, other: Callable[[Path, Path], None]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "nonce").touch()
    other(parent / f"{PREFIX}stale", elsewhere)
    before = sorted(parent.rglob("*"))
    made_in(parent).remove()
    assert sorted(parent.rglob("*")) == before
    assert (elsewhere / "nonce").exists()


def test_a_directory_of_another_user_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    uid = stale.stat().st_uid
    with monkeypatch.context() as patch:
        patch.setattr(same_host.os, "geteuid", lambda: uid + 1)
        IpcDirectory.create(parent)
    assert stale.is_dir()


@pytest.mark.parametrize("moment", ["sweeping", "swept"])
def test_a_directory_is_swept_while_it_is_made(parent: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A sweeper comes between the making and the lock: it has locked it already, or has even removed it."""
    make, taken = tempfile.mkdtemp, []

    def make_and_lose(prefix: str, dir: Path) -> str:  # mkdtemp's own name
        made = make(prefix=prefix, dir=dir)
        if not taken:
            taken.append(made)
            descriptor = same_host._lock(Path(made))
            assert descriptor is not None
            if moment == "swept":
                assert same_host._remove_locked(Path(made), descriptor)
        return made

    monkeypatch.setattr(same_host.tempfile, "mkdtemp", make_and_lose)
    made = made_in(parent)
    assert made.nonce_path.exists()
    assert str(made.directory) not in taken
    assert same_host._lock(made.directory) is None, "a sweeper could take it"


def test_a_removed_directory_can_be_locked(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sweeper was faster, and a new directory has the name by now: that one is not ours to remove."""
    name = parent / f"{PREFIX}reused"
    name.mkdir(mode=0o700)
    flock = fcntl.flock

    def lose(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        name.rmdir()
        (parent / "placeholder").mkdir()  # so that the new directory cannot have the old one's inode
        name.mkdir(mode=0o700)

    monkeypatch.setattr(same_host.fcntl, "flock", lose)
    assert same_host._lock(name) is None


def test_sockets_are_offered_where_locks_do_not_work(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell later whether such a directory still has an owner: TCP alone."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(same_host.fcntl, "flock", refuse)
    carrier = ZeroMQCarrier(ZeroMQSettings(ipc_parent=parent))
    carrier.start()
    assert carrier.endpoint == KVEndpoint(tcp=carrier.endpoint.tcp)
    carrier.close()
    assert list(parent.iterdir()) == []


def test_starts_at_the_same_time_take_each_others_directories(parent: Path) -> None:
    problems: list[str] = []

    def start_and_stop() -> None:
        for _ in range(50):
            made = IpcDirectory.create(parent)
            if made is None or not made.nonce_path.exists():
                problems.append(f"lost: {made}")
                return
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(made.socket_path))
            killed = IpcDirectory.create(parent)
            if killed is not None:
                os.close(killed.descriptor)  # as the kernel does
            if not made.nonce_path.exists():
                problems.append(f"taken: {made}")
            made.remove()

    threads = [threading.Thread(target=start_and_stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert problems == []
    made_in(parent).remove()
    assert list(parent.iterdir()) == []
