"""A simulated client: the `ServicerContext` of one Generate call, what it is sent, and what it should be sent."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc.aio

from router.metrics import Outcome
from splitserve.engine.sampling_params import SamplingParams
from splitserve.service.errors import DeadlineExceeded, SplitserveError, Unavailable
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from splitserve.worker import messages
from tests.simulation.hash_model import Reference

_STATUS_FIELDS = ("code", "details", "trailing_metadata")


@dataclass(frozen=True)
class Options:
    """How a client samples; `values` are fields of `SamplingParams`, in the contract and in the engine alike."""

    values: dict[str, Any]
    prompt_logprobs: int | None = None


OPTIONS = [
    Options({"temperature": 0.0}),
    Options({"temperature": 1.0, "seed": 5, "top_k": 8}),
    Options({"temperature": 0.7, "seed": 6, "presence_penalty": 1.0, "repetition_penalty": 1.3}),
    Options({"temperature": 0.0, "logprobs": 2}, prompt_logprobs=1),
]


class Client:
    def __init__(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        options: Options,
        num_samples: int,
        deadline_s: float | None,
        number: int,
        now: Callable[[], float],
        num_lost: Callable[[], int],
    ) -> None:
        """`number` tells clients apart; `num_lost` counts the workers that the router has lost, at that moment."""
        self.traceparent = f"00-{number + 1:032x}-{1:016x}-01"
        engine_values = {"seed": 0} | options.values
        params = SamplingParams(max_tokens=max_tokens, **engine_values)
        self.reference = Reference(prompt_ids, params, num_samples)
        self.request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt_ids),
            sampling_params=pb.SamplingParams(
                n=num_samples, max_tokens=max_tokens, prompt_logprobs=options.prompt_logprobs, **engine_values
            ),
        )
        self.deadline_s = deadline_s
        self.has_left = False
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.tokens: list[list[int]] = [[] for _ in range(num_samples)]
        self.completes: dict[int, pb.GenerateComplete] = {}
        self.error: SplitserveError | None = None
        self.was_refused = False
        self.num_lost = 0
        self._num_lost = num_lost
        self._options = options
        self._now = now
        self._began = now()
        self._num_scored = 0
        self._call: asyncio.Task[None]

    def call(self, generate: Callable[[pb.GenerateRequest, Any], Awaitable[None]], loop: Any) -> None:
        self._call = loop.create_task(generate(self.request, self))

    @property
    def is_over(self) -> bool:
        return self._call.done()

    def leave(self) -> None:
        if not self._call.done():
            self.has_left = True
            self._call.cancel()

    # The context of the call

    def time_remaining(self) -> float | None:
        return None if self.deadline_s is None else self._began + self.deadline_s - self._now()

    def invocation_metadata(self) -> tuple[tuple[str, str]]:
        return (("traceparent", self.traceparent),)

    def cancelled(self) -> bool:
        return self.has_left

    async def write(self, response: pb.GenerateResponse) -> None:
        await self.may_read.wait()
        if response.HasField("complete"):
            assert response.index not in self.completes, "a sample was completed twice"
            self.completes[response.index] = response.complete
        elif response.chunk.prompt_logprobs:
            self._take_prompt_logprobs(list(response.chunk.prompt_logprobs))
        else:
            chunk, sample = response.chunk, response.index
            assert len(chunk.token_ids) > 0, "a chunk of nothing"
            has_logprobs = self.reference.texts[sample][0].logprobs is not None
            assert len(chunk.logprobs) == (len(chunk.token_ids) if has_logprobs else 0)
            for number, token_id in enumerate(chunk.token_ids):
                self._take_token(sample, token_id, chunk.logprobs[number] if has_logprobs else None)

    async def abort_with_status(self, status: Any) -> NoReturn:
        trailer: Any = SimpleNamespace(**{key: partial(getattr, status, key) for key in _STATUS_FIELDS})
        self.error = from_rpc_error(trailer)
        self.num_lost = self._num_lost()
        # Nobody has ever been given it: who was says what interrupted it.
        self.was_refused = self.error.reason == "NO_WORKERS" and not self.error.message.startswith("interrupted by ")
        raise grpc.aio.AbortError

    # What has to hold

    def check_deadline(self, longest_s: float) -> None:
        """A client that listens hears of the end in time."""
        limit_s = longest_s if self.deadline_s is None else min(self.deadline_s, longest_s)
        is_late = self._now() > self._began + limit_s + 0.01 and self.may_read.is_set()
        assert self.is_over or not is_late, "a request goes on after its deadline"

    def _take_token(self, sample: int, token_id: int, logprobs: pb.TokenLogprobs | None) -> None:
        text, position = self.reference.texts[sample], len(self.tokens[sample])
        assert position < len(text), f"a token more than the whole text of sample {sample}"
        expected = text[position]
        assert token_id == expected.token_id, f"sample {sample}, position {position}: a wrong token"
        if expected.logprobs is not None and logprobs is not None:
            _check_logprobs(logprobs, expected.logprobs)
        if self._options.prompt_logprobs is not None:
            assert self._num_scored == len(self.reference.prompt_ids), "a token before the prompt's logprobs"
        self.tokens[sample].append(expected.token_id)

    def _take_prompt_logprobs(self, entries: list[pb.TokenLogprobs]) -> None:
        assert self._options.prompt_logprobs is not None
        expected = self.reference.prompt_logprobs(self._options.prompt_logprobs)
        for entry, wanted in zip(entries, expected[self._num_scored :], strict=False):
            assert wanted is not None
            _check_logprobs(entry, wanted)
        self._num_scored += len(entries)
        assert self._num_scored <= len(expected), "logprobs of the prompt came twice"

    def outcome(self) -> Outcome:
        """What the router has to have counted, as far as the client can tell."""
        assert self.is_over
        if len(self.completes) == len(self.tokens):
            assert [len(ids) for ids in self.tokens] == [len(text) for text in self.reference.texts], "a text cut short"
            finish = [self.reference.texts[index][-1].finish_reason for index in self.completes]
            assert [complete.finish_reason for complete in self.completes.values()] == finish
            return Outcome(finish[-1])
        if self.has_left:
            return Outcome.CANCELLED
        match self.error:
            case DeadlineExceeded():
                return Outcome.DEADLINE
            case Unavailable() if self.was_refused:
                return Outcome.REJECTED
            case _:
                return Outcome.FAILED


def _check_logprobs(entry: pb.TokenLogprobs, expected: messages.Logprobs) -> None:
    top = [(top.token_id, top.logprob) for top in entry.top]
    logprob = entry.logprob if entry.HasField("logprob") else None
    wanted = list(zip(expected.top_ids, expected.top_logprobs, strict=True))
    assert (entry.token_id, top) == (expected.token_id, wanted)
    assert logprob == expected.logprob
