"""What the engines of both roles have in common: their parts, their books, and the words for refusing and ending."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import structlog

from splitserve.engine.allocator import BlockAllocator
from splitserve.engine.batch import Segment
from splitserve.engine.block_keys import KeyChain
from splitserve.service.reasons import Reason
from splitserve.worker import commands, reports
from splitserve.worker.admission import Refusal, Room
from splitserve.worker.ended import EndedAttempts
from splitserve.worker.engine_setup import EngineContext

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class EngineBase(ABC):
    """Owns the allocator; everything runs on the engine thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._runner = context.runner
        self._layout = context.runner.layout
        self._agent = context.agent
        self._publish = context.publish
        self._eos_token_ids = frozenset(context.description.eos_token_ids)
        # Prompt and output together.
        self._max_len = context.max_model_len
        self._allocator = BlockAllocator(context.runner.pool.num_blocks)
        self._last_load: reports.Load | None = None
        self._last_slots = reports.Slots(0, 0)
        self._ended = EndedAttempts()
        # While it drains: until when; after that, nothing more is to be ended.
        self._drains_until: float | None = None
        self._is_draining = False

    @abstractmethod
    def load(self) -> reports.Load:
        """What the engine holds and has to do at this moment."""

    @abstractmethod
    def num_empty_slots(self) -> int:
        """Room for tokens in the blocks of attempts that is no token's; see `reports.Slots`."""

    def report_load(self) -> None:
        """Publishes the load unless the last one published was the same: what routers have heard is what holds. How
        full its blocks are is a report of its own: it changes with every token, and no router needs it."""
        load = self.load()
        if load != self._last_load:
            self._last_load = load
            self._publish(load)
        num_taken = (load.blocks_in_use + load.blocks_reserved) * self._layout.block_size
        slots = reports.Slots(num_taken, self.num_empty_slots())
        if slots != self._last_slots:
            self._last_slots = slots
            self._publish(slots)

    def check(self) -> None:
        if self.is_empty():
            self._allocator.check_idle()
        else:
            self._allocator.check()

    def _room(self) -> Room:
        return Room(
            available_blocks=self._allocator.available,
            total_blocks=self._allocator.counts.total,
            block_size=self._layout.block_size,
            max_model_len=self._context.max_model_len,
        )

    def _floor_s(self, segments: Sequence[Segment]) -> float:
        """Of a forward over them."""
        sequences = [(len(segment.token_ids), segment.end) for segment in segments]
        return self._context.floor.seconds(sequences, sum(segment.num_logits for segment in segments))

    # The prefix cache

    def _key_chain(self, token_ids: Sequence[int]) -> KeyChain:
        """The names of the tokens' blocks. What else K and V come to depend on, such as an adapter, belongs in the
        extras, and so does whoever must not share blocks with others."""
        fingerprint = self._context.fingerprint
        extras = {"model": fingerprint.model, "revision": fingerprint.revision}
        keys = KeyChain(self._layout.block_size, extras)
        keys.extend(token_ids)
        return keys

    @property
    def _has_cache(self) -> bool:
        return self._context.config.enable_prefix_caching

    def _pin_cached(self, keys: KeyChain) -> list[int]:
        """The blocks at the start of the sequence that are here already, pinned for it."""
        return self._allocator.pin(keys.complete) if self._has_cache else []

    def _cache(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Offers a sequence's blocks, complete and verified, to whoever has the same tokens next."""
        if self._has_cache:
            self._allocator.cache(blocks, keys)

    def _forget_cached(self, keys: KeyChain) -> None:
        """A sequence's logits are not finite: something in its blocks may be broken, so nobody gets them any more."""
        self._allocator.forget(keys.complete)

    def _count_lookup(self, num_tokens: int, num_cached_tokens: int) -> None:
        if self._has_cache:
            self._publish(reports.CacheLookup(num_tokens=num_tokens, num_cached_tokens=num_cached_tokens))

    # Draining

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether no attempt is here, nor anything of one that has ended."""

    @abstractmethod
    def end_all(self, reason: Reason, message: str) -> None:
        """Ends every attempt that is here; their routers are told."""

    def _begin_drain(self, timeout_s: float) -> None:
        self._is_draining = True
        self._drains_until = self._context.clock() + timeout_s

    def _draining_refusal(self) -> Refusal | None:
        return Refusal(Reason.DRAINING, "this worker is about to end") if self._is_draining else None

    def _continue_drain(self, now: float) -> None:
        """Says once that nothing is left; what takes too long is ended before."""
        if self._drains_until is None:
            return
        if now > self._drains_until:
            self.end_all(Reason.DRAINING, "this worker ends")
        if self.is_empty():
            self._drains_until = None
            self._publish(reports.Drained())

    # Refusing and ending

    def _refuse(self, command: commands.Reserve | commands.Renew | commands.Prefill, refusal: Refusal) -> None:
        self._publish(reports.Refused(command.session, command.attempt, refusal.reason, refusal.message))

    def _ignore(self, command: commands.Command) -> None:
        """It comes late or again: nothing changes, but it is counted."""
        self._publish(reports.Ignored(type(command).__name__.lower()))

    def _publish_end(self, session: int, attempt: str, reason: Reason, message: str, traceparent: str) -> None:
        """The router hears that the attempt is lost; the log keeps the trace that it belonged to."""
        log.warning("attempt ended", attempt=attempt, reason=reason.value, detail=message, traceparent=traceparent)
        self._ended.add(attempt)
        self._publish(reports.AttemptEnded(session=session, attempt=attempt, reason=reason, message=message))
