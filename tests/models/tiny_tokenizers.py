"""Tokenizers of the two SentencePiece kinds, with vocabularies as small as they can be."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_fallback() -> Tokenizer:
    """A Llama-2-like one: words marked with ▁, bytes for what the vocabulary lacks, one space taken off the front."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeěй漢", "▁a", "▁▁"]
    merges = [("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Words marked with ▁, by a decoder of which nothing is known; one piece is the mark for broken text."""
    pieces = ["<unk>", "▁", *"abcdefgh", "▁a", "ab", "▁ab", "\ufffd"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer
