"""Where a step's time goes: a second, instrumented run, apart from the measured ones.

Hooks around the model's modules and around the attention function that transformers calls add up each kind's time. On a
GPU every piece is waited for, so that there the pieces together take longer than an undisturbed step.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from splitserve.bench.timing import Stopwatch, Task
from splitserve.engine.attention import INTERFACE_NAME
from splitserve.engine.runner import ModelRunner
from splitserve.engine.transformers_api import ALL_ATTENTION_FUNCTIONS

# In the order of a report. "glue" is rotary embeddings, activations, residuals and the model's own Python; "prepare" is
# checks, packing, the attention's plan, and what else happens around the model's forward.
PARTS = ("linear", "attention", "norms", "glue", "prepare")


class _Account:
    """Adds up milliseconds per part; parts do not nest, except that all lie within "forward"."""

    def __init__(self, watch: Stopwatch) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._watch = watch
        self._started: dict[str, float] = {}

    def start(self, part: str) -> None:
        self._started[part] = self._watch.now_ms()

    def stop(self, part: str) -> None:
        self.spent[part] += self._watch.now_ms() - self._started.pop(part)


def breakdown(runner: ModelRunner, step: Task, linear_names: Collection[str], stopwatch: Stopwatch) -> dict[str, float]:
    """Milliseconds of one `step` by part, all of `PARTS`; their sum is this run's whole time.

    `linear_names` are the modules that are linear layers by the model's own account, whatever a back end made of them.
    """
    account = _Account(stopwatch)
    with _watched_modules(runner.model, account, linear_names), _watched_attention(account):
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
def _watched_modules(model: nn.Module, account: _Account, linear_names: Collection[str]) -> Iterator[None]:
    handles: list[Any] = []

    def add(module: nn.Module, part: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda *_: account.start(part)))
        handles.append(module.register_forward_hook(lambda *_: account.stop(part)))

    add(model, "forward")
    for name, module in model.named_modules():
        if name in linear_names or isinstance(module, nn.Linear):
            add(module, "linear")
        elif type(module).__name__.endswith("Norm"):
            add(module, "norms")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watched_attention(account: _Account) -> Iterator[None]:
    """Everything between a layer's K and V and its attention's output: storing, reading, computing."""
    original: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[INTERFACE_NAME]

    def timed(*args: Any, **kwargs: Any) -> Any:
        account.start("attention")
        result = original(*args, **kwargs)
        account.stop("attention")
        return result

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, timed)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, original)
