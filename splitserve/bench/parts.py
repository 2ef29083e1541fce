"""Where a step's time goes: a second, instrumented run, apart from the measured ones.

Watched are the forwards of the model's modules, called as modules or directly, and the attention's plan: each kind's
time is added up. On a GPU every piece is waited for, so that there the pieces together take longer than an undisturbed
step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from splitserve.engine.attention import AttentionBackend, AttentionPlan
from splitserve.engine.packing import PackedBatch
from splitserve.engine.pool import KVPool
from splitserve.engine.runner import ModelRunner
from splitserve.engine.stopwatch import Stopwatch, Task

# In the order of a report. "glue" is rotary embeddings, activations, residuals (fused layers add one of two in a norm)
# and the model's own Python; "prepare" is checks, packing, the attention's plan, and what else happens around the
# model's forward.
PARTS = ("linear", "attention", "norms", "glue", "prepare")


class _Account:
    """Adds up milliseconds per part; parts do not nest, except that all lie within "forward"."""

    def __init__(self, watch: Stopwatch) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._watch = watch

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = self._watch.now_ms()
            result = function(*args, **kwargs)
            self.spent[part] += self._watch.now_ms() - started
            return result

        return call


def breakdown(runner: ModelRunner, step: Task, stopwatch: Stopwatch) -> dict[str, float]:
    """Milliseconds of one `step` by part, all of `PARTS`; their sum is this run's whole time."""
    account = _Account(stopwatch)
    with _watched_modules(runner, account), _watched_attention(runner, account):
        total = stopwatch.milliseconds(step)
    spent = account.spent
    inside = spent["linear"] + spent["attention"] + spent["norms"]
    return {
        "linear": spent["linear"],
        "attention": spent["attention"],
        "norms": spent["norms"],
        "glue": max(0.0, spent["forward"] - inside),
        "prepare": max(0.0, total - spent["forward"]),
    }


@contextmanager
def _watched_modules(runner: ModelRunner, account: _Account) -> Iterator[None]:
    modules = [(runner.model, "forward")]
    modules += [(module, "linear") for module in runner.linear.layers(runner.model)]
    modules += [(module, "norms") for module in runner.model.modules() if type(module).__name__.endswith("Norm")]
    try:
        for module, part in modules:
            vars(module)["forward"] = account.timed(part, module.forward)
        yield
    finally:
        for module, _ in modules:
            vars(module).pop("forward", None)


class _WatchedAttention:
    """A back end whose plans' work is timed: storing, reading, computing."""

    def __init__(self, backend: AttentionBackend, account: _Account) -> None:
        self.name = backend.name
        self._backend = backend
        self._account = account

    def plan(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> AttentionPlan:
        plan = self._backend.plan(batch, pool, num_heads)
        # On the plan itself: layers that know it call more of it than the contract has, and are to go on doing so.
        for name in ("store", "attend", "attend_merged"):
            if hasattr(plan, name):
                setattr(plan, name, self._account.timed("attention", getattr(plan, name)))
        return plan


@contextmanager
def _watched_attention(runner: ModelRunner, account: _Account) -> Iterator[None]:
    original = runner.attention
    runner.attention = _WatchedAttention(original, account)
    try:
        yield
    finally:
        runner.attention = original
