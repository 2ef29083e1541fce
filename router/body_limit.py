"""Refuses HTTP bodies above a limit, before they are read and while they come. Installed by `http`."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """What says its size is refused unread; what does not is cut off when it has passed the limit. Both as 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            if declared.isdigit():
                self._check(int(declared))
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, limited, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            message = f"the body has {num_bytes} bytes or more; at most {self._max_bytes} are allowed"
            raise HTTPException(413, message, {"connection": "close"})
