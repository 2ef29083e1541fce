"""One attempt's path through a prefill worker: admitted → computed in chunks → first token → blocks acknowledged.

Runs on the engine thread and owns the attempts and the allocator. An attempt's blocks are in use from admission until
its transfer has ended one way or the other, because until then the KV thread may still read them. Every path out of
here, refusal apart, therefore leads through the transfer's terminal event. A block enters the prefix cache as soon as
all its tokens are computed, so the next prompt that begins alike finds it even while this one is under way.
"""

import structlog
import torch

from kvtransfer import events
from kvtransfer.ticket import Ticket
from prefill_worker.prompt_logprobs import MAX_SCORED_TOKENS, score_chunk
from prefill_worker.scheduler import Chunk, PromptView, admit, plan_step, tokens_ahead
from prefill_worker.state import PrefillAttempt
from splitserve.engine.batch import Segment
from splitserve.engine.block_keys import KeyChain
from splitserve.engine.history import TokenHistory
from splitserve.service.errors import SplitserveError
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.admission import Refusal
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.load import load_report
from splitserve.worker.payload import encode_finish
from splitserve.worker.role import EngineBase
from splitserve.worker.sampling import Draw, draw_tokens, sampling_params, start_problem

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class PrefillEngine(EngineBase):
    """What the prefill worker adds to the engine loop."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._attempts: dict[str, PrefillAttempt] = {}
        self._by_transfer: dict[str, PrefillAttempt] = {}
        self._threshold = context.config.long_prefill_threshold

    # Commands and events

    def handle(self, item: commands.Command | events.KVEvent) -> None:
        match item:
            case commands.Prefill():
                self._admit(item)
            case commands.Release(attempt=attempt, reason=reason):
                self._ended.add(attempt)
                self._release(self._attempts.get(attempt), f"released by the router: {reason}")
            case commands.EndSession(session=session):
                for orphan in [a for a in self._attempts.values() if a.session == session]:
                    self._release(orphan, "the router is gone")
            case commands.Drain(timeout_s=timeout_s):
                self._begin_drain(timeout_s)
            case commands.SetPeers(endpoints=endpoints):
                self._agent.set_peers(endpoints)
            case events.TransferAcked(transfer_id=transfer_id):
                self._forget(transfer_id)
            case events.TransferFailed(transfer_id=transfer_id, reason=reason, detail=detail):
                self._transfer_failed(transfer_id, f"{reason.value.lower()}: {detail}")
            case _:
                log.warning("unexpected message", type=type(item).__name__)

    def _admit(self, command: commands.Prefill) -> None:
        """Takes the prompt only if blocks for all of it are there now, so that what is admitted always finishes."""
        if command.attempt in self._attempts or command.attempt in self._ended:
            self._ignore(command)
            return
        start = command.start
        if refusal := self._refusal(command) or self._open(command.ticket):
            self._refuse(command, refusal)
            return
        token_ids = start.token_ids
        keys, is_scored = self._key_chain(token_ids), start.limits.prompt_logprobs is not None
        blocks, num_cached = self._take_blocks(len(token_ids), keys, is_scored=is_scored)
        attempt = PrefillAttempt(
            attempt=command.attempt,
            session=command.session,
            ticket=command.ticket,
            params=sampling_params(start.limits),
            samples=start.samples,
            num_prompt=len(start.prompt_ids),
            token_ids=token_ids,
            keys=keys,
            blocks=blocks,
            deadline=self._context.clock() + command.timeout_s,
            num_cached=num_cached,
            num_computed=num_cached,
            num_sent=command.ticket.num_cached_blocks,
            num_prompt_logprobs=start.limits.prompt_logprobs,
        )
        self._attempts[attempt.attempt] = attempt
        self._by_transfer[attempt.ticket.transfer_id] = attempt
        # Before the answer, so that a router never sees the answer without the room that it took.
        self.report_load()
        self._publish(reports.Accepted(session=command.session, attempt=command.attempt, num_cached_tokens=num_cached))
        if not is_scored:
            self._count_lookup(len(token_ids), num_cached)
        self._push_blocks(attempt, num_cached // self._layout.block_size)

    def _refusal(self, command: commands.Prefill) -> Refusal | None:
        if command.ticket.transfer_id in self._by_transfer:
            return Refusal(Reason.INVALID, "its ticket is in use")
        problem = self._draining_refusal() or start_problem(command.start, self._runner.vocab_size)
        return problem or admit(len(command.start.token_ids), self._room())

    def _open(self, ticket: Ticket) -> Refusal | None:
        """Begins the transfer; a ticket that cannot be used costs its attempt and nobody else's."""
        try:
            self._agent.open(ticket)
        except SplitserveError as error:
            return Refusal(Reason.TRANSFER_FAILED, error.message)
        return None

    def _take_blocks(self, num_tokens: int, keys: KeyChain, *, is_scored: bool) -> tuple[list[int], int]:
        """Blocks for all tokens, cached ones first, and how many tokens need not be computed: never all of them, and
        none of a prompt whose logprobs are wanted, because a token that is not computed has no logits.

        The caller has found room for all blocks, which is more than enough for those that are not cached.
        """
        cached = [] if is_scored else self._pin_cached(keys)
        num_cached = len(cached) * self._layout.block_size
        if num_cached < num_tokens:
            fresh = self._allocator.allocate(self._layout.blocks_for(num_tokens) - len(cached))
            assert fresh is not None, "room is judged without hits"
            return cached + fresh, num_cached
        # The last token has to be computed for its logits. Its K and V come out the same, but a block that others read
        # or that is on its way to a decode worker is not written, so they go to a copy.
        last = cached.pop()
        self._allocator.release([last])
        own = self._allocator.allocate(1)
        assert own is not None, "room is judged without hits"
        if own != [last]:  # else it was the last one to be evicted: ours now, bytes and all
            self._runner.pool.copy_block(last, own[0])
        return cached + own, num_tokens - 1

    def _release(self, attempt: PrefillAttempt | None, reason: str) -> None:
        if attempt is not None and not attempt.released:
            attempt.released = True
            self._agent.cancel(attempt.ticket.transfer_id, reason)

    def _end(self, attempt: PrefillAttempt, reason: Reason, message: str) -> None:
        """Tells the router that the attempt is lost, then lets it go."""
        self._report_end(attempt, reason, message)
        self._release(attempt, message)

    def _report_end(self, attempt: PrefillAttempt, reason: Reason, message: str) -> None:
        if attempt.released:
            return
        trace = attempt.ticket.traceparent
        self._publish_end(attempt.session, attempt.attempt, reason, message, trace)

    def _transfer_failed(self, transfer_id: str, detail: str) -> None:
        attempt = self._by_transfer.get(transfer_id)
        if attempt is not None:
            self._report_end(attempt, Reason.TRANSFER_FAILED, detail)
        self._forget(transfer_id)

    def _forget(self, transfer_id: str) -> None:
        """The transfer is over: nothing reads the blocks any more."""
        attempt = self._by_transfer.pop(transfer_id, None)
        if attempt is not None:
            del self._attempts[attempt.attempt]
            self._ended.add(attempt.attempt)
            self._allocator.release(attempt.blocks)

    def expire(self, now: float) -> None:
        for attempt in self._attempts.values():
            if now > attempt.deadline and not attempt.released:
                self._end(attempt, Reason.TIMEOUT, "the prefill deadline passed")
        self._continue_drain(now)

    def is_empty(self) -> bool:
        return not self._attempts

    def end_all(self, reason: Reason, message: str) -> None:
        for attempt in self._attempts.values():
            self._end(attempt, reason, message)

    # Steps

    def has_work(self) -> bool:
        return any(attempt.is_computing for attempt in self._attempts.values())

    def step(self) -> bool:
        chunks = plan_step(
            self._prompts(),
            token_budget=self._context.config.max_num_batched_tokens,
            scored_budget=MAX_SCORED_TOKENS,
            threshold=self._threshold,
            block_size=self._layout.block_size,
        )
        segments = [self._segment(chunk) for chunk in chunks]
        logits = self._runner.run(segments)
        # One part of the rows per chunk, which is empty for most.
        for chunk, rows in zip(chunks, torch.split(logits, [segment.num_logits for segment in segments]), strict=True):
            self._computed(self._attempts[chunk.attempt], chunk, rows)
        return True

    def _prompts(self) -> list[PromptView]:
        """What is left to compute, in order of arrival."""
        return [
            PromptView(a.attempt, len(a.token_ids), a.num_computed, a.num_prompt_logprobs is not None)
            for a in self._attempts.values()
            if a.is_computing
        ]

    def _computed(self, attempt: PrefillAttempt, chunk: Chunk, logits: torch.Tensor) -> None:
        attempt.num_computed += chunk.length
        self._cache_computed(attempt, chunk)
        if attempt.num_prompt_logprobs is not None and not self._publish_prompt_logprobs(attempt, chunk, logits):
            self._end_broken(attempt)
        elif attempt.is_computing:
            self._push_blocks(attempt, attempt.num_computed // self._layout.block_size)
        else:
            self._draw_first_tokens(attempt, logits[-1])

    def _cache_computed(self, attempt: PrefillAttempt, chunk: Chunk) -> None:
        """Offers the blocks that the chunk has completed to the prefix cache."""
        size = self._layout.block_size
        completed = slice(chunk.start // size, (chunk.start + chunk.length) // size)
        self._cache(attempt.blocks[completed], attempt.keys.complete[completed])

    def _publish_prompt_logprobs(self, attempt: PrefillAttempt, chunk: Chunk, logits: torch.Tensor) -> bool:
        """False where the logits are not finite."""
        assert attempt.num_prompt_logprobs is not None
        prompt_ids = attempt.token_ids[: attempt.num_prompt]
        scored = score_chunk(logits, prompt_ids, chunk.start, attempt.num_prompt_logprobs)
        if scored:
            start = chunk.start + 1 if chunk.start else 0
            self._publish(reports.PromptLogprobs(attempt.session, attempt.attempt, start, scored))
        return scored is not None

    def _draw_first_tokens(self, attempt: PrefillAttempt, logits: torch.Tensor) -> None:
        """All samples draw from the same row, that of the last token."""
        history = TokenHistory(attempt.token_ids, attempt.num_prompt)
        draws = [Draw(attempt.params, sample.index, history) for sample in attempt.samples]
        rows = logits.expand(len(draws), -1)
        tokens = draw_tokens(rows, draws, self._eos_token_ids, self._context.max_model_len)
        drawn = [token for token in tokens if token is not None]
        if len(drawn) == len(draws):
            self._hand_off(attempt, drawn)
        else:
            self._end_broken(attempt)

    def _end_broken(self, attempt: PrefillAttempt) -> None:
        self._forget_cached(attempt.keys)
        self._end(attempt, Reason.INTERNAL, "the model's logits are not finite")

    def _segment(self, chunk: Chunk) -> Segment:
        attempt = self._attempts[chunk.attempt]
        end = chunk.start + chunk.length
        return Segment(
            token_ids=attempt.token_ids[chunk.start : end],
            start=chunk.start,
            block_table=attempt.blocks,
            wants_logits=end == len(attempt.token_ids),
            wants_all_logits=attempt.num_prompt_logprobs is not None,
        )

    def _push_blocks(self, attempt: PrefillAttempt, upto: int) -> None:
        """Sends the blocks before `upto` that have not been sent; the next chunk is computed meanwhile."""
        if upto > attempt.num_sent:
            indices = range(attempt.num_sent, upto)
            self._agent.send(attempt.ticket.transfer_id, [(index, attempt.blocks[index]) for index in indices])
            attempt.num_sent = upto

    def _hand_off(self, attempt: PrefillAttempt, tokens: list[messages.Token]) -> None:
        """The first tokens go to the router at once and to the decode worker behind the last block."""
        self._publish(
            reports.FirstTokens(
                session=attempt.session,
                attempt=attempt.attempt,
                tokens=tokens,
                num_computed_tokens=len(attempt.token_ids) - attempt.num_cached,
            )
        )
        self._push_blocks(attempt, len(attempt.blocks))
        keys = attempt.keys.all_keys(attempt.token_ids)
        self._agent.finish(attempt.ticket.transfer_id, keys, encode_finish(tokens))

    def load(self) -> reports.Load:
        prompts = self._prompts()
        num_started = sum(attempt.is_computing and attempt.has_started for attempt in self._attempts.values())
        return load_report(
            self._allocator.counts,
            self._agent.stats(),
            num_running=num_started,
            num_waiting=len(prompts) - num_started,
            waiting_tokens=sum(prompt.num_left for prompt in prompts),
            tokens_ahead=tokens_ahead(prompts, self._threshold),
        )

    def check(self) -> None:
        if self.is_empty():
            self._allocator.check_idle()
        else:
            self._allocator.check()
