"""A one-layer Llama with a byte-level or a SentencePiece vocabulary, converted within seconds."""

from pathlib import Path

import gguf
import numpy as np

from tests.models.reference_bpe import CHARACTER_BY_BYTE

MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "a b", "ab c", "Ġ 1", "Ð ¿", "Ġ Ġ"]
SPECIAL = ["<unk>", "<bos>", "<eos>", "<eot>"]
VOCABULARY = [*SPECIAL, *CHARACTER_BY_BYTE.values(), *(merge.replace(" ", "") for merge in MERGES)]
# A SentencePiece vocabulary of the same size: a word's start is marked with ▁, the best score merges first.
PIECES = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "▁b", "▁▁", "abc", "d", "e"]
CHAT_TEMPLATE = "{% for m in messages %}<bos>{{ m['role'] }}:{{ m['content'] }}<eot>{% endfor %}"
CONTEXT_LENGTH = 64
_HIDDEN, _HEADS, _KV_HEADS, _FEED_FORWARD = 32, 2, 1, 64


def write_tiny_gguf(
    path: Path,
    *,
    kind: str = "gpt2",
    pre: str | None = "smollm",
    adds_bos: bool | None = False,
    adds_space: bool | None = None,
) -> Path:
    """Writes random float32 weights (fixed seed) and a tokenizer as asked; None leaves a key out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(len(VOCABULARY))
    _add_vocabulary(writer, kind)
    _add_settings(writer, pre, adds_bos, adds_space)
    random = np.random.default_rng(0)
    for name, shape in _tensors().items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, kind: str) -> None:
    control, normal, byte = 3, 1, 6
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([control] * len(SPECIAL) + [normal] * (len(VOCABULARY) - len(SPECIAL)))
        writer.add_token_merges(MERGES)
    else:
        num_normal = len(PIECES) - len(SPECIAL) - 256
        writer.add_token_list(PIECES)
        writer.add_token_types([control] * len(SPECIAL) + [byte] * 256 + [normal] * num_normal)
        writer.add_token_scores([0.0] * (len(PIECES) - num_normal) + [-float(rank) for rank in range(num_normal)])


def _add_settings(writer: gguf.GGUFWriter, pre: str | None, adds_bos: bool | None, adds_space: bool | None) -> None:
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    if adds_space is not None:
        writer.add_add_space_prefix(adds_space)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors() -> dict[str, tuple[int, ...]]:
    kv = _HIDDEN // _HEADS * _KV_HEADS
    return {
        "token_embd.weight": (len(VOCABULARY), _HIDDEN),
        "output_norm.weight": (_HIDDEN,),
        "output.weight": (len(VOCABULARY), _HIDDEN),
        "blk.0.attn_norm.weight": (_HIDDEN,),
        "blk.0.ffn_norm.weight": (_HIDDEN,),
        "blk.0.attn_q.weight": (_HIDDEN, _HIDDEN),
        "blk.0.attn_k.weight": (kv, _HIDDEN),
        "blk.0.attn_v.weight": (kv, _HIDDEN),
        "blk.0.attn_output.weight": (_HIDDEN, _HIDDEN),
        "blk.0.ffn_gate.weight": (_FEED_FORWARD, _HIDDEN),
        "blk.0.ffn_up.weight": (_FEED_FORWARD, _HIDDEN),
        "blk.0.ffn_down.weight": (_HIDDEN, _FEED_FORWARD),
    }
