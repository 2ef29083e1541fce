"""A model's size from its config alone: no weight is read or fetched."""

from dataclasses import dataclass
from pathlib import Path

from splitserve.engine import support
from splitserve.engine.checkpoint import read_config
from splitserve.engine.dry_run import require_paged
from splitserve.engine.layout import KVLayout
from splitserve.engine.shape import ModelShape, count_expert_weights, read_shape
from splitserve.engine.trust import SAFE
from splitserve.service.errors import InvalidRequest

_DTYPE = "bfloat16"
WEIGHT_NBYTES = 2


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """`shape` knows what a token computes and what its attention reads, `layout` what a block of the pool takes.
    `num_other_experts` are the weights of a mixture's experts that one token does not choose, over all layers."""

    num_parameters: int
    num_other_experts: int
    shape: ModelShape
    layout: KVLayout
    max_model_len: int

    @property
    def weight_nbytes(self) -> int:
        return self.num_parameters * WEIGHT_NBYTES

    @property
    def num_matmul(self) -> int:
        """Parameters in the matmuls of a token and of its logits: an embedding that is only looked up is in none."""
        return self.shape.num_weights + self.shape.num_head_weights

    def read_nbytes(self, num_tokens: int) -> int:
        """Bytes of weights that a forward of so many tokens reads; several choose all experts among them."""
        return WEIGHT_NBYTES * (self.num_matmul + (self.num_other_experts if num_tokens > 1 else 0))


def model_size(directory: Path, block_size: int) -> ModelSize:
    """Raises InvalidRequest, with the reason, for a model that the engine refuses by its config, and for one whose
    weights are quantized: what they take and how fast they are is up to what computes with them."""
    try:
        config = read_config(directory, SAFE)
        if method := support.quantization(config):
            raise InvalidRequest(
                f"the weights of {directory.name} are quantized ({method}); only those in {_DTYPE} are planned for",
                field="model",
            )
        num_heads, num_kv_heads, head_dim = support.attention_shape(config)
        layout = KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, block_size, _DTYPE)
        max_model_len = support.max_positions(config)
        model = require_paged(config, layout, num_heads, SAFE)
    except ValueError as error:
        raise InvalidRequest(str(error), field="model") from error
    in_experts, in_chosen = count_expert_weights(model)
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_other_experts=in_experts - in_chosen,
        shape=read_shape(model, layout, num_heads),
        layout=layout,
        max_model_len=max_model_len,
    )
