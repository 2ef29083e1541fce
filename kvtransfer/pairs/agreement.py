"""How the two ends of a link agree on a transport and form a pair, before the link carries anything else.

The source offers what it can, best first; the sink takes the first of these that it can; both form their rank. What
fails is left out of the next offer. Driven by `pairs.carrier`, which owns the links; without I/O of its own but for the
lanes that it starts.
"""

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

    def problem(self, transport: str) -> str | None:
        """Why this transport cannot be had here."""
        return None if transport == ZMQ else why_not(transport, self.device)


class Host(Protocol):
    def say(self, pair: PairLink, message: wire.AnyPairMessage) -> None: ...

    def form(self, pair: PairLink) -> None:
        """Starts a lane, whose outcome comes to `Agreement.formed` or `Agreement.failed`."""
        ...

    def up(self, pair: PairLink) -> None:
        """The link carries messages from now on."""
        ...

    def end(self, pair: PairLink, reason: str) -> None: ...


class Agreement:
    def __init__(self, able: Able, host: Host) -> None:
        self._able = able
        self._host = host

    def begin(self, pair: PairLink) -> None:
        """A link has connected: its source speaks first."""
        if pair.is_source:
            pair.offered = list(self._able.transports)
            self._offer(pair)

    def hear(self, pair: PairLink, message: wire.AnyPairMessage) -> None:
        """Raises BadMessageError for what cannot come from a correct peer now."""
        match message:
            case wire.Offer() if not pair.is_source and pair.state is not PairState.UP:
                self._on_offer(pair, message)
            case wire.Answer() if pair.is_source and pair.state is PairState.AGREEING:
                self._on_answer(pair, message)
            case wire.Rendezvous():
                if pair.lane is not None and message.attempt == pair.attempt:
                    pair.lane.store.put(message.key, message.value)
            case wire.Ready() if pair.state is PairState.FORMING:
                if message.attempt == pair.attempt:
                    pair.is_peer_ready = True
                    self._settle(pair)
            case wire.Failed():
                if message.attempt == pair.attempt and pair.state is PairState.FORMING:
                    self._drop_try(pair, f"the peer: {message.detail}")
            case wire.Ended():
                self._host.end(pair, f"the peer ended the link: {message.detail}")
            case _:
                raise BadMessageError(f"{type(message).__name__} while {pair.state.name.lower()}")

    def formed(self, pair: PairLink, path: str) -> None:
        pair.is_formed, pair.lane_path = True, path
        self._host.say(pair, wire.Ready(pair.attempt))
        self._settle(pair)

    def failed(self, pair: PairLink, reason: str) -> None:
        """Our rank cannot be formed."""
        self._host.say(pair, wire.Failed(pair.attempt, shorten(reason)))
        self._drop_try(pair, reason)

    # The source's.

    def _offer(self, pair: PairLink) -> None:
        offered = []
        for transport in pair.offered:
            problem = self._able.problem(transport)
            if problem is None:
                offered.append(transport)
            else:
                pair.detours.append(f"{transport}: {problem}")
        pair.offered = offered
        if not offered:
            self._host.end(pair, f"no transport is left: {'; '.join(pair.detours)}")
            return
        pair.state = PairState.AGREEING
        self._host.say(pair, wire.Offer(wire.VERSION, pair.attempt, offered, self._able.block_nbytes))

    def _on_answer(self, pair: PairLink, answer: wire.Answer) -> None:
        if answer.attempt != pair.attempt:
            return
        if answer.detail:
            pair.detours.append(answer.detail)
        if answer.transport not in pair.offered:
            self._host.end(pair, f"the sink takes none of {', '.join(pair.offered)}: {answer.detail}")
            return
        pair.offered = pair.offered[pair.offered.index(answer.transport) + 1 :]
        self._form(pair, answer.attempt, answer.transport)

    # The sink's.

    def _on_offer(self, pair: PairLink, offer: wire.Offer) -> None:
        if offer.version != wire.VERSION:
            raise BadMessageError(f"version of pairs: ours {wire.VERSION}, theirs {offer.version}")
        chosen, against = "", []
        for transport in offer.transports:
            problem = self._problem_of(transport, offer.block_nbytes)
            if problem is None:
                chosen = transport
                break
            against.append(f"{transport}: the sink: {problem}")
        pair.end_lane("another try has begun")
        self._host.say(pair, wire.Answer(offer.attempt, chosen, shorten("; ".join(against))))
        if chosen:
            self._form(pair, offer.attempt, chosen)

    def _problem_of(self, transport: str, block_nbytes: int) -> str | None:
        if transport not in self._able.transports:
            return f"it takes {', '.join(self._able.transports)}"
        if transport != ZMQ and block_nbytes != self._able.block_nbytes:
            return f"blocks of {self._able.block_nbytes} bytes here, {block_nbytes} there"
        return self._able.problem(transport)

    # Both.

    def _form(self, pair: PairLink, attempt: int, transport: str) -> None:
        pair.begin(attempt, transport)
        pair.state = PairState.FORMING
        if transport != ZMQ:
            self._host.form(pair)
        self._settle(pair)

    def _settle(self, pair: PairLink) -> None:
        """Up, once both ranks are."""
        if pair.is_formed and pair.is_peer_ready and pair.state is PairState.FORMING:
            pair.state = PairState.UP
            self._host.up(pair)

    def _drop_try(self, pair: PairLink, reason: str) -> None:
        pair.end_lane(reason)
        if pair.is_source:
            pair.detours.append(f"{pair.transport}: {reason}")
            pair.attempt += 1
            self._offer(pair)
