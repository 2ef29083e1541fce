"""A directory in the cache is whole or absent, and made once."""

import threading
from pathlib import Path

import pytest

from splitserve.models import cache
from splitserve.models.cache import build_once, cache_root
from splitserve.service.errors import InvalidRequest, Unavailable


def test_threads_build_the_same_thing_twice(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(staging: Path) -> None:
        builds.append(staging)
        (staging / "file").write_text("whole")

    threads = [threading.Thread(target=build_once, args=(tmp_path / "target", build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(builds) == 1
    assert (tmp_path / "target" / "file").read_text() == "whole"


def test_a_failed_build_leaves_something_behind(tmp_path: Path) -> None:
    def build(staging: Path) -> None:
        (staging / "file").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        build_once(tmp_path / "target", build)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_leftovers_of_a_killed_build_stay_for_ever(tmp_path: Path) -> None:
    leftover = tmp_path / ".target.partial-abc"
    leftover.mkdir()
    (leftover / "file").write_text("half")
    build_once(tmp_path / "target", lambda staging: None)
    assert not leftover.exists()


def test_a_directory_is_readable_only_by_who_made_it(tmp_path: Path) -> None:
    def build(staging: Path) -> None:
        (staging / "weights").write_bytes(b"x")
        (staging / "weights").chmod(0o600)

    build_once(tmp_path / "target", build)
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "target" / "weights").stat().st_mode & 0o777 == 0o644


def test_a_stuck_builder_is_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(cache, "_LOCK_POLL_S", 0.01)
    started, may_end = threading.Event(), threading.Event()

    def build(staging: Path) -> None:
        started.set()
        assert may_end.wait(60)

    holder = threading.Thread(target=build_once, args=(tmp_path / "target", build))
    holder.start()
    assert started.wait(60)
    stages: list[str] = []
    with pytest.raises(Unavailable, match="another process"):
        build_once(tmp_path / "target", build, lambda stage, done, total: stages.append(stage))
    may_end.set()
    holder.join(timeout=60)
    assert stages == ["waiting for another process"]


def test_an_unusable_cache_folder_gives_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="SPLITSERVE_CACHE"):
        build_once(tmp_path / "file" / "target", lambda staging: None)


def test_the_cache_settings_are_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPLITSERVE_CACHE", raising=False)
    assert cache_root() == Path("/home/someone/.cache/splitserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/splitserve")
    monkeypatch.setenv("SPLITSERVE_CACHE", "/own")
    assert cache_root() == Path("/own")
    assert cache_root(tmp_path) == tmp_path
