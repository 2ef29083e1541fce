"""A model directory as transformers reads it: its config, its weights, and a small random model of the same kind.

Called by the loader; keeps no state. Nothing is fetched, and code or pickles run only as `Trust` says.
"""

from pathlib import Path
from typing import Any

import torch

from splitserve.engine import support
from splitserve.engine.attention import INTERFACE_NAME
from splitserve.engine.pool import DTYPES
from splitserve.engine.support import UnsupportedModel
from splitserve.engine.transformers_api import AutoConfig, AutoModelForCausalLM, transformers_logging, without_compiler
from splitserve.engine.trust import Trust


def read_config(directory: Path, trust: Trust) -> Any:
    """transformers' config. UnsupportedModel where there is none that it can read, or one of a model not served."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust.remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"no usable model config in {directory}: {error}") from error
    support.require_supported(config)
    return config


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
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"cannot load weights from {directory}: {error}") from error
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise UnsupportedModel(f"{directory} lacks weights that the model needs: {', '.join(absent[:5])}")
    return model.eval().to(device)
