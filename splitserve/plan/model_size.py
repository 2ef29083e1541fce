"""A model's size from its config alone: no weight is read or fetched."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitserve.engine import support
from splitserve.engine.checkpoint import read_config
from splitserve.engine.layout import KVLayout
from splitserve.engine.transformers_api import AutoModelForCausalLM
from splitserve.engine.trust import SAFE
from splitserve.service.errors import InvalidRequest

_WEIGHT_NBYTES = 2
_DTYPE = "bfloat16"
_EXPERTS = ".experts."


@dataclass(frozen=True)
class ModelSize:
    """`num_active` parameters take part in a token's matmuls: of a mixture of experts those of the experts chosen, and
    none of an embedding that is only looked up. Attention's own work is two matmuls of `attention_width` a layer."""

    num_parameters: int
    num_active: int
    num_layers: int
    attention_width: int
    kv_token_nbytes: int
    kv_block_nbytes: int
    block_size: int
    max_model_len: int

    @property
    def weight_nbytes(self) -> int:
        return self.num_parameters * _WEIGHT_NBYTES

    @property
    def active_nbytes(self) -> int:
        return self.num_active * _WEIGHT_NBYTES


def model_size(directory: Path, block_size: int) -> ModelSize:
    """Raises InvalidRequest for a model that is not served."""
    try:
        config = read_config(directory, SAFE)
        num_heads, num_kv_heads, head_dim = support.attention_shape(config)
        layout = KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, block_size, _DTYPE)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        max_model_len = support.max_positions(config)
    except ValueError as error:
        raise InvalidRequest(str(error), field="model") from error
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_active=_num_active(model, config),
        num_layers=config.num_hidden_layers,
        attention_width=num_heads * head_dim,
        kv_token_nbytes=layout.token_nbytes,
        kv_block_nbytes=layout.block_nbytes,
        block_size=block_size,
        max_model_len=max_model_len,
    )


def _num_active(model: Any, config: Any) -> int:
    """A tied embedding is the head, too, which is a matmul."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    only_looked_up = None if head is None or head.weight is embedding.weight else embedding.weight
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    share = chosen / experts if chosen and experts else 1.0
    active = 0.0
    for name, parameter in model.named_parameters():
        if parameter is not only_looked_up:
            active += parameter.numel() * (share if _EXPERTS in name else 1.0)
    return round(active)
