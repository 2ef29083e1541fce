"""The tokenizer stages that a GGUF only names and that its conversion drops.

A GGUF of a byte-level BPE model stores vocabulary and merges; the rest is a name (`tokenizer.ggml.pre`). The table
here holds what each name stands for, as the model's own `tokenizer.json` has it. A name that is not in the table is
refused: a model fed with wrongly cut text answers worse without any error. Called by `splitserve.models.convert`.
"""

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from splitserve.models.special_tokens import add_special_tokens

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class ByteLevelStages:
    """What comes before the merges of a byte-level BPE tokenizer.

    `pattern` None is the byte-level stage's built-in one (GPT-2's). `whole_words` takes a word that is in the
    vocabulary as it is, whatever the merges say. `adds_bos` is what holds where the file does not say.
    """

    digits_apart: bool = False
    pattern: str | None = None
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        stages: list[pre_tokenizers.PreTokenizer] = []
        if self.digits_apart:
            stages.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            stages.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(stages)


_PLAIN = ByteLevelStages()
_DIGITS = ByteLevelStages(digits_apart=True)
_LLAMA3_STAGES = ByteLevelStages(pattern=_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2_STAGES = ByteLevelStages(pattern=_QWEN2, composes=True)

STAGES_BY_NAME: dict[str, ByteLevelStages] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": ByteLevelStages(digits_apart=True, composes=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3_STAGES),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ByteLevelStages(pattern=_LLAMA3)),
    **dict.fromkeys(("qwen2", "stablelm2", "megrez"), _QWEN2_STAGES),
    "deepseek-r1-qwen": ByteLevelStages(pattern=_QWEN2),
    "tekken": ByteLevelStages(pattern=_TEKKEN, whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), ByteLevelStages(pattern=_GPT4O)),
}


@dataclass(frozen=True)
class GGUFTokenizerInfo:
    """What the file says beside vocabulary and merges; `kind` is `tokenizer.ggml.model`, None is absent."""

    kind: str
    pre: str | None
    adds_bos: bool | None
    adds_eos: bool | None
    adds_space: bool | None
    bos_token: str | None
    eos_token: str | None


def stages_for(info: GGUFTokenizerInfo) -> ByteLevelStages | None:
    """The stages the file names; None for a kind of tokenizer that has none (SentencePiece).

    Raises ValueError for a byte-level tokenizer whose stages are not named or not known.
    """
    if info.kind != "gpt2":
        return None
    if info.pre is None:
        raise ValueError("the file does not name its pre-tokenizer (tokenizer.ggml.pre): its text would be cut wrongly")
    try:
        return STAGES_BY_NAME[info.pre]
    except KeyError:
        known = ", ".join(sorted(STAGES_BY_NAME))
        raise ValueError(f"its pre-tokenizer {info.pre!r} is not known, only {known}") from None


def restore_stages(tokenizer: Tokenizer, info: GGUFTokenizerInfo) -> None:
    """Puts back, in place, what the conversion dropped: normalizer, pre-tokenizer, BOS and EOS. See `stages_for`."""
    stages = stages_for(info)
    adds_bos = info.adds_bos
    if stages is not None:
        tokenizer.pre_tokenizer = stages.pre_tokenizer()
        if stages.composes:
            tokenizer.normalizer = normalizers.NFC()
        if stages.whole_words and isinstance(tokenizer.model, BPE):
            tokenizer.model.ignore_merges = True
        if adds_bos is None:
            adds_bos = stages.adds_bos
    else:
        if info.adds_space is False:
            _keep_front_bare(tokenizer)
        if adds_bos is None:
            adds_bos = info.kind == "llama"
    add_special_tokens(tokenizer, info.bos_token if adds_bos else None, info.eos_token if info.adds_eos else None)


def _keep_front_bare(tokenizer: Tokenizer) -> None:
    """A SentencePiece tokenizer puts a space before a text and takes one off again, unless its file says not to."""
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
