"""A real server and client around fakes, for the tests of the public edge."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from router.grpc_server import InferenceServer
from router.http import create_app
from router.metrics import Outcome, RouterMetrics
from router.openai.routes import OpenAI
from router.request import ClusterLimits
from router.server import InferenceServicer
from router.serving import Serving
from router.tokenizing import TokenizingLimits
from router.validation import Encoder, RequestValidator
from splitserve.models.description import ModelDescription
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.http_server import UNREAD_TIMEOUT_S, serve_http
from splitserve.service.limits import GRPC_MESSAGE_OPTIONS
from splitserve.v1 import inference_pb2 as pb
from splitserve.v1 import inference_pb2_grpc as pb_grpc
from tests.router.fakes import NO_LIMITS, ByteTokenizer, FakeDispatcher, model_description


@dataclass
class Edge:
    dispatcher: FakeDispatcher = field(default_factory=FakeDispatcher)
    model: ModelDescription = field(default_factory=model_description)
    tokenizer: ByteTokenizer | Tokenizer = field(default_factory=ByteTokenizer)
    limits: Callable[[], ClusterLimits] = lambda: NO_LIMITS
    encoder: Encoder | None = None
    request_timeout_s: float = 600.0
    tokenizing: TokenizingLimits = field(default_factory=TokenizingLimits)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    port: int = 0
    server: InferenceServer = field(init=False)
    serving: Serving = field(init=False)
    channel: grpc.aio.Channel = field(init=False)
    stub: "pb_grpc.InferenceServiceAsyncStub" = field(init=False)

    def outcomes(self) -> dict[str, int]:
        """Counted requests by outcome; those with none are left out."""
        counts = {
            outcome.value: self.registry.get_sample_value(
                "splitserve_requests_total", {"outcome": outcome, "model": self.model.name}
            )
            for outcome in Outcome
        }
        return {outcome: int(count) for outcome, count in counts.items() if count}

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(name, {"model": self.model.name})

    def generate(self, **kwargs: object) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        timeout = kwargs.pop("timeout", 30)
        metadata = kwargs.pop("metadata", None)
        request = kwargs.pop("request", None) or request_of(**kwargs)
        return self.stub.Generate(request, timeout=timeout, metadata=metadata)  # type: ignore[arg-type]

    async def refusal(self, **kwargs: object) -> grpc.aio.AioRpcError:
        """The error that a call must end with, before any message."""
        messages = 0
        try:
            async for _ in self.generate(**kwargs):
                messages += 1
        except grpc.aio.AioRpcError as error:
            assert messages == 0, f"{messages} messages came before the refusal"
            return error
        raise AssertionError("the call was not refused")

    async def settled(self, num_requests: int = 1) -> None:
        """Waits until that many requests have ended, whatever their outcome."""
        await until(lambda: sum(self.outcomes().values()) >= num_requests)


async def until(holds: Callable[[], bool]) -> None:
    """Polls, for what gives no signal; the test's own timeout ends a wait in vain."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def request_of(**kwargs: object) -> pb.GenerateRequest:
    """A request with a prompt "hi" unless told otherwise; `sampling_params` is a dict."""
    fields: dict[str, object] = {"text": "hi", **kwargs} if not kwargs.keys() & {"token_ids", "chat"} else dict(kwargs)
    if isinstance(fields.get("sampling_params"), dict):
        fields["sampling_params"] = pb.SamplingParams(**fields["sampling_params"])  # type: ignore[arg-type]
    if isinstance(fields.get("token_ids"), list):
        fields["token_ids"] = pb.TokenIds(ids=fields["token_ids"])  # type: ignore[arg-type]
    if isinstance(fields.get("chat"), list):
        messages = [pb.ChatMessage(role=role, content=content) for role, content in fields["chat"]]  # type: ignore[attr-defined]
        fields["chat"] = pb.Chat(messages=messages)
    return pb.GenerateRequest(**fields)  # type: ignore[arg-type]


def assemble(edge: Edge) -> RequestValidator:
    """Makes `edge.serving`; whoever calls this closes what it returns."""
    validator = RequestValidator(edge.model, edge.encoder or edge.tokenizer, edge.limits, tokenizing=edge.tokenizing)
    edge.serving = Serving(
        detokenizer=edge.tokenizer,
        validator=validator,
        dispatcher=edge.dispatcher,
        metrics=RouterMetrics(edge.registry, edge.model.name),
        request_timeout_s=edge.request_timeout_s,
    )
    return validator


@asynccontextmanager
async def running(edge: Edge) -> AsyncIterator[Edge]:
    validator = assemble(edge)
    servicer = InferenceServicer(edge.serving, model=edge.model, validator=validator, limits=edge.limits)
    edge.server = InferenceServer(servicer)
    edge.port = await edge.server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}", options=GRPC_MESSAGE_OPTIONS) as channel:
            edge.channel = channel
            edge.stub = pb_grpc.InferenceServiceStub(channel)
            yield edge
    finally:
        await edge.server.stop(0)
        validator.close()


def http_app(edge: Edge, validator: RequestValidator) -> FastAPI:
    api = OpenAI(model=edge.model, serving=edge.serving, validator=validator, tokenizer=edge.tokenizer).routes()
    return create_app(api=api, not_ready_reason=lambda: None, cluster=dict, registry=edge.registry)


@asynccontextmanager
async def http(edge: Edge, unread_timeout_s: float = UNREAD_TIMEOUT_S) -> AsyncIterator[httpx.AsyncClient]:
    """A real HTTP server and client around the same fakes."""
    validator = assemble(edge)
    app = http_app(edge, validator)
    server = await serve_http(app, "127.0.0.1", 0, unread_timeout_s=unread_timeout_s)
    edge.port = server.port
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{edge.port}", trust_env=False, timeout=30) as client:
            yield client
    finally:
        await server.stop()
        validator.close()
