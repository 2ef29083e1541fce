"""The kernels as machine code: compiled once per processor and version, then read from a cache folder.

Called by `cpu_attention` before the first forward, so that nothing compiles during a request. The folder is shared by
all processes of a user; a lock lets one compile while the others wait for what it makes, and what is all there is read
without it. What is compiled stays for the life of the process, which is the only state here.
"""

import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import numba
import numpy as np
from filelock import FileLock
from llvmlite import binding
from numba import njit
from numba.core.event import Listener, install_listener

from splitserve.engine.kernels import attention, layers, paging

Progress = Callable[[str], None]

# How a pool's elements reach numba, which knows no bfloat16.
_ELEMENTS = {"bfloat16": np.uint16, "float32": np.float32}


@dataclass(frozen=True)
class Kernels:
    """Functions of these names, from `attention`, `paging` or else `layers`, for one dtype of model and pool.

    `elements` is some array of that dtype: kernels that are given addresses alone learn from it what lies there.
    """

    elements: np.ndarray
    attend: Callable[..., None]
    store_tokens: Callable[..., None]
    normalize_rows: Callable[..., None]
    add_and_normalize_rows: Callable[..., None]
    normalize_heads: Callable[..., None]
    rotate_heads: Callable[..., None]
    gate_rows: Callable[..., None]


_MODULES = {"attend": attention, "store_tokens": paging}


_compiled: dict[str, Kernels] = {}


def load_kernels(dtype: str, folder: Path | None, progress: Progress) -> Kernels:
    """The kernels for `dtype`, from `folder` if some process has compiled them before.

    Without a folder, or when it cannot be written to, they are compiled for this process alone.
    """
    if dtype not in _compiled:
        _compiled[dtype] = _load(dtype, folder, progress)
    return _compiled[dtype]


def _load(dtype: str, folder: Path | None, progress: Progress) -> Kernels:
    if folder is None:
        progress("compiling kernels (no folder to keep them in)")
        return _compile(dtype, is_cached=False)
    try:
        return _load_cached(dtype, folder / _fingerprint(), progress)
    except OSError as error:
        progress(f"compiling kernels, which cannot be kept: {error}")
        return _compile(dtype, is_cached=False)


def _load_cached(dtype: str, folder: Path, progress: Progress) -> Kernels:
    folder.mkdir(parents=True, exist_ok=True)
    # Workers start side by side: none shall wait for the others to read. What one cannot read, it makes under the lock.
    with suppress(Exception), _numba_cache(folder), install_listener("numba:compile", _Refusal()):
        return _compile(dtype, is_cached=True)
    with FileLock(folder / ".lock"), _numba_cache(folder), install_listener("numba:compile", _Announcement(progress)):
        try:
            return _compile(dtype, is_cached=True)
        except (
            Exception
        ) as error:  # a damaged file raises anything; if it was no such file, the second try raises again
            if isinstance(error, OSError):
                raise
            progress(f"compiled kernels cannot be read ({error})")
            for path in folder.glob("*/"):
                shutil.rmtree(path)
            return _compile(dtype, is_cached=True)


class _Refusal(Listener):
    """Lets nothing be compiled, only read."""

    def on_start(self, event: Any) -> None:
        raise LookupError("not compiled yet")

    def on_end(self, event: Any) -> None:
        """Never comes to this."""


class _Announcement(Listener):
    """Says that kernels are compiled when numba really starts to."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._is_made = False

    def on_start(self, event: Any) -> None:
        if not self._is_made:
            self._progress("compiling kernels (once)")
        self._is_made = True

    def on_end(self, event: Any) -> None:
        """Nobody waits for the end: the next line of progress shows it."""


def _compile(dtype: str, *, is_cached: bool) -> Kernels:
    """Compiles for the types of example arguments; what is in them does not matter."""
    elements, integers = np.zeros(1, _ELEMENTS[dtype]), np.zeros(1, np.int64)
    arrays = {"sizes": integers, "blocks": integers, "offsets": integers, "tables": np.zeros(1, np.int32)}
    arrays |= {"items": np.zeros((1, 1), np.int64), "scratch": np.zeros(1, np.float32)}
    numbers = {"factor": np.float32(1), "softcap": np.float32(1), "epsilon": 1.0}
    examples = {"pool": elements, "elements": elements, **arrays, **numbers}
    names = [field.name for field in fields(Kernels) if field.name != "elements"]
    functions = {name: getattr(_MODULES.get(name, layers), name) for name in names}
    return Kernels(elements, **{name: _compile_one(each, examples, is_cached) for name, each in functions.items()})


def _compile_one(function: Callable[..., None], examples: Mapping[str, Any], is_cached: bool) -> Callable[..., None]:
    """`examples` by the parameters' names; the others are whole numbers: counts, places, addresses."""
    dispatcher = njit(function, nogil=True, error_model="numpy")
    if is_cached:
        dispatcher.enable_caching()
    dispatcher.compile(tuple(numba.typeof(examples.get(name, 0)) for name in signature(function).parameters))
    dispatcher.disable_compile()
    compiled: Callable[..., None] = dispatcher
    return compiled


@contextmanager
def _numba_cache(folder: Path) -> Iterator[None]:
    """numba has one cache folder per process; others' functions keep theirs."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _fingerprint(sources: Path = Path(__file__).parent) -> str:
    """Names all that machine code depends on; numba by itself would overlook a change in an inner function."""
    parts = [numba.__version__, platform.python_version(), binding.get_host_cpu_name()]
    parts.append(binding.get_host_cpu_features().flatten())
    digest = sha256("\0".join(parts).encode())
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
