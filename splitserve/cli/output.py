"""Where the output of the cluster's processes goes: our stderr, whole lines with the process's name before each."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self


class Output:
    """A `LineSink`. With `log_dir`, each process's lines also go to `<log_dir>/<name>.log`, without the prefix.

    It never raises, for a reader of pipes that stops would block the processes at their other ends: a file that cannot
    be written is given up, said once; when stderr is closed, `on_closed` is called, once.
    """

    def __init__(self, names: Sequence[str], log_dir: Path | None) -> None:
        self.on_closed: Callable[[], None] = lambda: None
        self._width = max(map(len, names))
        self._is_closed = False
        self._files: dict[str, BinaryIO] = {}
        self._known = set(names)
        self._log_dir = log_dir
        self._stack = ExitStack()
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            for name in names:
                self._open(name, log_dir)

    def __call__(self, name: str, line: bytes) -> None:
        self._to_stderr(name, line)
        if name not in self._known:
            self._add(name)
        if name in self._files:
            try:
                self._files[name].write(line + b"\n")
            except OSError as error:
                del self._files[name]
                self._to_stderr(name, f"no more lines to its log file: {error}".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _add(self, name: str) -> None:
        """A process that was not there at first."""
        self._known.add(name)
        if self._log_dir is not None:
            try:
                self._open(name, self._log_dir)
            except OSError as error:
                self._to_stderr(name, f"no log file: {error}".encode())

    def _open(self, name: str, log_dir: Path) -> None:
        self._files[name] = self._stack.enter_context((log_dir / f"{name}.log").open("ab", buffering=0))

    def _to_stderr(self, name: str, line: bytes) -> None:
        if self._is_closed:
            return
        try:
            sys.stderr.buffer.write(name.ljust(self._width).encode() + b" | " + line + b"\n")
            sys.stderr.buffer.flush()
        except OSError:
            self._is_closed = True
            self.on_closed()
