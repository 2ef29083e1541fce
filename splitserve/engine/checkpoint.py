"""A model directory as transformers reads it: its config, its weights, and a small random model of the same kind.

Called by the loader; keeps no state. Nothing is fetched, and code or pickles run only as `Trust` says.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from splitserve.engine import support
from splitserve.engine.attention import INTERFACE_NAME
from splitserve.engine.pool import DTYPES
from splitserve.engine.support import UnsupportedModel
from splitserve.engine.transformers_api import (
    AutoConfig,
    AutoModelForCausalLM,
    no_init_weights,
    transformers_logging,
    without_compiler,
)
from splitserve.engine.trust import Trust


def read_config(directory: Path, trust: Trust) -> Any:
    """transformers' config. UnsupportedModel where there is none that it can read, or one of a model not served."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust.remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModel(f"no usable model config in {directory}: {error}") from error
    support.require_supported(config)
    return config


def empty_model(config: Any, trust: Trust) -> Any:
    """The model in bfloat16 on torch's device without memory: modules and shapes. UnsupportedModel where transformers
    cannot make one of the config."""
    try:
        with torch.device("meta"), no_init_weights(), without_compiler():
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # what is then set in the model's is not for others
                dtype=torch.bfloat16,
                attn_implementation=INTERFACE_NAME,
                trust_remote_code=trust.remote_code,
            )
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"transformers makes no {config.model_type} of this config: {error}") from error
    model.tie_weights()
    return model.eval()


def random_copy(config: Any, trust: Trust, *, vocab_size: int, window: int) -> Any:
    """A model in float32 of two of the config's layers, with weights as large as trained ones; the same each time."""
    small = support.two_layer_copy(config, vocab_size=vocab_size, window=window)
    with torch.random.fork_rng(devices=[]), without_compiler():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=INTERFACE_NAME, trust_remote_code=trust.remote_code
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    # The library's own weights would leave attention nearly uniform and hide a wrong scaling or mask.
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def load_weights(directory: Path, config: Any, dtype: str, device: str, trust: Trust) -> Any:
    """The model with its weights in `dtype` on `device`. UnsupportedModel if some are missing or cannot be read."""
    transformers_logging.disable_progress_bar()
    try:
        with without_compiler():
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=INTERFACE_NAME,
                # None takes what is there, safetensors before pickle; torch reads pickles by its list of safe types.
                use_safetensors=None if trust.pickle else True,
                trust_remote_code=trust.remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"cannot load weights from {directory}: {error}") from error
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise UnsupportedModel(f"{directory} lacks weights that the model needs: {', '.join(absent[:5])}")
    return model.eval().to(device)


def load_by_name(directory: Path, config: Any, dtype: str, trust: Trust) -> Any | None:
    """The model in host memory, every tensor of its files in the place of that name; in a tenth of the time that
    transformers takes, which can also rename, convert, merge and split. None where names, shapes or dtypes do not fit.

    `have_same_tensors` tells whether it is what transformers makes of these files.
    """
    try:
        with no_init_weights(), without_compiler(), _EmptyWithoutMemory():
            model = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[dtype], attn_implementation=INTERFACE_NAME, trust_remote_code=trust.remote_code
            )
        stored: dict[str, torch.Tensor] = {}
        for path in _safetensors_files(directory):
            stored |= load_file(path)
        model.tie_weights()
        tied = model.state_dict().keys() - _tensors(model).keys()
        places = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        if {name: _kind(tensor) for name, tensor in stored.items()} != {
            name: _kind(tensor) for name, tensor in places.items()
        }:
            return None
        model.load_state_dict(stored, assign=True, strict=False)
        model.tie_weights()
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError):
        return None
    return model.eval()


class _EmptyWithoutMemory(TorchFunctionMode):
    """What is made to be filled later gets no memory: even untouched, a tensor in huge pages takes time to make."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return function(*args, **{**kwargs, "device": "meta"} if function is torch.empty else kwargs)


def have_same_tensors(model: Any, other: Any) -> bool:
    """Whether two models have equal parameters and buffers by the same names, and the same of them tied together."""
    ours, theirs = _tensors(model), _tensors(other)
    return ours.keys() == theirs.keys() and all(
        _kind(tensor) == _kind(theirs[name]) and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, saved or not; each once, whatever is tied to it."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _safetensors_files(directory: Path) -> list[Path]:
    """The files that transformers reads where there are such; an error where there are none."""
    if (single := directory / "model.safetensors").is_file():
        return [single]
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return [directory / name for name in sorted(set(index["weight_map"].values()))]
