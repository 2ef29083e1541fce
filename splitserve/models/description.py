"""What the cluster has to know of a model before any weight is loaded. Reads JSON files, never imports torch.

Called by `splitserve.models.locate`; used by router and workers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.service.errors import InvalidRequest


@dataclass(frozen=True)
class ModelDescription:
    """One model at one revision, on this machine.

    `name` is what it is served as unless told otherwise, `revision` names its exact content, `vocab_size` counts the
    rows of its logits, `max_model_len` is in tokens. The `default_*` are the model's own sampling defaults, None where
    it states none. Several `eos_token_ids` may end a generation; there may be none.
    """

    name: str
    revision: str
    directory: Path
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    default_temperature: float | None
    default_top_p: float | None
    default_top_k: int | None
    default_min_p: float | None
    default_repetition_penalty: float | None


def describe(directory: Path, name: str, revision: str) -> ModelDescription:
    """Reads `config.json` and, where there is one, `generation_config.json`.

    Raises `InvalidRequest` naming the file and key that is missing or makes no sense.
    """
    config = read_json(directory / "config.json")
    text = _Keys(directory / "config.json", config.get("text_config") or config)
    path = directory / "generation_config.json"
    generation = _Keys(path, read_json(path) if path.is_file() else {})
    num_heads = text.integer("num_attention_heads", "n_head", "num_heads")
    return ModelDescription(
        name=name,
        revision=revision,
        directory=directory,
        architecture=_architecture(directory, config),
        vocab_size=text.integer("vocab_size"),
        max_model_len=text.integer("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
        eos_token_ids=generation.token_ids("eos_token_id") or text.token_ids("eos_token_id"),
        bos_token_id=next(iter(generation.token_ids("bos_token_id") or text.token_ids("bos_token_id")), None),
        num_layers=text.integer("num_hidden_layers", "n_layer", "num_layers"),
        num_kv_heads=text.integer("num_key_value_heads", default=num_heads),
        head_dim=text.integer("head_dim", default=0) or text.integer("hidden_size", "n_embd") // num_heads,
        default_temperature=generation.number("temperature"),
        default_top_p=generation.number("top_p"),
        default_top_k=generation.optional_integer("top_k"),
        default_min_p=generation.number("min_p"),
        default_repetition_penalty=generation.number("repetition_penalty"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `InvalidRequest` when it is missing, broken or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(f"{path.parent} is not a model directory: it has no {path.name}", field="model") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds a {type(content).__name__}, not an object", field="model")
    return content


def _architecture(directory: Path, config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [config.get("model_type")]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise InvalidRequest(f"{directory / 'config.json'} names neither architectures nor model_type", field="model")
    return architectures[0]


@dataclass(frozen=True)
class _Keys:
    """Typed access to one JSON file, with errors that name it."""

    path: Path
    values: Mapping[str, Any]

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is set; the model families spell them differently."""
        for key in keys:
            if (value := self.optional_integer(key)) is not None:
                if value < 1:
                    raise InvalidRequest(f"{self.path}: {key} is {value}, not positive", field="model")
                return value
        if default is None:
            raise InvalidRequest(f"{self.path} has no {keys[0]}", field="model")
        return default

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{self.path}: {key} is {value!r}, not an integer", field="model")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(f"{self.path}: {key} is {value!r}, not a number", field="model")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            raise InvalidRequest(f"{self.path}: {key} is {value!r}, not a token id or a list of them", field="model")
        # Some configurations say -1 for "none".
        return tuple(token_id for token_id in ids if token_id >= 0)
