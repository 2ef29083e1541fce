"""Logprobs on their way from the workers to the client: one entry per token, whatever order or failure brings them."""

import asyncio
import math
from dataclasses import replace

import pytest
from msgspec import structs

from router.events import PromptLogprobsArrived
from router.request import Event, FinishReason, PromptLogprobs, Sampling, TokenEvent, TokenLogprobs
from router.translate import start_to_proto, to_event, to_token
from router.worker import Role, Start
from splitserve.service.reasons import Reason
from splitserve.v1 import cluster_pb2
from splitserve.worker import commands, messages, reports
from splitserve.worker.translate import to_command, to_worker_message
from tests.router.cluster_fakes import Router, collect_all, request
from tests.router.driving import hand_off
from tests.router.edge import Edge, running
from tests.router.fakes import FakeDispatcher, Step, tokens

LENGTH = FinishReason.LENGTH


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5 * token_id, ((token_id, -0.5 * token_id), (7, -9.0)))


PROMPT = [TokenLogprobs(0, None, ()), *map(entry, range(1, 10))]


def shown(events: list[Event]) -> list[int | TokenLogprobs]:
    """What the client sees, in order: ids of tokens, and entries of the prompt."""
    found: list[int | TokenLogprobs] = []
    for event in events:
        found.extend([event.token_id] if isinstance(event, TokenEvent) else event.tokens)
    return found


async def test_failover_doubles_or_loses_a_logprob() -> None:
    """C10: the first token's entry comes from both workers, those before a lost attempt from it alone."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect_all(router.submit(logprobs=2)))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, logprobs=entry(100))
    decode.token(attempt, 0, 100, logprobs=entry(100))
    decode.token(attempt, 1, 101, logprobs=entry(101))
    decode.ended(attempt, Reason.PREEMPTED)
    second = await hand_off(prefill, decode, 1)
    decode.token(second, 2, 102, logprobs=entry(102))
    prefill.first(second, 2, 102, logprobs=entry(102))
    decode.token(second, 3, 103, LENGTH, logprobs=entry(103))
    events = [event for event in await task if isinstance(event, TokenEvent)]
    assert [event.logprobs for event in events] == [entry(token_id) for token_id in (100, 101, 102, 103)]


async def test_tokens_overtake_the_prompts_logprobs() -> None:
    """Decode's own stream may be faster than prefill's, even to the end of the request."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect_all(router.submit(prompt_logprobs=1)))
    attempt = await hand_off(prefill, decode)
    decode.token(attempt, 0, 100)
    prefill.prompt_logprobs(attempt, 0, *PROMPT[:4])
    decode.token(attempt, 1, 101, LENGTH)
    prefill.prompt_logprobs(attempt, 4, *PROMPT[4:])
    prefill.first(attempt, 0, 100)
    assert shown(await task) == [*PROMPT, 100, 101]
    assert prefill.channel.of_kind("release") == decode.channel.of_kind("release") == []
    router.assert_idle()


@pytest.mark.parametrize("has_token", [False, True], ids=["before decode speaks", "after decode spoke"])
async def test_dead_prefill_worker_leaves_half_of_the_prompts_logprobs(has_token: bool) -> None:
    """Decode could go on alone, but the client would wait for the rest: the next one brings it, and only that."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect_all(router.submit(prompt_logprobs=1)))
    attempt = await hand_off(prefill, decode)
    prefill.prompt_logprobs(attempt, 0, *PROMPT[:4])
    if has_token:
        decode.token(attempt, 0, 100)
    await asyncio.sleep(0.01)
    other = router.join(Role.PREFILL, "p1")
    router.leave(prefill)
    if has_token:
        second = await hand_off(other, decode, 1)
    else:
        second, _ = await decode.command("renew")
        decode.reserved(second, 2)
    _, start = await other.command("prefill")
    assert start is not None
    assert start.sampling.prompt_logprobs == 1
    assert start.outputs == {0: ()}, "a token was shown before the prompt's logprobs were complete"
    other.prompt_logprobs(second, 0, *PROMPT[:6])
    other.prompt_logprobs(second, 6, *PROMPT[6:])
    other.first(second, 0, 100, LENGTH)
    assert shown(await task) == [*PROMPT, 100]


async def test_later_attempt_makes_the_prompts_logprobs_again() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect_all(router.submit(prompt_logprobs=1, logprobs=1)))
    attempt = await hand_off(prefill, decode)
    prefill.prompt_logprobs(attempt, 0, *PROMPT)
    prefill.first(attempt, 0, 100)
    decode.ended(attempt, Reason.PREEMPTED)
    second = await hand_off(prefill, decode, 1)
    _, start = await decode.command("reserve", 1)
    assert start is not None
    assert (start.sampling.prompt_logprobs, start.sampling.logprobs) == (None, 1)
    prefill.first(second, 1, 101, LENGTH)
    assert shown(await task) == [*PROMPT, 100, 101]


# Over the wires


async def test_wire_changes_how_to_sample() -> None:
    """Router to worker: every value, absent ones included."""
    sampling = replace(
        request(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(3, 4), min_tokens=2).sampling,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, -100.0), (7, 1.5)),
    )
    for logprobs, prompt_logprobs in ((None, None), (0, 0), (3, None), (None, 20)):
        asked = replace(sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        limits = limits_at_the_worker(asked)
        for name in (field for field in messages.Limits.__struct_fields__ if field not in {"logit_bias"}):
            value = getattr(asked, name)
            assert getattr(limits, name) == (list(value) if isinstance(value, tuple) else value), name
        assert limits.logit_bias == {3: -100.0, 7: 1.5}


def limits_at_the_worker(sampling: Sampling) -> messages.Limits:
    start = start_to_proto(Start(prompt_ids=(1, 2), outputs={0: (3,)}, sampling=sampling))
    wire = cluster_pb2.RouterMessage(prefill=cluster_pb2.Prefill(attempt_id="a", start=start)).SerializeToString()
    command = to_command(cluster_pb2.RouterMessage.FromString(wire), 1)
    assert isinstance(command, commands.Prefill)
    assert (command.start.prompt_ids, command.start.samples) == ([1, 2], [messages.Sample(0, [3])])
    return command.start.limits


async def test_wire_changes_a_logprob() -> None:
    """Worker to router: zero, minus infinity and none at all are three things."""
    worker = Router().join(Role.PREFILL, "p").worker
    sent = [
        messages.Logprobs(5, None, [], []),
        messages.Logprobs(6, 0.0, [], []),
        messages.Logprobs(7, -math.inf, [6, 7], [0.0, -math.inf]),
        messages.Logprobs(8, -1.0 / 3.0, [9, 8], [-0.1, -1.0 / 3.0]),
    ]
    expected = (
        TokenLogprobs(5, None, ()),
        TokenLogprobs(6, 0.0, ()),
        TokenLogprobs(7, -math.inf, ((6, 0.0), (7, -math.inf))),
        TokenLogprobs(8, -1.0 / 3.0, ((9, -0.1), (8, -1.0 / 3.0))),
    )
    assert to_event(worker, over_the_wire(reports.PromptLogprobs(1, "a", 512, sent))) == (
        "a",
        PromptLogprobsArrived(512, expected),
    )
    step = reports.StepTokens(1, [messages.Token(0, 4, 8, attempt="a", logprobs=sent[3]), messages.Token(0, 5, 8)])
    found = [to_token(worker, token).logprobs for token in over_the_wire(step).step_tokens.tokens]
    assert found == [expected[3], None]


def over_the_wire(report: reports.Report) -> cluster_pb2.WorkerMessage:
    return cluster_pb2.WorkerMessage.FromString(to_worker_message(report).SerializeToString())


async def test_largest_prompt_logprobs_do_not_fit_into_messages() -> None:
    """8,000 tokens with 20 of the likeliest each, as the prefill worker cuts them: all arrive, in order."""
    prompt = [TokenLogprobs(i, -1.5, tuple((i + k, -float(k)) for k in range(20))) for i in range(8000)]
    script: list[Step] = [PromptLogprobs(tuple(prompt[start : start + 512])) for start in range(0, 8000, 512)]
    async with running(Edge(FakeDispatcher(lambda _: [*script, *tokens("ok")]))) as edge:
        answer = [message async for message in edge.generate(sampling_params={"prompt_logprobs": 20})]
        received = [entry for message in answer for entry in message.chunk.prompt_logprobs]
        assert [entry.token_id for entry in received] == list(range(8000))
        assert [(top.token_id, top.logprob) for top in received[7999].top] == list(prompt[7999].top)
        assert answer[-1].complete.completion_tokens == 2


async def test_chunk_lacks_its_tokens_logprob() -> None:
    """C10: one entry per id, the token that ended the output included; none where none was asked for."""
    events: list[Step] = [
        PromptLogprobs(tuple(PROMPT[:2])),
        *(structs.replace(e, logprobs=entry(e.token_id)) for e in tokens("hi")),
    ]
    async with running(Edge(FakeDispatcher(lambda _: events))) as edge:
        chunks = [message.chunk async for message in edge.generate() if message.HasField("chunk")]
        first, second = chunks[0].prompt_logprobs
        assert (first.token_id, first.HasField("logprob"), len(first.top)) == (0, False, 0)
        assert (second.token_id, second.logprob, second.top[0].token_id) == (1, -0.5, 1)
        assert [(list(c.token_ids), [(e.token_id, e.logprob) for e in c.logprobs]) for c in chunks[1:]] == [
            ([104], [(104, -52.0)]),
            ([105], [(105, -52.5)]),
        ]
        assert edge.sample("splitserve_generation_tokens_total") == 2
    async with running(Edge(FakeDispatcher(lambda _: tokens("hi")))) as edge:
        assert [message async for message in edge.generate() if message.chunk.logprobs] == []
