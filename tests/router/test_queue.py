"""The queue's order and its counts: who waits longer than is due, and what is counted that does not wait."""

import asyncio
import time
from typing import cast

import pytest

from router.attempt import Attempt
from router.queue import RequestQueue, Waiting
from router.scheduler import Demand
from splitserve.service.errors import Overloaded

ATTEMPT = cast(Attempt, object())  # the queue only passes it on


def waiting(arrival: int, *, is_retry: bool = False, priority: int = 0, num_tokens: int = 10) -> Waiting:
    return Waiting(Demand(num_tokens), is_retry, priority, arrival)


def order_of(queue: RequestQueue) -> list[int]:
    """The arrivals in the order in which the dispatcher sees them."""
    return [entry.arrival for entry in queue.in_order()]


async def test_later_arrival_passes_an_earlier_one() -> None:
    queue = RequestQueue(10, 1000)
    for arrival in (3, 1, 4, 2, 0):
        queue.add(waiting(arrival))
    assert order_of(queue) == [0, 1, 2, 3, 4]


async def test_low_priority_passes_a_high_one() -> None:
    queue = RequestQueue(10, 1000)
    for arrival, priority in enumerate([0, 5, -1, 5, 1]):
        queue.add(waiting(arrival, priority=priority))
    assert order_of(queue) == [1, 3, 4, 0, 2]


async def test_new_work_passes_an_interrupted_request() -> None:
    """A retry goes first whatever its priority; retries among themselves by priority, then arrival."""
    queue = RequestQueue(10, 1000)
    queue.add(waiting(0, priority=9))
    queue.add(waiting(5, is_retry=True))
    queue.add(waiting(4, is_retry=True))
    queue.add(waiting(6, is_retry=True, priority=1))
    queue.add(waiting(1))
    assert order_of(queue) == [6, 4, 5, 0, 1]


async def test_counts_drift() -> None:
    queue = RequestQueue(10, 1000)
    entries = [waiting(index, num_tokens=10 * (index + 1)) for index in range(3)]
    for entry in entries:
        queue.add(entry)
    assert (len(queue), queue.num_tokens) == (3, 60)
    queue.remove(entries[1])
    assert (len(queue), queue.num_tokens) == (2, 40)
    queue.remove(entries[1])
    queue.remove(waiting(0))
    assert (len(queue), queue.num_tokens) == (2, 40)
    # Walking goes on while entries leave.
    for entry in queue.in_order():
        queue.remove(entry)
    assert (len(queue), queue.num_tokens, queue.in_order()) == (0, 0, [])


async def test_two_equal_entries_are_taken_for_one() -> None:
    """Same demand, rank and arrival: removing one leaves the other."""
    queue = RequestQueue(10, 1000)
    first, second = waiting(1), waiting(1)
    queue.add(first)
    queue.add(second)
    queue.remove(second)
    assert queue.in_order() == [first]
    assert (len(queue), queue.num_tokens) == (1, 10)


async def test_full_queue_takes_one_more() -> None:
    queue = RequestQueue(2, 100)
    queue.add(waiting(0, num_tokens=60))
    queue.check_room(40)
    with pytest.raises(Overloaded, match="60 prompt tokens are waiting: 41 more would pass 100") as refusal:
        queue.check_room(41)
    assert refusal.value.retry_after_s is not None
    queue.add(waiting(1, num_tokens=1))
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2"):
        queue.check_room(1)


async def test_prompt_above_the_limit_never_gets_in() -> None:
    """Alone it may wait: otherwise no queue would ever take it."""
    RequestQueue(2, 100).check_room(500)


async def test_interrupted_request_is_refused_by_a_full_queue() -> None:
    queue = RequestQueue(1, 10)
    queue.add(waiting(1))
    queue.add(waiting(0, is_retry=True, num_tokens=50))
    assert (len(queue), queue.num_tokens) == (2, 60)
    assert order_of(queue) == [0, 1]


async def test_grant_after_the_client_left_fails() -> None:
    """The attempt must still be found on the entry, so that its workers are given back."""
    entry = waiting(0)
    task = asyncio.create_task(entry.granted_within(60))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    entry.grant(ATTEMPT)
    assert entry.attempt is ATTEMPT
    other = waiting(1)
    other.grant(ATTEMPT)
    assert await other.granted_within(0) is ATTEMPT


async def test_grant_in_the_last_moment_is_thrown_away() -> None:
    """It comes in the turn of the event loop in which the wait for it is over, and after that."""
    entry = waiting(0)
    task = asyncio.create_task(entry.granted_within(0.01))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.02, entry.grant, ATTEMPT)
    time.sleep(0.03)  # noqa: ASYNC251 - both are due now
    assert await task is ATTEMPT


async def test_wait_for_a_grant_has_no_end() -> None:
    assert await waiting(0).granted_within(0.01) is None
