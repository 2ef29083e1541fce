"""Runs tokenizers on threads of their own, and bounds what waits for them.

`validation` owns one. It stands before the request queue: without a bound here, text would pile up that the queue's
own bounds never see. State of the event loop's thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from splitserve.service.errors import Overloaded

_T = TypeVar("_T")

QUEUE_FULL = "QUEUE_FULL"
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TokenizingLimits:
    """What may be tokenized or wait for it at one time."""

    max_requests: int = 256
    max_bytes: int = 64 * 1024 * 1024


class TokenizerThreads:
    """A text counts until it is tokenized, or until its caller leaves while it waits for a thread."""

    def __init__(self, limits: TokenizingLimits, *, num_threads: int = 2) -> None:
        self._limits = limits
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        # Waiting happens here and not in the executor, which would keep the texts of callers that have left.
        self._idle_threads = asyncio.Semaphore(num_threads)
        self._num_requests = 0
        self._num_bytes = 0

    async def run(self, encode: Callable[[], _T], num_bytes: int) -> _T:
        """What `encode` gives or raises; it works on `num_bytes` of text. Raises Overloaded, with the true numbers,
        when no more may wait."""
        self._check_room(num_bytes)
        self._num_requests += 1
        self._num_bytes += num_bytes
        try:
            await self._idle_threads.acquire()
        except BaseException:
            self._forget(num_bytes)
            raise
        work = asyncio.get_running_loop().run_in_executor(self._executor, encode)
        work.add_done_callback(lambda _: self._end(num_bytes))
        # A thread cannot be interrupted: it is busy, and its text in memory, also after the caller has left.
        return await asyncio.shield(work)

    def close(self) -> None:
        """Gives the threads back without waiting for text that is still being tokenized."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, num_bytes: int) -> None:
        limits = self._limits
        if self._num_requests >= limits.max_requests:
            raise Overloaded(
                f"the text of {self._num_requests} requests is being tokenized, the limit is {limits.max_requests}",
                reason=QUEUE_FULL,
                retry_after_s=_RETRY_AFTER_S,
            )
        # As in the request queue, one alone always fits: it could never be served otherwise.
        if self._num_requests and self._num_bytes + num_bytes > limits.max_bytes:
            raise Overloaded(
                f"{self._num_bytes} bytes of text are being tokenized: {num_bytes} more would pass {limits.max_bytes}",
                reason=QUEUE_FULL,
                retry_after_s=_RETRY_AFTER_S,
            )

    def _end(self, num_bytes: int) -> None:
        self._idle_threads.release()
        self._forget(num_bytes)

    def _forget(self, num_bytes: int) -> None:
        self._num_requests -= 1
        self._num_bytes -= num_bytes
