"""Streams that run while a test breaks something, and the ends they come to."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Semaphore
from types import TracebackType
from typing import Any, Self

from splitserve import Client
from splitserve.client.types import Generation
from splitserve.service.errors import SplitserveError
from tests.e2e.project import Project

# A stream that takes longer hangs.
PATIENCE_S = 180.0

End = Generation | SplitserveError


class Streams:
    """`num` greedy streams of `num_tokens` each, of prompts that differ. Leaving the block waits for their ends."""

    def __init__(self, project: Project, num: int = 4, num_tokens: int = 300) -> None:
        self._num, self._num_tokens = num, num_tokens
        self._client = Client(project.published(50051), timeout=PATIENCE_S)
        self._begun = Semaphore(0)
        self._pool = ThreadPoolExecutor(num)
        self._futures: list[Future[End]] = []

    def __enter__(self) -> Self:
        """Returns when each has begun to decode."""
        self._futures = [self._pool.submit(self._stream, number) for number in range(self._num)]
        for _ in range(self._num):
            assert self._begun.acquire(timeout=PATIENCE_S)
        return self

    def _stream(self, number: int) -> End:
        options: dict[str, Any] = {"max_tokens": self._num_tokens, "temperature": 0, "ignore_eos": True}
        seen = 0
        try:
            with self._client.stream(f"Once upon a time there were {number + 2} ships", **options) as stream:
                for _ in stream:
                    seen += 1
                    if seen == 3:
                        self._begun.release()
                return stream.result()
        except SplitserveError as error:
            if seen < 3:
                self._begun.release()
            return error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown()
        self._client.close()

    def ends(self) -> list[End]:
        return [future.result() for future in self._futures]

    def answers(self) -> list[Generation]:
        """Raises the first error that ended one."""
        ends = self.ends()
        for end in ends:
            if isinstance(end, SplitserveError):
                raise end
        return [end for end in ends if isinstance(end, Generation)]


class Load:
    """Clients that ask one thing after another for as long as the block lasts. Leaving it raises what failed."""

    def __init__(self, project: Project, ask: Callable[[Client], str], num: int = 3) -> None:
        self._target, self._ask, self._num = project.published(50051), ask, num
        self._over = Event()
        self._pool = ThreadPoolExecutor(num)
        self._asking: list[Future[None]] = []
        self.answers: list[str] = []

    def _go_on(self) -> None:
        with Client(self._target, timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                self.answers.append(self._ask(client))

    def __enter__(self) -> Self:
        self._asking = [self._pool.submit(self._go_on) for _ in range(self._num)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._pool.shutdown()
        for future in self._asking:
            if kind is None:
                future.result()
