"""The words of `Join`: what one edge says the other hears, and a word of a newer worker does no harm."""

import asyncio
from typing import Any

import pytest

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.ticket import Ticket
from router import events as heard
from router.join import JoinChannel
from router.request import FinishReason, GenerationRequest
from router.translate import to_event, to_identity, to_load
from router.worker import Role, Start
from splitserve.service.reasons import Reason
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker import commands, messages, reports
from splitserve.worker.clock import Signs
from splitserve.worker.contract import REASON_TO_PROTO
from splitserve.worker.translate import hello_message, load_message, to_command, to_worker_message
from tests.kvtransfer.worlds import FINGERPRINT
from tests.router.cluster_fakes import Router, collect, ids, request


def as_command(channel: JoinChannel) -> commands.Command | None:
    """The engine's command for the one message that the channel was told to send."""
    message = channel.outgoing.get_nowait()
    assert message is not None
    return to_command(pb.RouterMessage.FromString(message.SerializeToString()), 7)


async def test_reserve_forgets_how_long_the_reservation_is_kept() -> None:
    asked: GenerationRequest = request(3)
    channel = JoinChannel()
    channel.reserve("a", Start(asked.prompt_ids, {2: (8, 9)}, asked.sampling), 60.0, 5.0, "trace", is_local=True)
    command = as_command(channel)
    assert isinstance(command, commands.Reserve)
    assert (command.session, command.attempt, command.timeout_s, command.keep_s) == (7, "a", 60.0, 5.0)
    assert command.traceparent == "trace"
    assert command.is_local
    assert command.start.samples == [messages.Sample(2, [8, 9])]


async def test_renewal_names_another_ticket_or_other_outputs() -> None:
    channel = JoinChannel()
    channel.renew("a", "t1", {2: (8, 9), 3: ()}, 60.0)
    samples = [messages.Sample(2, [8, 9]), messages.Sample(3, [])]
    assert as_command(channel) == commands.Renew(7, "a", "t1", samples, 60.0)


@pytest.mark.parametrize(
    ("said", "event"),
    [
        (reports.Reserved(1, "a", Ticket("t1", "d0", 2, 5)), heard.Reserved(Ticket("t1", "d0", 2, 5))),
        (reports.AlreadyRunning(1, "a"), heard.AlreadyRunning()),
        (
            reports.TransferLost(1, "a", "t1", Reason.TRANSFER_FAILED, "link_lost"),
            heard.TransferLost("d0", "t1", Reason.TRANSFER_FAILED, "link_lost"),
        ),
        (reports.Transferred(1, "a", "t1", 4096), heard.Transferred("t1", 4096)),
        (reports.Refused(1, "a", Reason.DRAINING, "ends"), heard.Refused("d0", Reason.DRAINING, "ends")),
        (reports.AttemptEnded(1, "a", Reason.DRAINING, "ends"), heard.Ended("d0", Reason.DRAINING, "ends")),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_word_of_a_worker_is_changed_on_its_way(said: Any, event: heard.AttemptEvent) -> None:
    decode = Router().join(Role.DECODE, "d0").worker
    message = pb.WorkerMessage.FromString(to_worker_message(said).SerializeToString())
    assert to_event(decode, message) == ("a", event)


async def test_load_tells_nothing_of_silence_and_of_what_was_dropped() -> None:
    load = reports.Load(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, kv_messages_dropped=11)
    told = to_load(load_message(load, Signs(steps=12, step_age_s=0.25, silence_s=0.5)).load)
    assert (told.engine_steps, told.step_age_s, told.silence_s) == (12, 0.25, 0.5)
    assert (told.blocks_free, told.kv_bytes_received, told.kv_messages_dropped) == (1, 10, 11)


async def test_hello_tells_another_place() -> None:
    """Where a worker computes decides which pairs are near each other."""
    ready = reports.Ready(
        fingerprint=FINGERPRINT,
        num_blocks=7,
        block_size=16,
        block_nbytes=1024,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        long_prefill_threshold=1,
        max_model_len=64,
        kv_endpoint=KVEndpoint("tcp://127.0.0.1:1"),
        device="cuda:3",
        topology_group="GPU-a",
        transport="zmq",
        numerics="n",
        recompute_exact=True,
        linear="",
        attention="",
        layers="",
        memory=reports.Memory(0, 0, 0, 0),
        startup={},
    )
    said = hello_message(ready, worker_id="w", role=pb.ROLE_DECODE, host_id="h", pid=1)
    identity = to_identity(pb.WorkerMessage.FromString(said.SerializeToString()).hello)
    assert (identity.device, identity.topology_group, identity.host_id) == ("cuda:3", "GPU-a", "h")


@pytest.mark.parametrize("kind", ["refused", "attempt_ended"])
async def test_reason_of_a_newer_worker_kills_the_request(kind: str) -> None:
    """A rolling upgrade may bring words that this router does not know: the request goes on elsewhere."""
    router = Router(suspect_timeout=0.01)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    word = pb.WorkerMessage()
    body = getattr(word, kind)
    body.attempt_id, body.reason = attempt, max(REASON_TO_PROTO.values()) + 1
    name, event = to_event(decode.worker, pb.WorkerMessage.FromString(word.SerializeToString()))
    assert event is not None
    assert decode.say(name, event)
    again, _ = await decode.command("reserve", 1)
    decode.reserved(again)
    await prefill.command("prefill")
    prefill.accepted(again)
    prefill.first(again, 0, 100, FinishReason.LENGTH)
    assert ids(await task) == [100]
