"""What the engine keeps out of its start, torch's compiler, and that it is there for those who want it."""

import subprocess
import sys

# In processes of their own: this one has imported everything long ago.
LEAN = """
import sys, torch
is_available = torch.distributed.is_available
import decode_worker.flow, prefill_worker.flow, splitserve.worker.engine_process
for name in ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"):
    assert name not in sys.modules, f"{name} is imported at start"
assert torch.distributed.is_available is is_available
"""
AFTERWARDS = """
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
from torch._dynamo._trace_wrapped_higher_order_op import trace_wrapped
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).sum() == 4
"""
MEANWHILE = """
from splitserve.engine.transformers_api import without_compiler
with without_compiler():
    assert torch._dynamo.disable(len) is len
    assert "torch._dynamo.utils" not in sys.modules
    assert torch._dynamo.config.verbose is False
    import torch._dynamo.utils
assert torch._dynamo.utils.counters is not None
"""

NESTED = """
from splitserve.engine.transformers_api import without_compiler
with without_compiler():
    with without_compiler():
        pass
    assert torch._dynamo.disable(len) is len
assert "torch._dynamo" not in sys.modules
"""
BROKEN = """
class Broken:
    def find_spec(self, name, *_):
        if name == "torch._dynamo":
            raise ImportError("the compiler is broken")
sys.meta_path.insert(0, Broken())
try:
    with without_compiler():
        torch._dynamo.config
except ImportError as error:
    assert "the compiler is broken" in str(error)
else:
    raise AssertionError("imported")
"""


def _run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_compiler_is_imported_at_start_or_gone_afterwards() -> None:
    _run(LEAN + AFTERWARDS)


def test_code_that_wants_more_of_the_compiler_meets_a_stand_in() -> None:
    _run(LEAN + MEANWHILE)


def test_stand_ins_that_are_gone_hide_why() -> None:
    _run(LEAN + NESTED + BROKEN)
