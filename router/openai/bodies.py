"""HTTP bodies into request types: what is long is read on a thread, and only so much of it is in memory at once.

`routes` owns one reader. It is ours and not FastAPI's, which reads on the event loop and keeps a body, whatever its
size, for as long as its answer takes.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from router.long_work import LongWork
from splitserve.service.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, SplitserveError
from splitserve.service.limits import MAX_MESSAGE_BYTES

MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
# Of all bodies that are being received or read; a few of the largest ones.
MAX_BYTES_AT_ONCE = 4 * MAX_MESSAGE_BYTES
# As long as for a client that takes nothing of its answer.
_SILENCE_S = 40.0
# Of a whole body: so long, and a second more for each of so many bytes that have come. Without it a few clients that
# send a byte now and then would keep the room of all.
_RECEIVING_S = 60.0
_LEAST_BYTES_PER_S = 1024 * 1024
# So much is read in about a millisecond, and always has room: what most clients send is not kept out by a few giants.
_MAX_SMALL_BYTES = 64 * 1024

# Far more than any text or list of ids has that a context holds.
MAX_SIGNS = 4_000_000
_COUNTED_AT_ONCE = 1024 * 1024

_Kind = TypeVar("_Kind", bound=BaseModel)
_T = TypeVar("_T")


class Bodies:
    def __init__(self, long_work: LongWork) -> None:
        self._long_work = long_work
        self._num_bytes = 0

    async def read(self, request: Request, kind: type[_Kind], convert: Callable[[_Kind], _T]) -> _T:
        """What `convert` makes of the body, which may be called on another thread.

        Raises what it raises, InvalidRequest for a body that is no `kind`, and Overloaded where there is no room now.
        """
        if not _is_json(request.headers.get("content-type", "")):
            raise _malformed("the body must be a JSON object, sent with content-type: application/json")
        body = bytearray()
        num_counted = 0
        try:
            async for piece in _pieces(request):
                body += piece
                if len(body) > _MAX_SMALL_BYTES:
                    self._take(len(body) - num_counted)
                    num_counted = len(body)
            made = await self._made(body, kind, convert)
        finally:
            self._num_bytes -= num_counted
        if isinstance(made, SplitserveError):
            raise made
        return made

    def _take(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > MAX_BYTES_AT_ONCE:
            raise Overloaded(
                f"bodies of {self._num_bytes} bytes are being read; at most {MAX_BYTES_AT_ONCE} are at once",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )
        self._num_bytes += num_bytes

    async def _made(self, body: bytearray, kind: type[_Kind], convert: Callable[[_Kind], _T]) -> _T | SplitserveError:
        if len(body) <= _MAX_SMALL_BYTES:
            return _made(body, kind, convert, json.loads)
        return await self._long_work.run(partial(_made, body, kind, convert, _load_with_pauses))


def _made(
    body: bytearray, kind: type[_Kind], convert: Callable[[_Kind], _T], load: Callable[[bytearray], Any]
) -> _T | SplitserveError:
    """What is refused comes without its traceback, which would keep all that was read until it is answered."""
    try:
        return convert(_validated(kind, _parsed(body, load)))
    except SplitserveError as error:
        error.__traceback__ = error.__context__ = None
        return error


def _parsed(body: bytearray, load: Callable[[bytearray], Any]) -> Mapping[str, Any]:
    if not body:
        raise _malformed("the request has no JSON body")
    try:
        value = load(body)
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is no valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # no Unicode; a number without end; brackets without end
        raise _malformed(f"the body cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise _malformed("the body must be a JSON object")
    return value


def _load_with_pauses(body: bytearray) -> Any:
    """`json` holds up all threads until it is done, except where it calls back for each number and object; how many
    other values there can be, the signs between them tell."""
    starts = range(0, len(body), _COUNTED_AT_ONCE)
    num_signs = sum(body.count(sign, start, start + _COUNTED_AT_ONCE) for start in starts for sign in (b",", b'"'))
    if num_signs > MAX_SIGNS:
        raise _malformed(f"the body has {num_signs} commas and quotation marks; at most {MAX_SIGNS} are read")
    return json.loads(body, parse_int=_whole_number, object_pairs_hook=_object)


def _whole_number(digits: str) -> int:
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)


def _validated(kind: type[_Kind], value: Mapping[str, Any]) -> _Kind:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _shape_error(error.errors(include_url=False, include_input=False)[0]) from None


def _shape_error(problem: Mapping[str, Any]) -> InvalidRequest:
    """In our words where pydantic's say little."""
    name = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "extra_forbidden":
            return InvalidRequest(f"there is no option {name!r} here", field=name)
        case "invalid_unicode":
            return InvalidRequest(f"{name} {problem['msg']}", field=name, reason="INVALID_UNICODE")
        case "missing":
            return InvalidRequest(f"{name} is required", field=name)
        case "value_error":
            return InvalidRequest(f"{name} {problem['ctx']['error']}", field=name)
        case _:
            return InvalidRequest(f"{name}: {problem['msg']}", field=name)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """As they come, if they come, and soon enough."""
    clock = asyncio.get_running_loop().time
    begun_at, num_bytes = clock(), 0
    pieces = aiter(request.stream())
    while True:
        silent_at = clock() + _SILENCE_S
        late_at = begun_at + _RECEIVING_S + num_bytes / _LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(min(silent_at, late_at)):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if silent_at <= late_at:
                raise DeadlineExceeded(f"nothing has come of the request's body for {_SILENCE_S:g} s") from None
            raise DeadlineExceeded(
                f"{num_bytes} bytes of the request's body have come in {late_at - begun_at:.3g} s, which is too slow"
            ) from None
        except ClientDisconnect:
            raise Cancelled("the client left before its request had come") from None
        num_bytes += len(piece)
        yield piece


def _is_json(content_type: str) -> bool:
    name = content_type.partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


def _malformed(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason=MALFORMED_MESSAGE)
