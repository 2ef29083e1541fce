"""Bad input that would reach a worker, and good input that would be refused; over a real channel."""

import asyncio
import math
from typing import Any

import grpc
import pytest
import structlog.testing

from router.request import ClusterLimits, DecodeCapacity, FinishReason, TokenEvent
from router.sampling import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from router.validation import RequestValidator
from splitserve.service.errors import InvalidRequest
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, request_of, running
from tests.router.fakes import NO_LIMITS, ByteTokenizer, model_description

NAN, INF = math.nan, math.inf

# field at fault, sampling parameters, what the message must say
BAD_SAMPLING: list[tuple[str, dict[str, Any], str]] = [
    *(("temperature", {"temperature": value}, "between 0 and 100") for value in (NAN, INF, -INF, -0.1, 1e30)),
    *(("top_p", {"top_p": value}, "above 0 and at most 1") for value in (NAN, INF, 0.0, -0.1, 1.01)),
    *(("min_p", {"min_p": value}, "between 0 and 1") for value in (NAN, INF, -0.1, 1.01)),
    ("top_k", {"top_k": -5}, "-5"),
    *(
        ("repetition_penalty", {"repetition_penalty": value}, "between 0.01 and 10")
        for value in (NAN, INF, -1.0, 0.0, 1e-300, 10.1)
    ),
    *(
        (name, {name: value}, "between -2 and 2")
        for name in ("presence_penalty", "frequency_penalty")
        for value in (NAN, INF, -INF, -2.1, 2.1)
    ),
    ("max_tokens", {"max_tokens": 0}, "at least 1, or 0 with echo or prompt_logprobs"),
    ("max_tokens", {"max_tokens": -1, "prompt_logprobs": 0}, "at least 0"),
    ("min_tokens", {"min_tokens": 1, "max_tokens": 0, "prompt_logprobs": 0}, "max_tokens, which is 0"),
    ("max_tokens", {"max_tokens": -1}, "at least 1"),
    ("max_tokens", {"max_tokens": 99}, "max_tokens is 99; the prompt has 2 tokens and the context is 100"),
    ("max_tokens", {"max_tokens": 2**31 - 1}, "at most 98"),
    ("min_tokens", {"min_tokens": -1}, "at least 0"),
    ("min_tokens", {"min_tokens": 6, "max_tokens": 5}, "max_tokens, which is 5"),
    ("min_tokens", {"min_tokens": 99}, "max_tokens, which is 98"),
    ("stop", {"stop": [""]}, "stop[0] is empty"),
    ("stop", {"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "17 strings; at most 16"),
    ("stop", {"stop": ["ok", "x" * (MAX_STOP_CHARS + 1)]}, "stop[1] has 257 characters"),
    *(
        ("stop_token_ids", {"stop_token_ids": [5, value]}, f"stop_token_ids[1] is {value}")
        for value in (-1, 300, 2**40, 2**63 - 1)
    ),
    ("stop_token_ids", {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "129 ids"),
    ("n", {"n": 0}, "between 1 and 128"),
    ("n", {"n": -1}, "between 1 and 128"),
    ("n", {"n": 129}, "between 1 and 128"),
    *(
        (name, {name: value}, f"{name} is {value}; it must be between 0 and 20")
        for name in ("logprobs", "prompt_logprobs")
        for value in (-1, 21, 2**31 - 1)
    ),
    *(
        ("logit_bias", {"logit_bias": {5: 1.0, token_id: 1.0}}, f"names token {token_id}; the model's vocabulary is 0")
        for token_id in (-1, 300, 2**40)
    ),
    *(
        ("logit_bias", {"logit_bias": {7: value}}, f"logit_bias[7] is {value}; it must be between -100 and 100")
        for value in (NAN, INF, -INF, 100.5, -101.0)
    ),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 tokens; at most 1024"),
]

# field at fault, the request, what the message must say
BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("request_id", {"request_id": "x" * 257}, "257 characters; at most 256"),
    ("prompt", {"request": pb.GenerateRequest()}, "one of text, token_ids or chat"),
    ("text", {"text": ""}, "at least one token"),
    ("token_ids", {"token_ids": []}, "at least one token"),
    ("chat", {"chat": []}, "no messages"),
    ("chat", {"chat": [("foo", "x")]}, "foo"),
    ("chat", {"chat": [("", "")] * 200}, "200 messages"),
    *(
        ("token_ids", {"token_ids": [65, value]}, f"token_ids[1] is {value}; the model's vocabulary is 0 to 299")
        for value in (-1, 300, 2**40, 2**63 - 1, -(2**63))
    ),
    ("token_ids", {"token_ids": [65] * 100}, "100 tokens; the context is 100 tokens"),
    ("token_ids", {"token_ids": [65] * 5000}, "5000 tokens"),
    ("text", {"text": "x" * 100}, "100 tokens; the context is 100 tokens"),
    ("text", {"text": "é" * 801}, "1602 bytes"),
    ("chat", {"chat": [("user", "x" * 94)]}, "100 tokens"),
    ("chat", {"chat": [("user", "x" * 5000)]}, "5004 bytes"),
]


@pytest.mark.parametrize(("field", "params", "says"), BAD_SAMPLING)
async def test_a_bad_sampling_value_is_named_and_reaches_no_worker(
    field: str, params: dict[str, Any], says: str
) -> None:
    """C51, C62, C64."""
    async with running(Edge()) as edge:
        await assert_refused(edge, {"sampling_params": params}, f"sampling_params.{field}", says)


@pytest.mark.parametrize(("field", "request_", "says"), BAD_REQUESTS)
async def test_a_bad_prompt_is_named_and_reaches_no_worker(field: str, request_: dict[str, Any], says: str) -> None:
    """C53, C61, C62, C64."""
    async with running(Edge()) as edge:
        await assert_refused(edge, request_, field, says)


@pytest.mark.parametrize(
    ("field", "prompt", "place"), [("text", "hi<added>", 2), ("chat", [("user", "<added>")], 6)], ids=["text", "chat"]
)
async def test_a_token_that_the_model_has_no_row_for_reaches_no_worker(field: str, prompt: object, place: int) -> None:
    """A tokenizer may have been given tokens that its model has not: their ids kill the engine that looks them up."""
    model = model_description(vocab_size=257)
    async with running(Edge(model=model, tokenizer=ByteTokenizer("<added>"))) as edge:
        says = f"{field} tokenizes to id 257 at position {place}; the model's vocabulary is 0 to 256"
        await assert_refused(edge, {field: prompt}, field, says)
        answer = await edge.stub.Tokenize(pb.TokenizeRequest(text="<added>"))
        assert list(answer.token_ids) == [257], "Tokenize tells what the tokenizer does"


async def assert_refused(edge: Edge, request: dict[str, Any], field: str, says: str) -> None:
    error = from_rpc_error(await edge.refusal(**request))
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert says in error.message
    assert edge.dispatcher.generations == []
    assert edge.outcomes() == {"rejected": 1}
    # The next request is served as if nothing had been.
    assert [message async for message in edge.generate()][-1].HasField("complete")


async def test_an_unknown_model_is_not_found() -> None:
    """C61."""
    async with running(Edge()) as edge:
        refusal = await edge.refusal(model="nope")
        error = from_rpc_error(refusal)
        assert (refusal.code().name, error.reason, error.field) == ("NOT_FOUND", "MODEL_NOT_FOUND", "model")
        assert "'tiny' is served" in error.message
        assert [message async for message in edge.generate(model="tiny")]


async def test_text_that_is_no_unicode_is_an_invalid_argument() -> None:
    """C62, C64: a lone surrogate cannot be written with a protobuf library, but it can be sent."""
    lone_surrogate = b"\x1a\x03\xed\xa0\x80"
    async with running(Edge()) as edge:
        call = edge.channel.unary_stream("/splitserve.v1.InferenceService/Generate")(lone_surrogate)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        tokenize = edge.channel.unary_unary("/splitserve.v1.InferenceService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(b"\x12\x03\xed\xa0\x80")
        assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"
        assert [message async for message in edge.generate()]


@pytest.mark.parametrize("size", [999, 1000, 1001, 1199, 1201, 5000])
@pytest.mark.parametrize("shape", ["text", "token_ids", "chat"])
@pytest.mark.parametrize(("prefill", "decode"), [(1000, 1200), (1200, 1000)])
async def test_a_prompt_above_either_sides_pool_is_refused_with_the_smaller_limit(
    size: int, shape: str, prefill: int, decode: int
) -> None:
    """C03, C44, C54."""
    limits = ClusterLimits(
        ready=True, max_prompt_tokens_prefill=prefill, max_prompt_tokens_decode=decode, max_model_len=0
    )
    prompt = {"text": "x" * size, "token_ids": [65] * size, "chat": [("user", "x" * (size - 6))]}[shape]
    smaller = "prefill" if prefill < decode else "decode"
    async with running(Edge(model=model_description(max_model_len=8192), limits=lambda: limits)) as edge:
        if size <= 1000:
            assert [message async for message in edge.generate(**{shape: prompt})]
        else:
            error = from_rpc_error(await edge.refusal(**{shape: prompt}))
            assert f"{size} tokens; the largest that the {smaller} workers can hold is 1000" in error.message
            assert (error.reason, error.field) == ("PROMPT_TOO_LARGE", shape)


async def validated(edge_model: dict[str, Any] | None = None, **request: Any) -> Any:
    model = model_description(**(edge_model or {}))
    validator = RequestValidator(model, ByteTokenizer(), lambda: NO_LIMITS)
    try:
        return await validator.validate(request_of(**request), deadline=600.0)
    finally:
        validator.close()


async def test_what_is_left_out_gets_the_documented_default() -> None:
    """C51: without max_tokens the answer may go on to the end of the context."""
    request = await validated()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n) == (98, 0, 1)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == ((), (), False)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.logit_bias, sampling.logprobs, sampling.prompt_logprobs) == ((), None, None)
    assert (request.model, request.prompt_ids) == ("tiny", tuple(b"hi"))
    assert request.sampling.seed != (await validated()).sampling.seed


async def test_the_models_own_defaults_lie_under_what_the_request_says() -> None:
    defaults = {"default_temperature": 0.6, "default_top_p": 0.9, "default_top_k": 50, "default_min_p": 0.1}
    sampling = (await validated(defaults)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.9, 50, 0.1)
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    sampling = (await validated(defaults, sampling_params=said)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    penalizing = {"default_repetition_penalty": 1.1}
    assert (await validated(penalizing)).sampling.repetition_penalty == 1.1
    off = await validated(penalizing, sampling_params={"repetition_penalty": 1.0})
    assert off.sampling.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("params", "name", "value"),
    [
        ({"temperature": 1e-9}, "temperature", 0.0),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"temperature": 100}, "temperature", 100.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 2**31 - 1}, "top_k", 300),
        ({"max_tokens": 98}, "max_tokens", 98),
        ({"seed": 0}, "seed", 0),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"stop": ["a", "b", "a"]}, "stop", ("a", "b")),
        ({"stop_token_ids": [0, 299, 0]}, "stop_token_ids", (0, 299)),
        ({"n": 1}, "n", 1),
        ({"n": 128}, "n", 128),
        ({}, "n", 1),
        ({"repetition_penalty": 0.01}, "repetition_penalty", 0.01),
        ({"repetition_penalty": 10.0}, "repetition_penalty", 10.0),
        ({"presence_penalty": -2.0}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2.0}, "frequency_penalty", 2.0),
        ({"logit_bias": {299: -100.0, 0: 100.0}}, "logit_bias", ((0, 100.0), (299, -100.0))),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 20}, "logprobs", 20),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
        ({"prompt_logprobs": 20}, "prompt_logprobs", 20),
    ],
)
async def test_values_at_the_edge_are_taken(params: dict[str, Any], name: str, value: object) -> None:
    assert getattr((await validated(sampling_params=params)).sampling, name) == value


@pytest.mark.parametrize("text", [" ", "\x00", "x" * 99])
async def test_odd_but_honest_prompts_are_taken(text: str) -> None:
    """C64."""
    assert (await validated(text=text)).prompt_ids == tuple(text.encode())


async def test_an_empty_chat_message_is_still_a_prompt() -> None:
    assert (await validated(chat=[("user", "")])).prompt_ids == tuple(b"[user]")


async def test_the_workers_context_counts_where_it_is_the_smaller_one() -> None:
    limits = ClusterLimits(ready=True, max_prompt_tokens_prefill=0, max_prompt_tokens_decode=0, max_model_len=50)
    async with running(Edge(limits=lambda: limits)) as edge:
        error = from_rpc_error(await edge.refusal(text="x" * 50))
        assert "the context is 50 tokens" in error.message


@pytest.mark.parametrize(
    ("prefill", "decode", "smaller"), [(39, 99, "prefill"), (99, 39, "decode"), (39, 0, "prefill")]
)
async def test_output_outgrows_the_smaller_pool(prefill: int, decode: int, smaller: str) -> None:
    """C44: after a failure a prefill worker must hold prompt and output; the numbers say whose pool is too small."""
    limits = ClusterLimits(
        ready=True, max_prompt_tokens_prefill=prefill, max_prompt_tokens_decode=decode, max_model_len=0
    )
    async with running(Edge(limits=lambda: limits)) as edge:
        error = from_rpc_error(await edge.refusal(text="x" * 30, sampling_params={"max_tokens": 11}))
        assert f"the {smaller} workers allow 40 tokens, so at most 10 can be generated" in error.message
        assert [message async for message in edge.generate(text="x" * 30, sampling_params={"max_tokens": 10})]
        assert [message async for message in edge.generate(text="x" * 30)]


@pytest.mark.parametrize(
    ("decodes", "most"),
    [
        ([DecodeCapacity(num_blocks=9, block_size=10, max_num_seqs=50)], 6),
        ([DecodeCapacity(num_blocks=99, block_size=10, max_num_seqs=4)], 4),
        ([DecodeCapacity(9, 10, 50), DecodeCapacity(99, 10, 4), DecodeCapacity(9, 20, 50)], 8),
        ([], 128),
    ],
    ids=["blocks", "sequences", "roomiest", "nobody yet"],
)
async def test_more_samples_than_any_worker_could_hold_wait(decodes: list[DecodeCapacity], most: int) -> None:
    """C65: a prompt of 39 tokens has 3 whole blocks of 10, which its samples share."""
    limits = ClusterLimits(True, 0, 0, 0, tuple(decodes))
    async with running(Edge(limits=lambda: limits)) as edge:
        if decodes:
            error = from_rpc_error(await edge.refusal(text="x" * 39, sampling_params={"n": most + 1}))
            assert f"n is {most + 1}; the prompt has 39 tokens" in error.message
            assert f"can hold at most {most} samples" in error.message
            assert (error.reason, error.field) == ("TOO_MANY_SAMPLES", "sampling_params.n")
        edge.dispatcher.script = lambda request: [
            TokenEvent(sample, 0, 65, FinishReason.LENGTH) for sample in range(request.sampling.n)
        ]
        messages = [message async for message in edge.generate(text="x" * 39, sampling_params={"n": most})]
        assert sorted(message.index for message in messages if message.HasField("complete")) == list(range(most))


@pytest.mark.parametrize(
    ("name", "value", "instead", "allowed"),
    [
        ("top_p", 0.0, 1.0, "above 0 and at most 1"),
        ("min_p", 2.0, 0.0, "between 0 and 1"),
        ("temperature", -1.0, 1.0, "between 0 and 100"),
        ("temperature", 1e300, 1.0, "between 0 and 100"),
        ("repetition_penalty", 0.0, 1.0, "between 0.01 and 10"),
        ("top_k", -5, 0, "at least 1, or 0 or -1 for all tokens"),
    ],
)
async def test_models_own_default_that_no_request_may_have_fails_every_request(
    name: str, value: float, instead: float, allowed: str
) -> None:
    """It is left out, the others count, and the log says where it stands."""
    defaults = {"default_temperature": 0.5, "default_top_k": 7} | {f"default_{name}": value}
    with structlog.testing.capture_logs() as logs:
        sampling = (await validated(defaults)).sampling
    expected = {"temperature": 0.5, "top_k": 7} | {name: instead}
    assert {key: getattr(sampling, key) for key in expected} == expected
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert (warning["file"], warning["name"]) == ("/nowhere/generation_config.json", name)
    assert (warning["value"], warning["allowed"]) == (value, allowed)


async def test_long_text_is_tokenized_beside_the_event_loop() -> None:
    """C53: health and streams go on while a tokenizer works."""
    loop = asyncio.get_running_loop()
    ticked = asyncio.Event()

    class WaitsForTheLoop(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            # Ends only if the loop runs meanwhile.
            asyncio.run_coroutine_threadsafe(ticked.wait(), loop).result()
            return super().encode(text)

    async with running(Edge(encoder=WaitsForTheLoop())) as edge:
        call = edge.generate()
        info = await edge.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.model == "tiny"
        ticked.set()
        assert [message async for message in call]


async def test_text_of_many_megabytes_is_refused_unseen() -> None:
    """C53."""

    class MustNotBeAsked(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise AssertionError("tokenized")

    async with running(Edge(encoder=MustNotBeAsked())) as edge:
        error = from_rpc_error(await edge.refusal(text="x" * 25_000_000))
        assert (error.reason, error.field) == ("CONTEXT_LENGTH_EXCEEDED", "text")
        assert "25000000 bytes" in error.message
