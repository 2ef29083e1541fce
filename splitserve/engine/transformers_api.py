"""What the engine uses of transformers, imported without the parts of torch that transformers asks for in vain.

The compiler (dynamo) and sharded tensors take longer to import than torch itself: for decorators that name functions to
leave alone, for masks that paged attention never makes, for models that transformers spreads over processes. So the
engine's modules import transformers from here only.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import transformers.utils.import_utils as transformers_availability  # imports no torch, so no compiler either


class _StandIn(ModuleType):
    """In the place of a module of torch: has the little that is used of it without compiling anything. Whoever asks for
    more gets the real one."""

    asked_for_submodules = ""  # the name of what the import system asks a package for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != self.asked_for_submodules:
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Compiler(_StandIn):
    """Marks on functions, which without a compiler are functions like any other."""

    asked_for_submodules = "__path__"

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        return function if function is not None else lambda decorated: decorated

    assume_constant_result = allow_in_graph = disable


class _CompilerForMasks(_StandIn):
    class TransformGetItemToIndex:
        """The real one, imported when it is first made."""

        def __new__(cls) -> Any:
            return _real("torch._dynamo._trace_wrapped_higher_order_op").TransformGetItemToIndex()


_STAND_INS: dict[str, type[_StandIn]] = {
    "torch._dynamo": _Compiler,
    "torch._dynamo._trace_wrapped_higher_order_op": _CompilerForMasks,
}


def _real(name: str) -> ModuleType:
    if isinstance(sys.modules.get(name), _StandIn):
        del sys.modules[name]
    return import_module(name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """While it lasts, stand-ins are where torch's compiler would be, unless it has been imported already."""
    placed = {name: kind(name) for name, kind in _STAND_INS.items() if name not in sys.modules}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name, stand_in in placed.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


def _answer_that_torch_cannot_distribute() -> None:
    """transformers asks torch once and remembers the answer: it is made to ask now. Had it asked before, the start
    would take longer, no more."""
    asked = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        transformers_availability.is_torch_distributed_available()
    finally:
        torch.distributed.is_available = asked


_answer_that_torch_cannot_distribute()
with without_compiler():
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.pytorch_utils import Conv1D
    from transformers.utils import logging as transformers_logging

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoConfig",
    "AutoModelForCausalLM",
    "Conv1D",
    "no_init_weights",
    "transformers_logging",
    "without_compiler",
]
