"""A prefill and a decode engine in one process, joined by the loopback transport; the test plays the router.

Nothing runs by itself except the two KV threads: `turn` moves both engines by at most one step, so that a test decides
what happens between any two steps.
"""

import queue
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from decode_worker.flow import DecodeEngine
from kvtransfer.agent import KVAgent
from kvtransfer.carrier import Carrier
from kvtransfer.events import KVEvent
from kvtransfer.memory import MemoryHub
from kvtransfer.settings import KVSettings
from kvtransfer.store import BlockStore
from kvtransfer.ticket import Ticket
from prefill_worker.flow import PrefillEngine
from splitserve.engine.floor import Rates, StepFloor
from splitserve.engine.loading import load_runner
from splitserve.engine.pool import KVPool
from splitserve.engine.runner import ModelRunner
from splitserve.models.description import describe
from splitserve.worker import commands, messages, reports
from splitserve.worker.config import WorkerConfig
from splitserve.worker.engine_process import EngineLoop
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.kv import model_fingerprint
from splitserve.worker.reports import Report
from tests.compiled import KERNEL_FOLDER

PATIENCE_S = 60.0
RATES = Rates(bytes_per_s=2e9, flops_per_s=3e10)


class NoClock:
    """The loop wants a clock; here nobody watches it."""

    def beat(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...


@dataclass
class EngineRig:
    """One engine with its inbox and everything it has said."""

    engine: Any
    loop: EngineLoop
    agent: KVAgent
    runner: ModelRunner
    inbox: "queue.SimpleQueue[Any]"
    reports: list[Report] = field(default_factory=list)

    def said(self, kind: type[Any]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def allocator(self) -> Any:
        return self.engine._allocator


def limits(**changes: Any) -> messages.Limits:
    values: dict[str, Any] = {
        "seed": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop_token_ids": [],
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "prompt_logprobs": None,
    }
    return messages.Limits(**(values | changes))


class Pair:
    """`wrap` may put a fault-injecting carrier around the prefill side's, `make_store` something between a pool and its
    KV thread."""

    def __init__(
        self,
        directory: Path,
        *,
        prefill_blocks: int = 128,
        decode_blocks: int = 128,
        settings: KVSettings | None = None,
        wrap: Callable[[Carrier], Carrier] = lambda carrier: carrier,
        dtype: str = "float32",
        make_store: Callable[[KVPool], BlockStore] = lambda pool: pool,
        **config: Any,
    ) -> None:
        hub = MemoryHub()
        self._make_store = make_store
        self._settings = settings or KVSettings()
        self._config = WorkerConfig(model=str(directory), dtype=dtype, **config)
        self.prefill = self._rig("prefill", PrefillEngine, directory, prefill_blocks, wrap(hub.carrier()))
        self.decode = self._rig("decode", DecodeEngine, directory, decode_blocks, hub.carrier())
        self.prefill.inbox.put(commands.SetPeers({"decode": self.decode.agent.endpoint}))
        self.until(lambda: any(report.reachable for report in self.prefill.said(reports.LinkReport)))

    def _rig(
        self, worker_id: str, make: Callable[[EngineContext], Any], directory: Path, num_blocks: int, carrier: Carrier
    ) -> EngineRig:
        config = self._config
        block_nbytes = _block_nbytes(directory, config)
        runner = load_runner(
            directory,
            dtype=config.dtype,
            device="cpu",
            block_size=config.block_size,
            kv_cache_bytes=num_blocks * block_nbytes,
            kernel_folder=KERNEL_FOLDER,
        )
        description = describe(directory, "tiny", "r1")
        fingerprint = model_fingerprint("tiny", "r1", runner.layout)
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        on_event: Callable[[KVEvent], None] = inbox.put
        agent = KVAgent(
            worker_id=worker_id,
            fingerprint=fingerprint,
            store=self._make_store(runner.pool),
            carrier=carrier,
            settings=self._settings,
            on_event=on_event,
        )
        agent.start()
        published: list[Report] = []
        context = EngineContext(
            worker_id=worker_id,
            config=config,
            description=description,
            runner=runner,
            floor=StepFloor(runner.report.shape, RATES),
            agent=agent,
            fingerprint=fingerprint,
            publish=published.append,
            max_model_len=min(config.max_model_len or runner.max_model_len, runner.max_model_len),
        )
        engine = make(context)
        loop = EngineLoop(engine, published.append, inbox, NoClock())
        return EngineRig(engine, loop, agent, runner, inbox, published)

    def close(self) -> None:
        self.prefill.agent.close()
        self.decode.agent.close()

    # Moving

    def turn(self) -> None:
        """Both engines handle what has arrived and compute at most one step."""
        for rig in (self.prefill, self.decode):
            rig.loop.turn(wait_s=0.0)

    def until(self, condition: Callable[[], bool]) -> None:
        """Turns until `condition` holds; a test that waits for ever fails here."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, (
                f"still waiting; prefill said {self.prefill.reports[-3:]}, decode " + str(self.decode.reports[-3:])
            )
            self.turn()
            if not (self.prefill.engine.has_work() or self.decode.engine.has_work()):
                time.sleep(0.001)

    def until_alone(self, rig: EngineRig, condition: Callable[[], bool]) -> None:
        """Waits while only the KV threads and one engine move."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, "still waiting"
            rig.loop.turn(wait_s=0.0)
            time.sleep(0.001)

    # The router's part

    def reserve(
        self,
        prompt: Sequence[int],
        outputs: Sequence[int] = (),
        attempt: str = "",
        *,
        session: int = 1,
        timeout_s: float = 60.0,
        keep_s: float = 0.0,
        is_local: bool = False,
        **changes: Any,
    ) -> str:
        attempt = attempt or uuid.uuid4().hex
        start = _start(prompt, outputs, **changes)
        self.decode.inbox.put(commands.Reserve(session, attempt, start, timeout_s, keep_s=keep_s, is_local=is_local))
        return attempt

    def ticket(self, attempt: str) -> Ticket | None:
        """The last one given out for the attempt."""
        tickets = self.tickets(attempt)
        return tickets[-1] if tickets else None

    def tickets(self, attempt: str) -> list[Ticket]:
        return [report.ticket for report in self.decode.said(reports.Reserved) if report.attempt == attempt]

    def prefill_attempt(
        self,
        attempt: str,
        prompt: Sequence[int],
        outputs: Sequence[int] = (),
        *,
        leg: str = "",
        session: int = 1,
        timeout_s: float = 60.0,
        **changes: Any,
    ) -> None:
        """With the attempt's last ticket; `leg` is the prefill worker's name for its part of the attempt."""
        self.until(lambda: self.ticket(attempt) is not None)
        ticket = self.ticket(attempt)
        assert ticket is not None
        start = _start(prompt, outputs, **changes)
        self.prefill.inbox.put(commands.Prefill(session, leg or attempt, start, ticket, timeout_s))

    def begin(
        self,
        prompt: Sequence[int],
        outputs: Sequence[int] = (),
        *,
        session: int = 1,
        is_local: bool = False,
        **changes: Any,
    ) -> str:
        """`is_local`: decode computes the prompt itself."""
        attempt = self.reserve(prompt, outputs, session=session, is_local=is_local, **changes)
        if is_local:
            return attempt
        self.prefill_attempt(attempt, prompt, outputs, session=session, **changes)
        return attempt

    def tokens(self, attempt: str) -> list[messages.Token]:
        """What decode has said of the attempt, the first token included, which it repeats or has drawn itself."""
        firsts = [report for report in self.decode.said(reports.FirstTokens) if report.attempt == attempt]
        return [msgspec.structs.replace(t, attempt=attempt) for report in firsts for t in report.tokens] + [
            t for report in self.decode.said(reports.StepTokens) for t in report.tokens if t.attempt == attempt
        ]

    def is_finished(self, attempt: str) -> bool:
        return any(token.finish_reason for token in self.tokens(attempt))

    def endings(self, attempt: str) -> list[reports.AttemptEnded]:
        both = self.prefill.said(reports.AttemptEnded) + self.decode.said(reports.AttemptEnded)
        return [report for report in both if report.attempt == attempt]

    def generate(self, prompts: Sequence[Sequence[int]], **changes: Any) -> list[list[int]]:
        """All prompts at once; the output ids of each."""
        attempts = [self.begin(prompt, **changes) for prompt in prompts]
        self.until(lambda: all(map(self.is_finished, attempts)))
        return [[token.token_id for token in self.tokens(attempt)] for attempt in attempts]

    def assert_drained(self) -> None:
        """Nobody holds a block on either side, and both checkers hold."""
        self.until(lambda: all(rig.allocator.available == rig.allocator.counts.total for rig in self._rigs))
        for rig in self._rigs:
            rig.allocator.check_idle()

    @property
    def _rigs(self) -> tuple[EngineRig, EngineRig]:
        return (self.prefill, self.decode)


def _start(prompt: Sequence[int], outputs: Sequence[int], **changes: Any) -> messages.Start:
    return messages.Start(list(prompt), [messages.Sample(0, list(outputs))], limits(**changes))


def _block_nbytes(directory: Path, config: WorkerConfig) -> int:
    description = describe(directory, "tiny", "r1")
    itemsize = 4 if config.dtype == "float32" else 2
    per_token = description.num_layers * 2 * description.num_kv_heads * description.head_dim * itemsize
    return per_token * config.block_size
