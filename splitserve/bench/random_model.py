"""A model of random weights, made on the spot: a benchmark of speed and exactness needs no trained one, and no hub.

Written to a directory as any other model: config, safetensors, and a tokenizer that knows bytes only.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig

from splitserve.engine.transformers_api import AutoModelForCausalLM, transformers_logging

# As large as trained weights: the library's own would leave attention nearly uniform, and hide what is wrong with it.
_WEIGHT_SCALE = 1.4
_EMBEDDING_STD = 0.06  # small, so that the next token depends on more than the last one


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_model_len: int


SMALL = ModelSize(  # 0.7 billion parameters: enough to keep a GPU busy, and made in seconds
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=12,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32000,
    max_model_len=8192,
)
TINY = ModelSize(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=384,
    max_model_len=1024,
)


def write_random_model(directory: Path, size: ModelSize, device: torch.device) -> None:
    """Fills `directory`, which exists, with bfloat16 weights; made on `device`, whose kind they depend on."""
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=size.max_model_len,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                std = _EMBEDDING_STD if "embed" in name else _WEIGHT_SCALE * parameter.shape[-1] ** -0.5
                parameter.normal_(std=std, generator=generator)
    model.generation_config = GenerationConfig(pad_token_id=0)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    _byte_tokenizer().save(str(directory / "tokenizer.json"))


def _byte_tokenizer() -> Tokenizer:
    """One token per byte; the model's other ids have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
