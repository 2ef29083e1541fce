"""A model's size from its config alone: no weight is read or fetched."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitserve.engine import support
from splitserve.engine.checkpoint import read_config
from splitserve.engine.layout import KVLayout
from splitserve.engine.shape import count_expert_weights
from splitserve.engine.transformers_api import AutoModelForCausalLM
from splitserve.engine.trust import SAFE
from splitserve.service.errors import InvalidRequest

WEIGHT_NBYTES = 2
_DTYPE = "bfloat16"


@dataclass(frozen=True)
class ModelSize:
    """Parameters by what a forward does with them. `num_matmul` are in the matmuls of a token, of a mixture of experts
    those of the experts that are chosen; the `num_head` among them meet only tokens whose logits are wanted. `num_read`
    are all that a large batch reads: without an embedding that is only looked up. Attention's own work is two matmuls
    of `attention_width` a layer."""

    num_parameters: int
    num_matmul: int
    num_head: int
    num_read: int
    num_layers: int
    attention_width: int
    kv_token_nbytes: int
    kv_block_nbytes: int
    block_size: int
    max_model_len: int

    @property
    def weight_nbytes(self) -> int:
        return self.num_parameters * WEIGHT_NBYTES


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
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_read = num_parameters - _num_looked_up(model)
    in_experts, in_chosen = count_expert_weights(model)
    head = model.get_output_embeddings()
    return ModelSize(
        num_parameters=num_parameters,
        num_matmul=num_read - in_experts + in_chosen,
        num_head=0 if head is None else head.weight.numel(),
        num_read=num_read,
        num_layers=config.num_hidden_layers,
        attention_width=num_heads * head_dim,
        kv_token_nbytes=layout.token_nbytes,
        kv_block_nbytes=layout.block_nbytes,
        block_size=block_size,
        max_model_len=max_model_len,
    )


def _num_looked_up(model: Any) -> int:
    """Of an embedding that is not the head as well."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is None or head.weight is embedding.weight
    return 0 if is_tied else int(embedding.weight.numel())
