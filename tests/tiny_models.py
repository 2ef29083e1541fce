"""Tiny random models of many families, for tests: config, float32 safetensors, generation config and a tokenizer.

Called by tests of the engine, of the model description and of whole clusters. Weights depend on (family, overrides,
seed) only, so two processes building the same model get the same bytes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "granite",
    "olmo2",
    "starcoder2",
    "gpt_neox",
    "mixtral",
]
REFUSED = ["llama4_text", "bloom", "mamba"]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 2
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": BOS_TOKEN_ID,
}

# What makes the family more than a Llama; windows are shorter than the prompts of the tests.
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 20, "head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 28},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "olmo2": {},
    "starcoder2": {"sliding_window": 20, "use_bias": True},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    "llama4_text": {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 32},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 8, "expand": 2, "time_step_rank": 4},
}

_DROPPED: dict[str, set[str]] = {
    "bloom": {"intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"},
    "mamba": {"intermediate_size", "num_attention_heads", "num_key_value_heads"},
    "gpt_neox": {"num_key_value_heads"},
}


def build(family: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Writes a random model of `family` into `directory` and returns it; `overrides` are config fields."""
    common = {name: value for name, value in _COMMON.items() if name not in _DROPPED.get(family, set())}
    config = AutoConfig.for_model(family, **{**common, **_SPECIFIC[family], **overrides})
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            _randomize(model)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID, pad_token_id=BOS_TOKEN_ID
    )
    model.save_pretrained(directory)
    return directory


def _randomize(model: torch.nn.Module) -> None:
    """Larger weights than the library's, and no zero biases: outputs vary, and every parameter matters."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        elif "embed" in name:
            parameter.normal_(std=0.06)  # small: a tied head must not just echo the last token
        else:
            parameter.normal_(std=1.4 / parameter.shape[-1] ** 0.5)


def add_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Writes a byte-level BPE tokenizer of at most `vocab_size` ids and a ChatML template into `directory`."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)}, not {vocab_size}")
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(first, second) for first in letters for second in letters][: vocab_size - len(vocab)]
    for first, second in pairs:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
