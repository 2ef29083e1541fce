"""A gRPC client that has no stubs: it learns the contract from the router, as grpcurl does, and calls it."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.cluster.harness import Cluster

pytestmark = pytest.mark.cluster

SERVICE = "splitserve.v1.InferenceService"


class Reflected:
    """Calls what a server says it has."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self.database)

    def method(self, service: str, name: str) -> MethodDescriptor:
        return self._pool.FindServiceByName(service).FindMethodByName(name)

    def call(self, service: str, name: str, /, **fields: Any) -> Any:
        """The answer, or the answers of a method that streams them."""
        method = self.method(service, name)
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        answer = GetMessageClass(method.output_type)
        callee = make(
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return callee(GetMessageClass(method.input_type)(**fields), timeout=60)


@pytest.fixture
def reflected(served: Cluster) -> Iterator[Reflected]:
    with grpc.insecure_channel(served.target) as channel:
        yield Reflected(channel)


def test_public_services_are_hidden_or_internal_ones_shown(reflected: Reflected) -> None:
    services = set(reflected.database.get_services())
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert not any("Cluster" in name for name in services)


def test_described_contract_cannot_be_called(served: Cluster, reflected: Reflected) -> None:
    """Text, ids, chat and options, among them a map and optional fields, all by descriptors that came over the wire."""
    assert reflected.call(SERVICE, "GetModelInfo").model == "llama"
    ids = list(reflected.call(SERVICE, "Tokenize", text="hello").token_ids)
    assert ids == list(served.client.tokenize("hello"))
    sampling = {"max_tokens": 6, "seed": 3, "logit_bias": {70: 5.0}, "ignore_eos": True, "logprobs": 1, "n": 2}
    for prompt, own in (
        ({"text": "hello"}, "hello"),
        ({"token_ids": {"ids": ids}}, ids),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, [{"role": "user", "content": "hi"}]),
    ):
        texts: dict[int, str] = {0: "", 1: ""}
        ends = 0
        for answer in reflected.call(SERVICE, "Generate", **prompt, sampling_params=sampling):
            texts[answer.index] += answer.chunk.text
            ends += answer.HasField("complete")
        expected = served.client.generate(own, **sampling)  # type: ignore[arg-type]
        assert (list(texts.values()), ends) == ([sample.text for sample in expected.samples], 2)


def test_health_is_described_and_true(reflected: Reflected) -> None:
    answer = reflected.call("grpc.health.v1.Health", "Check", service=SERVICE)
    assert answer.status == 1  # SERVING


def test_refusal_has_no_status(reflected: Reflected) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(reflected.call(SERVICE, "Generate", text="hello", sampling_params={"temperature": -1.0}))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
