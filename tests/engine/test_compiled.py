"""Compiled kernels in their cache folder: made once, shared by processes, and never a reason not to start."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from splitserve.engine.kernels import attention, compiled

ONCE = "compiling kernels (once)"


def _attend_nothing(
    items: Any,
    first: Any,
    last: Any,
    tables: Any,
    pool: Any,
    sizes: Any,
    layer: Any,
    factor: Any,
    softcap: Any,
    window: Any,
    queries: Any,
    token_stride: Any,
    head_stride: Any,
    results: Any,
    scratch: Any,
) -> None:
    """Stands for the attention kernel, which takes ten times as long to compile as the other one."""


@pytest.fixture(autouse=True)
def _small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", _attend_nothing)


def _start(folder: Path | None, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32") -> list[str]:
    """What a fresh process would say while it loads the kernels; they work."""
    monkeypatch.setattr(compiled, "_compiled", {})
    said: list[str] = []
    kernels = compiled.load_kernels(dtype, folder, said.append)
    pool = np.zeros(2 * 2 * 3, np.float32 if dtype == "float32" else np.uint16)
    rows = np.arange(1, 4).astype(pool.dtype)
    slot, given = np.array([1]), (rows.ctypes.data, 3, 3)
    kernels.store_tokens(pool, np.array([1, 1, 1, 2, 3, 16]), 0, slot - 1, slot, *given, *given)
    assert pool.tolist() == [0, 1, 0, 2, 0, 3, 0, 0, 0, 1, 2, 3]
    return said


def test_second_start_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _start(tmp_path / "kernels", monkeypatch) == [ONCE]
    assert _start(tmp_path / "kernels", monkeypatch) == []
    assert _start(tmp_path / "kernels", monkeypatch, "bfloat16") == [ONCE]
    assert _start(tmp_path / "kernels", monkeypatch) == []


def test_start_waits_for_others_though_nothing_is_to_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(tmp_path, monkeypatch)
    (folder,) = tmp_path.iterdir()
    with ThreadPoolExecutor() as threads, FileLock(folder / ".lock"):
        assert threads.submit(_start, tmp_path, monkeypatch).result(timeout=60) == []


def test_missing_folder_prevents_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (said,) = _start(tmp_path / "file" / "kernels", monkeypatch)
    assert "cannot be kept" in said
    assert "Not a directory" in said
    (said,) = _start(None, monkeypatch)
    assert "no folder" in said


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_file_prevents_the_start(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _start(tmp_path, monkeypatch)
    damaged = list(tmp_path.rglob(f"*.{suffix}"))
    for path in damaged:
        path.write_bytes(path.read_bytes()[:40])
    assert damaged
    unreadable, once = _start(tmp_path, monkeypatch)
    assert "cannot be read" in unreadable
    assert once == ONCE
    assert _start(tmp_path, monkeypatch) == []


def test_two_starts_at_once_damage_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba numbers the files of one function without a lock: two dtypes would take the same number."""
    script = """if True:
        import sys
        from pathlib import Path
        from splitserve.engine.kernels import attention, compiled
        from tests.engine import test_compiled
        attention.attend = test_compiled._attend_nothing
        sys.stdin.readline()
        compiled.load_kernels(sys.argv[1], Path(sys.argv[2]), print)
    """
    dtypes = ["float32", "bfloat16", "float32", "bfloat16"]
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script, dtype, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for dtype in dtypes
    ]
    said = []
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    for start in starts:
        output, _ = start.communicate(timeout=120)
        assert start.returncode == 0
        said.append(output)
    assert sorted(said) == ["", "", f"{ONCE}\n", f"{ONCE}\n"]
    for dtype in ("float32", "bfloat16"):
        assert _start(tmp_path, monkeypatch, dtype) == []


def test_changed_inner_function_runs_as_before(tmp_path: Path) -> None:
    """numba looks only at the file of the outermost function."""
    sources = shutil.copytree(Path(compiled.__file__).parent, tmp_path / "kernels")
    assert compiled._fingerprint(sources) == compiled._fingerprint()
    (sources / "blocks.py").write_text((sources / "blocks.py").read_text() + "\n")
    assert compiled._fingerprint(sources) != compiled._fingerprint()
