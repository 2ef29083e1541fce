"""A client of any server with OpenAI's API that notes when each piece of an answer came. One event loop.

What the server says besides is not looked at: these benchmarks compare servers by what a reader of the stream sees.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from splitserve.service.errors import Unavailable

Api = Literal["completions", "chat"]

_CONNECT_S = 10.0
_DATA = b"data:"


@dataclass
class Answer:
    """One answer as it came; times are those of `time.perf_counter`.

    `arrivals` has one time for each piece with text; `is_complete` once the server has said that it was all.
    `num_tokens` and `num_prompt_tokens` are the server's own counts, None where it tells none.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    is_complete: bool = False

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def counted_tokens(self) -> int:
        return len(self.arrivals) if self.num_tokens is None else self.num_tokens


class OpenAIClient:
    """Made by `connect`. `extra` goes into the body of every request."""

    def __init__(self, http: httpx.AsyncClient, model: str, api: Api, extra: Mapping[str, Any]) -> None:
        self._http = http
        self.model = model
        self._api = api
        self._extra = extra

    async def complete(
        self,
        prompt: str,
        max_tokens: int,
        on_piece: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """One whole answer; `on_piece` is told of every piece. Raises Unavailable when there is none."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._api == "completions":
            path = "/v1/completions"
            body["prompt"] = prompt
        else:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": prompt}]
        answer = Answer(time.perf_counter())
        try:
            async with self._http.stream("POST", path, json=body | dict(self._extra)) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise Unavailable(f"{response.url} answered {response.status_code}: {text[:300]}")
                await _read(response, answer, on_piece)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._http.base_url}{path}: {type(error).__name__} {error}") from error
        if not answer.is_complete:
            raise Unavailable(f"{self._http.base_url}{path}: the stream ended before the answer did")
        if not answer.arrivals:
            raise Unavailable(f"{self._http.base_url}{path} answered without any text")
        return answer


@asynccontextmanager
async def connect(
    url: str,
    *,
    model: str | None = None,
    api: Api = "completions",
    extra: Mapping[str, Any] | None = None,
    silence_s: float = 120.0,
) -> AsyncIterator[OpenAIClient]:
    """A client of the server at `url`; without `model` it asks for the first one that `/v1/models` names.

    A server that is silent for `silence_s` has failed. Raises Unavailable where nobody answers.
    """
    timeout = httpx.Timeout(silence_s, connect=_CONNECT_S)
    # A connection for each request: some servers close an idle one at the very moment that it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"accept-encoding": "identity"}
    base = url.rstrip("/").removesuffix("/v1")
    # No proxy of the environment: what is measured is the server.
    async with httpx.AsyncClient(
        base_url=base, timeout=timeout, limits=limits, headers=headers, trust_env=False
    ) as http:
        yield OpenAIClient(http, model or await _first_model(http), api, extra or {})


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        listed = (await http.get("/v1/models")).raise_for_status().json()
        return str(listed["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{http.base_url}/v1/models names no model ({error}); --model does") from error


async def _read(response: httpx.Response, answer: Answer, on_piece: Callable[[Answer], None] | None) -> None:
    """Until the stream ends. A piece has arrived when its bytes have, before anybody looks into them."""
    held = b""
    async for data in response.aiter_raw():
        now = time.perf_counter()
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            if (text := line[len(_DATA) :].strip()) == b"[DONE]":
                answer.is_complete = True
            elif _take(text, answer):
                answer.arrivals.append(now)
                if on_piece is not None:
                    on_piece(answer)


def _take(text: bytes, answer: Answer) -> bool:
    """Notes what the event says of usage; True if it has any of the answer's text."""
    try:
        event = json.loads(text)
    except ValueError as error:
        raise Unavailable(f"an event is no JSON: {text[:200]!r}") from error
    if not isinstance(event, dict):
        raise Unavailable(f"an event is no object: {text[:200]!r}")
    if error_body := event.get("error"):
        raise Unavailable(f"the stream broke: {error_body}")
    if usage := event.get("usage"):
        answer.num_tokens = usage.get("completion_tokens")
        answer.num_prompt_tokens = usage.get("prompt_tokens")
    choices = event.get("choices") or ()
    answer.is_complete |= any(choice.get("finish_reason") for choice in choices)
    return any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)
