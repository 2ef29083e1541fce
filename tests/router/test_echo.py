"""The prompt in the answer, over both edges: what a client that scores texts would take for something else."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.request import FinishReason, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs
from splitserve.service.errors import Unavailable
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, http, running
from tests.router.fakes import EOS, ByteTokenizer, FakeDispatcher, Step, events, model_description, tokens

PROMPT = PromptLogprobs((TokenLogprobs(104, None, ()), TokenLogprobs(105, -2.0, ((105, -2.0),))))
EOS_ID = 256


def one_token(request: GenerationRequest) -> list[Step]:
    """What a prefill worker makes of it: the prompt's logprobs, and a token for each sample whatever is asked for."""
    scored = [] if request.sampling.prompt_logprobs is None else [PROMPT]
    ended = [
        TokenEvent(sample, 0, EOS_ID if sample else 97, FinishReason.STOP if sample else FinishReason.LENGTH)
        for sample in range(request.sampling.n)
    ]
    return [*scored, *ended]


async def answer(edge: Edge, **kwargs: Any) -> list[pb.GenerateResponse]:
    return [message async for message in edge.generate(**kwargs)]


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with running(Edge(FakeDispatcher(lambda _: [PROMPT, *tokens("ok")]), tokenizer=ByteTokenizer())) as made:
        yield made


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ({"text": "hé"}, "hé", list("hé".encode())),
        ({"text": f"h{EOS}"}, f"h{EOS}", [104, EOS_ID]),  # as it was sent
        ({"token_ids": [104, EOS_ID, 105]}, "hi", [104, EOS_ID, 105]),  # as all text of ids is
    ],
)
async def test_echo_is_another_prompt_or_comes_late(prompt: dict[str, Any], text: str, ids: list[int]) -> None:
    """Once, alone, and before the prompt's logprobs and the output, of which it is no part."""

    def script(request: GenerationRequest) -> list[Step]:
        return [PROMPT, TokenEvent(1, 0, 98, FinishReason.LENGTH), TokenEvent(0, 0, 97, FinishReason.LENGTH)]

    async with running(Edge(FakeDispatcher(script))) as edge:
        first, *others = await answer(edge, **prompt, echo=True, sampling_params={"n": 2})
        assert (first.chunk.prompt_text, list(first.chunk.prompt_token_ids), first.index) == (text, ids, 0)
        assert (first.chunk.text, list(first.chunk.token_ids), list(first.chunk.prompt_logprobs)) == ("", [], [])
        assert not any(message.chunk.prompt_token_ids for message in others)
        assert sum(message.complete.completion_tokens for message in others) == 2
        assert not any(message.chunk.prompt_token_ids for message in await answer(edge, **prompt))


async def test_echo_of_a_chat_is_made_up(edge: Edge) -> None:
    """Its answer goes on from no text that could stand before it."""
    error = from_rpc_error(await edge.refusal(chat=[("user", "hi")], echo=True))
    assert (error.field, edge.dispatcher.requests) == ("echo", [])
    assert "chat" in error.message


async def test_refused_request_is_echoed() -> None:
    """C57: until there is a word from the workers, the status is the error's own."""
    async with running(Edge(FakeDispatcher(lambda _: [Unavailable("no pair")]))) as edge:
        await edge.refusal(echo=True)
    async with http(Edge(FakeDispatcher(lambda _: [Unavailable("no pair")]))) as client:
        body = {"prompt": "hi", "echo": True, "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 503


async def test_prompt_alone_is_billed_or_shown_with_a_token() -> None:
    """C64: max_tokens 0 scores a prompt. The token that workers make all the same is nobody's."""
    async with running(Edge(FakeDispatcher(one_token))) as edge:
        params = {"max_tokens": 0, "prompt_logprobs": 1, "logprobs": 1, "n": 2, "stop": ["a"]}
        scored, *ends = await answer(edge, sampling_params=params)
        assert [entry.token_id for entry in scored.chunk.prompt_logprobs] == [104, 105]
        assert [(end.complete.finish_reason, end.complete.completion_tokens) for end in ends] == [("length", 0)] * 2
        assert all(end.complete.WhichOneof("matched_stop") is None for end in ends)
        assert ends[0].complete.prompt_tokens == 2
        [request] = edge.dispatcher.requests
        assert request.sampling.max_tokens == 1
        assert edge.outcomes() == {"length": 1}
        assert edge.sample("splitserve_generation_tokens_total") == 0
        echoed, *ends = await answer(edge, echo=True, sampling_params={"max_tokens": 0})
        assert (echoed.chunk.prompt_text, len(ends)) == ("hi", 1)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_prompt_alone_is_refused_or_has_output_over_http(is_stream: bool) -> None:
    """C64: as evaluation harnesses score texts."""
    async with http(Edge(FakeDispatcher(one_token))) as client:
        body: dict[str, Any] = {
            "prompt": ["hi", "hi"],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
            "stream": is_stream,
        }
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if is_stream:
            replies = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
            assert len(replies) == 2 * len(("prompt", "end")) + len(("usage",))
        else:
            replies = [response.json()]
        choices = [choice for reply in replies for choice in reply["choices"]]
        for index in (0, 1):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in mine) == "hi"
            [logprobs] = [choice["logprobs"] for choice in mine if choice["logprobs"]]
            assert logprobs == {
                "tokens": ["h", "i"],
                "token_logprobs": [None, -2.0],
                "top_logprobs": [None, {"i": -2.0}],
                "text_offset": [0, 1],
            }
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        usage = replies[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)


async def test_detokenize_differs_from_what_generate_shows(edge: Edge) -> None:
    ids = [*"hé".encode(), EOS_ID]
    assert (await edge.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "hé"
    assert (await edge.stub.Detokenize(pb.DetokenizeRequest())).text == ""


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.DetokenizeRequest(token_ids=[-1]), "INVALID_ARGUMENT", "token_ids"),
        (pb.DetokenizeRequest(token_ids=[1] * 101), "INVALID_ARGUMENT", "token_ids"),
        (pb.DetokenizeRequest(token_ids=[1], model="nope"), "NOT_FOUND", "model"),
    ],
)
async def test_detokenize_takes_what_http_refuses(
    request_: pb.DetokenizeRequest, code: str, field: str, edge: Edge
) -> None:
    with pytest.raises(Exception, match=r"\w") as caught:
        await edge.stub.Detokenize(request_)
    assert (caught.value.code().name, from_rpc_error(caught.value).field) == (code, field)  # type: ignore[attr-defined]


async def test_long_ids_are_text_on_the_event_loop() -> None:
    """C53: of an echo and of Detokenize, over both edges. Short ones are not worth a thread."""
    threads: list[str] = []

    class Watched(ByteTokenizer):
        def decode(self, ids: Any) -> str:
            threads.append(threading.current_thread().name)
            return super().decode(ids)

    def edge() -> Edge:
        dispatcher = FakeDispatcher(lambda _: events([97]))
        return Edge(dispatcher, model_description(max_model_len=10_000), tokenizer=Watched())

    long, short = [104] * 2000, [104] * 10
    async with running(edge()) as grpc:
        for ids in (long, short):
            await answer(grpc, token_ids=ids, echo=True)
            await grpc.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    async with http(edge()) as client:
        for ids in (long, short):
            assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "h" * len(ids)}
    assert [name.startswith("tokenize") for name in threads] == [True, True, False, False, True, False]
