"""How the two ends of a link agree on a transport and form a pair, before the link carries anything else.

The source offers what it can, best first; the sink takes the first of these that it can; both form their rank. What
fails, or takes too long, is left out of the next offer. Driven by `pairs.carrier`, which owns the links; without I/O of
its own but for the lanes that it has started.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtransfer.carrier import ZMQ
from kvtransfer.messages import BadMessageError, shorten
from kvtransfer.pairs import wire
from kvtransfer.pairs.communicator import why_not
from kvtransfer.pairs.link import PairLink, PairState


@dataclass(frozen=True)
class Able:
    """What this side can: `transports` in order of preference, and the pool that a pair is for."""

    transports: tuple[str, ...]
    block_nbytes: int
    device: torch.device


class Host(Protocol):
    def say(self, pair: PairLink, message: wire.AnyPairMessage) -> None: ...

    def form(self, pair: PairLink) -> None:
        """Starts a lane, whose outcome comes to `Agreement.formed` or `Agreement.failed`."""
        ...

    def objection(self, pair: PairLink, transport: str) -> str | None:
        """What experience says against a pair over this transport."""
        ...

    def up(self, pair: PairLink) -> None:
        """The link carries messages from now on."""
        ...

    def end(self, pair: PairLink, reason: str, *, is_peers: bool = False, is_final: bool = False) -> None:
        """`is_peers`: the peer has ended it and need not be told. `is_final`: the next link would end the same way."""
        ...


class Agreement:
    """Seconds: `timeout_s` is for each word of the peer, and for forming a pair."""

    def __init__(self, able: Able, host: Host, timeout_s: float, clock: Callable[[], float]) -> None:
        self._able = able
        self._host = host
        self._timeout_s = timeout_s
        self._clock = clock

    def begin(self, pair: PairLink) -> None:
        """A link has connected: its source speaks first."""
        pair.due = self._clock() + self._timeout_s
        if pair.is_source:
            pair.attempt = 0
            pair.offered = list(self._able.transports)
            self._offer(pair)

    def hear(self, pair: PairLink, message: wire.AnyPairMessage) -> None:
        """Raises BadMessageError for what cannot come from a correct peer now."""
        match message:
            case wire.Offer() if not pair.is_source and pair.state is not PairState.UP:
                self._on_offer(pair, message)
            case wire.Answer() if pair.is_source and pair.state is PairState.AGREEING:
                self._on_answer(pair, message)
            case wire.Ended():
                self._host.end(pair, f"the peer ended the link: {message.detail}", is_peers=True)
            case wire.Rendezvous() | wire.Ready() | wire.Failed() if self._is_stale(pair, message.attempt):
                pass
            case wire.Rendezvous() if pair.state is not PairState.AGREEING:
                self._on_rendezvous(pair, message)
            case wire.Ready() if pair.state is PairState.FORMING and not pair.is_peer_ready:
                pair.is_peer_ready = True
                self._settle(pair)
            case wire.Failed() if pair.state is PairState.FORMING:
                self._drop_try(pair, f"the peer: {message.detail}")
            case wire.Failed() if pair.state is PairState.UP:
                self._host.end(pair, f"the peer has no pair after all: {message.detail}")
            case _:
                raise BadMessageError(f"{type(message).__name__} while {pair.state.name.lower()}")

    def _is_stale(self, pair: PairLink, attempt: int) -> bool:
        """Of a try that we have given up, which the peer cannot have known when it said this."""
        is_given_up = pair.state is PairState.AGREEING and not pair.is_source and attempt == pair.attempt
        return attempt < pair.attempt or is_given_up

    def formed(self, pair: PairLink, path: str) -> None:
        pair.is_formed, pair.lane_path = True, path
        self._host.say(pair, wire.Ready(pair.attempt))
        self._settle(pair)

    def failed(self, pair: PairLink, reason: str) -> None:
        """Our rank cannot be formed."""
        self._host.say(pair, wire.Failed(pair.attempt, shorten(reason)))
        self._drop_try(pair, reason)

    def tick(self, pair: PairLink) -> None:
        if pair.due > self._clock():
            return
        if pair.state is PairState.FORMING:
            missing = "the peer is not ready" if pair.is_formed else "it is not formed"
            self.failed(pair, f"{missing} after {self._timeout_s:g} s")
        else:
            self._host.end(pair, f"no word on a transport within {self._timeout_s:g} s")

    # The source's.

    def _offer(self, pair: PairLink) -> None:
        offered = []
        for transport in pair.offered:
            problem = self._problem(transport) or self._objection(pair, transport)
            if problem is None:
                offered.append(transport)
            else:
                pair.detours.append(f"{transport}: {problem}")
        pair.offered = offered
        if not offered:
            self._host.end(pair, f"no transport is left: {'; '.join(pair.detours)}")
            return
        pair.state = PairState.AGREEING
        pair.due = self._clock() + self._timeout_s
        self._host.say(pair, wire.Offer(wire.VERSION, pair.attempt, offered, self._able.block_nbytes))

    def _on_answer(self, pair: PairLink, answer: wire.Answer) -> None:
        if answer.attempt != pair.attempt:
            raise BadMessageError(f"an answer to offer {answer.attempt}, not {pair.attempt}")
        if answer.detail:
            pair.detours.append(answer.detail)
        if answer.transport not in pair.offered:
            # What failed between us in an earlier try may work another time.
            is_final = answer.is_final and pair.attempt == 0
            reason = f"the sink takes none of {', '.join(pair.offered)}: {'; '.join(pair.detours)}"
            self._host.end(pair, reason, is_final=is_final)
            return
        pair.offered = pair.offered[pair.offered.index(answer.transport) + 1 :]
        self._form(pair, answer.attempt, answer.transport)

    # The sink's.

    def _on_offer(self, pair: PairLink, offer: wire.Offer) -> None:
        if offer.version != wire.VERSION:
            raise BadMessageError(f"version of pairs: ours {wire.VERSION}, theirs {offer.version}")
        if offer.attempt != pair.attempt + 1:
            raise BadMessageError(f"offer {offer.attempt} after {pair.attempt}")
        chosen, against, is_final = "", [], True
        for transport in offer.transports:
            problem = self._sinks_problem(transport, offer.block_nbytes)
            if problem is None and (problem := self._objection(pair, transport)) is not None:
                is_final = False
            if problem is None:
                chosen = transport
                break
            against.append(f"{transport}: the sink: {problem}")
        pair.end_lane("another try has begun")
        pair.attempt = offer.attempt
        pair.detours += against
        self._host.say(pair, wire.Answer(offer.attempt, chosen, shorten("; ".join(against)), is_final))
        if chosen:
            self._form(pair, offer.attempt, chosen)

    def _sinks_problem(self, transport: str, block_nbytes: int) -> str | None:
        if transport not in self._able.transports:
            return f"it takes {', '.join(self._able.transports)}"
        if transport != ZMQ and block_nbytes != self._able.block_nbytes:
            return f"blocks of {self._able.block_nbytes} bytes here, {block_nbytes} there"
        return self._problem(transport)

    # Both.

    def _problem(self, transport: str) -> str | None:
        """Why this transport can never be had here."""
        return None if transport == ZMQ else why_not(transport, self._able.device)

    def _objection(self, pair: PairLink, transport: str) -> str | None:
        """Why it is better left alone now."""
        return None if transport == ZMQ else self._host.objection(pair, transport)

    def _on_rendezvous(self, pair: PairLink, message: wire.Rendezvous) -> None:
        """Once both are formed nobody waits for a key any more; a library may set one all the same."""
        if pair.lane is None or pair.state is PairState.UP:
            return
        pair.num_rendezvous += 1
        if pair.num_rendezvous > wire.MAX_VALUES:
            raise BadMessageError(f"more than {wire.MAX_VALUES} keys for one pair")
        pair.lane.store.put(message.key, message.value)

    def _form(self, pair: PairLink, attempt: int, transport: str) -> None:
        pair.begin(attempt, transport)
        pair.state = PairState.FORMING
        pair.due = self._clock() + self._timeout_s
        if transport != ZMQ:
            self._host.form(pair)
        self._settle(pair)

    def _settle(self, pair: PairLink) -> None:
        """Up, once both ranks are."""
        if pair.is_formed and pair.is_peer_ready and pair.state is PairState.FORMING:
            pair.state = PairState.UP
            pair.due = math.inf
            pair.up_at = self._clock()
            self._host.up(pair)

    def _drop_try(self, pair: PairLink, reason: str) -> None:
        pair.end_lane(reason)
        pair.detours.append(f"{pair.transport}: {reason}")
        if pair.is_source:
            pair.attempt += 1
            self._offer(pair)
        else:
            pair.state = PairState.AGREEING
            pair.due = self._clock() + self._timeout_s
