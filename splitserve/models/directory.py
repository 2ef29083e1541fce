"""Checks on a model directory before anything is loaded from it, and a name for its content. Never imports torch.

Called by `splitserve.models.locate`.
"""

import hashlib
import importlib.util
from pathlib import Path

from splitserve.models.description import read_json
from splitserve.service.errors import InvalidRequest

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_NUM_SAMPLES = 64
_SAMPLE_NBYTES = 4096


def check_directory(directory: Path, *, trust_remote_code: bool, allow_pickle: bool) -> None:
    """Raises `InvalidRequest` for a directory that cannot or must not be served, with the flag that would allow it."""
    config = read_json(directory / "config.json")
    if not trust_remote_code and needs_remote_code(config):
        raise InvalidRequest(
            f"{directory} brings its own code for model type {config.get('model_type')!r}, which is not run; "
            "--trust-remote-code allows it",
            reason="REMOTE_CODE_REFUSED",
            field="model",
        )
    _check_weights(directory, allow_pickle=allow_pickle)


def needs_remote_code(config: dict[str, object]) -> bool:
    """Whether a config points to code in its own repository that the installed transformers does not have itself."""
    if not config.get("auto_map"):
        return False
    package = str(config.get("model_type") or "").replace("-", "_").replace(".", "_")
    return not package.isidentifier() or importlib.util.find_spec(f"transformers.models.{package}") is None


def content_digest(directory: Path) -> str:
    """A name for what the directory holds: 16 hexadecimal digits, the same on every machine with the same files.

    Reads configuration and tokenizer whole, of each weight file its size and 64 spread samples: hashing all of a large
    model would take minutes at every start.
    """
    total = hashlib.sha256()
    for path in sorted(_content_files(directory)):
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                total.update(file.read())
                continue
            for position in _sample_positions(size):
                file.seek(position)
                total.update(file.read(_SAMPLE_NBYTES))
    return total.hexdigest()[:16]


def _check_weights(directory: Path, *, allow_pickle: bool) -> None:
    names = {path.name for path in directory.iterdir()}
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map") or {}
        if missing := sorted(set(shards.values()) - names):
            raise InvalidRequest(f"{directory} lacks {len(missing)} of its weight files: {missing[0]} …", field="model")
        return
    if any(name.endswith(".safetensors") for name in names):
        return
    pickled = sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES)
    if not pickled:
        raise InvalidRequest(f"{directory} has no *.safetensors weights", field="model")
    if not allow_pickle:
        raise InvalidRequest(
            f"{directory} has only pickled weights ({pickled[0]}), which can run code when loaded; "
            "--allow-pickle allows it",
            reason="PICKLE_REFUSED",
            field="model",
        )


def _content_files(directory: Path) -> list[Path]:
    read_whole = {"config.json", "generation_config.json", "tokenizer.json"}
    return [
        path
        for path in directory.iterdir()
        if path.name in read_whole or path.suffix == ".safetensors" or path.suffix in PICKLE_SUFFIXES
    ]


def _sample_positions(size: int) -> list[int]:
    last = max(size - _SAMPLE_NBYTES, 0)
    return sorted({last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)})
