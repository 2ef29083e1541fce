"""Messages over gRPC that cannot be read, or that nobody should read: very many parts in few bytes."""

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import malformed
from router.request import FinishReason, GenerationRequest, TokenEvent
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, running
from tests.router.fakes import FakeDispatcher, Step, model_description


def one_token(request: GenerationRequest) -> list[Step]:
    return [TokenEvent(sample, 0, 97, FinishReason.LENGTH) for sample in range(request.sampling.n)]


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


async def raw_call(edge: Edge, data: bytes) -> grpc.aio.AioRpcError | None:
    """What a message of these bytes is answered with."""
    call = edge.channel.unary_stream("/splitserve.v1.InferenceService/Generate")(data)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


# A field that breaks off, and sampling parameters that do.
@pytest.mark.parametrize("tail", [b"", b"\x0a", b"\x32\x01\x0a"], ids=["whole", "cut off", "broken part"])
@pytest.mark.parametrize(
    "parts",
    [
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 90_000)),
        pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(stop=[""] * 90_000)),
    ],
    ids=["messages", "stop strings"],
)
async def test_message_of_millions_of_parts_fills_the_memory(parts: pb.GenerateRequest, tail: bytes) -> None:
    """C53, C55: it is refused before it is read, others are served as before, and long ids are one part."""
    async with running(Edge(FakeDispatcher(one_token), model_description(max_model_len=200_000))) as edge:
        error = await raw_call(edge, parts.SerializeToString() + tail)
        assert error is not None
        assert (error.code(), from_rpc_error(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert "40000 fields" in (error.details() or "")
        long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[97] * 199_000), sampling_params=pb.SamplingParams(n=2))
        assert await raw_call(edge, long.SerializeToString()) is None


@pytest.mark.parametrize(
    "data", [b"\xff" * 300_000, b"\x2a" + varint(299_990) + b"\x0a\x7f", b"\x2b" * 300_000, b"\x2a" * 300_000]
)
async def test_message_that_is_none_breaks_the_router(data: bytes) -> None:
    async with running(Edge()) as edge:
        error = await raw_call(edge, data)
        assert error is not None
        assert (error.code(), from_rpc_error(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert await raw_call(edge, pb.GenerateRequest(text="a").SerializeToString()) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=5), st.integers(0, 40))
def test_fields_are_counted_wrongly(numbers: list[int], num_messages: int) -> None:
    message = pb.GenerateRequest(
        request_id="x" * 200,
        priority=-1,
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="é" * 99)] * num_messages),
        sampling_params=pb.SamplingParams(temperature=0.5, logit_bias=dict.fromkeys(range(3), 1.0), seed=7),
    )
    message.sampling_params.stop_token_ids.extend(number - 2**63 for number in numbers)
    num_fields = 4 + 3 * num_messages + 2 + 3 * 3 + bool(numbers)
    data, kind = message.SerializeToString(), pb.GenerateRequest.DESCRIPTOR
    for most, is_more in ((num_fields, False), (num_fields - 1, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(malformed, "MAX_FIELDS", most)
            assert malformed.has_too_many_fields(data, kind) is is_more
