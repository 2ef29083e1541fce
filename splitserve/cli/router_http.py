"""Asks the local cluster's router over HTTP. Without httpx, whose import is a third of what happens before `up` starts
its first child."""

from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

_TIMEOUT_S = 5.0


def answer_of(url: str) -> bytes | None:
    """The body of a 200 answer; None for any other, and for none at all. It blocks."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        return answer.read() if answer.status == HTTPStatus.OK else None
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
