"""What the engines of both roles have in common: their parts, their books, and the words for refusing and ending."""

import structlog

from splitserve.engine.allocator import BlockAllocator
from splitserve.service.reasons import Reason
from splitserve.worker import messages
from splitserve.worker.engine_setup import EngineContext

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class EngineBase:
    """Owns the allocator; everything runs on the engine thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._runner = context.runner
        self._layout = context.runner.layout
        self._agent = context.agent
        self._publish = context.publish
        self._eos_token_ids = frozenset(context.description.eos_token_ids)
        self._allocator = BlockAllocator(context.runner.pool.num_blocks)

    def _too_large(self, num_tokens: int, num_blocks: int) -> str | None:
        """Why this worker could never take it, if it could not; `num_blocks` are all that it needs to begin."""
        if num_tokens >= self._context.max_model_len:
            return f"{num_tokens} tokens leave no room for output: the context is {self._context.max_model_len}"
        total = self._allocator.counts.total
        if num_blocks > total:
            return f"{num_tokens} tokens need {num_blocks} blocks: the pool has {total}"
        return None

    def _no_room(self, num_blocks: int) -> str:
        return f"{num_blocks} blocks needed, {self._allocator.available} available"

    def _refuse(self, command: messages.Reserve | messages.Prefill, reason: Reason, message: str) -> None:
        self._publish(
            messages.Refused(session=command.session, attempt=command.attempt, reason=reason, message=message)
        )

    def _publish_end(self, session: int, attempt: str, reason: Reason, message: str, traceparent: str) -> None:
        """The router hears that the attempt is lost; the log keeps the trace that it belonged to."""
        log.warning("attempt ended", attempt=attempt, reason=reason.value, detail=message, traceparent=traceparent)
        self._publish(messages.AttemptEnded(session=session, attempt=attempt, reason=reason, message=message))
