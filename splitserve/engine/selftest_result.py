"""Self-tests that this machine has passed: what came out of one, kept for the next start of the same thing.

Called by the loader. A result is named by everything that could change its outcome, except the weights; for those its
`numerics` stand, which the loader computes anew at every start and compares.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

_LIBRARIES = ("torch", "transformers", "numba", "numpy")
# Variables by which these libraries choose how they compute.
_SETTINGS = ("ATEN_", "CUBLAS_", "DNNL_", "KMP_", "MKL_", "NUMBA_", "NVIDIA_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")


@dataclass(frozen=True)
class SelfTestResult:
    """`numerics` names how this process rounds: a hash of fixed logits. `inexact_reason` says why a token's K, V and
    logits may be other bits alone, in a batch and in chunks; it is empty where they are the same as long as no forward
    has fewer rows than `min_rows`. `loads_by_name` says that transformers did nothing to the weights but put them into
    their places."""

    min_rows: int
    numerics: str
    inexact_reason: str
    loads_by_name: bool = False

    @classmethod
    def untested(cls, min_rows: int) -> "SelfTestResult":
        return cls(min_rows, numerics="", inexact_reason="not tested")

    @property
    def recompute_exact(self) -> bool:
        return not self.inexact_reason


def result_name(directory: Path, device: str, **choices: object) -> str:
    """The name of a self-test's outcome: model code and config in `directory`, our code, the libraries and their
    settings, the processor, and the loader's `choices`."""
    facts = {
        "model": _digest([directory / "config.json", *sorted(directory.glob("*.py"))]),
        "engine": _engine_digest(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "processor": torch.cpu.get_capabilities(),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device,
        "threads": torch.get_num_threads(),
        "choices": choices,
    }
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ResultFolder:
    """Where the result called `name` is kept; without a folder nothing is."""

    folder: Path | None
    name: str

    def recall(self) -> SelfTestResult | None:
        """The result, or None where there is none that can be read."""
        if self.folder is None:
            return None
        try:
            return SelfTestResult(**json.loads((self.folder / self.name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def remember(self, result: SelfTestResult) -> None:
        """Keeps `result`, whole or not at all. Without a folder to write to the next start takes its time, no more."""
        if self.folder is None or self.recall() == result:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.folder, prefix=".", delete=False, encoding="utf-8") as file:
                json.dump(asdict(result), file)
            os.replace(file.name, self.folder / self.name)


@cache
def _engine_digest() -> str:
    return _digest(sorted(Path(__file__).parent.rglob("*.py")))


def _digest(paths: Iterable[Path]) -> str:
    total = sha256()
    for path in paths:
        content = path.read_bytes()
        total.update(f"{path.name} {len(content)}\n".encode() + content)
    return total.hexdigest()
