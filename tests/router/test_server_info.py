"""What a client asks before it sends a prompt: model, ids, health, reflection."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.grpc_server import InferenceServer
from router.request import ClusterLimits
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(("ready", "largest"), [(True, 40), (False, 0)])
async def test_model_info_tells_the_smaller_limit_of_the_pair(ready: bool, largest: int) -> None:
    limits = ClusterLimits(ready=ready, max_prompt_tokens_prefill=50, max_prompt_tokens_decode=40, max_model_len=60)
    async with running(Edge(limits=lambda: limits)) as edge:
        info = await edge.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model, info.revision, info.vocab_size, list(info.eos_token_ids)) == ("tiny", "r1", 300, [256])
        assert (info.max_model_len, info.max_prompt_tokens, info.ready) == (60, largest, ready)


async def test_tokenize_gives_the_ids_that_generate_uses() -> None:
    """C12."""
    async with running(Edge()) as edge:
        for prompt in ({"text": "héllo"}, {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])}):
            answer = await edge.stub.Tokenize(pb.TokenizeRequest(**prompt))
            async for _ in edge.generate(request=pb.GenerateRequest(**prompt)):
                pass
            assert tuple(answer.token_ids) == edge.dispatcher.requests[-1].prompt_ids


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.TokenizeRequest(), "INVALID_ARGUMENT", "prompt"),
        (pb.TokenizeRequest(text=""), "INVALID_ARGUMENT", "text"),
        (pb.TokenizeRequest(text="x" * 2000), "INVALID_ARGUMENT", "text"),
        (pb.TokenizeRequest(text="x", model="nope"), "NOT_FOUND", "model"),
        (pb.TokenizeRequest(chat=pb.Chat()), "INVALID_ARGUMENT", "chat"),
    ],
)
async def test_tokenize_refuses_as_generate_does(request_: pb.TokenizeRequest, code: str, field: str) -> None:
    async with running(Edge()) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await edge.stub.Tokenize(request_)
        assert (caught.value.code().name, from_rpc_error(caught.value).field) == (code, field)


async def test_health_follows_readiness() -> None:
    async with running(Edge()) as edge:
        stub = health_pb2_grpc.HealthStub(edge.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="splitserve.v1.InferenceService"))
        assert (await watch.read()).status == NOT_SERVING
        edge.server.set_ready(True)
        assert (await watch.read()).status == SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        edge.server.set_ready(False)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_a_server_that_stops_says_so_before_it_is_gone() -> None:
    async with running(Edge()) as edge:
        edge.server.set_ready(True)
        stub = health_pb2_grpc.HealthStub(edge.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != SERVING:
            pass
        stopping = asyncio.create_task(edge.server.stop(5))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await stopping


async def test_reflection_describes_the_public_service() -> None:
    async with running(Edge()) as edge:
        stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="splitserve.v1.InferenceService"),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(questions))]
        names = {service.name for service in listed.list_services_response.service}
        assert {"splitserve.v1.InferenceService", "grpc.health.v1.Health"} <= names
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in described.file_descriptor_response.file_descriptor_proto
        ]
        assert "splitserve/v1/inference.proto" in {file.name for file in files}


async def test_a_port_in_use_is_an_error_and_not_a_second_server() -> None:
    async with running(Edge()) as edge:
        second = InferenceServer(edge.server._servicer)
        with pytest.raises(OSError, match=str(edge.port)):
            await second.start("127.0.0.1", edge.port)
