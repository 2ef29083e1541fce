"""Byte-pair encoding written from its definition: what the converted tokenizers are compared with.

Shares no code with the tokenizers library: splits with the `regex` module, merges the lowest rank first.
"""

import itertools
from collections.abc import Mapping, Sequence

import regex

_GPT2_PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_DIGIT = regex.compile(r"(\p{N})")


def _character_by_byte() -> dict[int, str]:
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return {byte: chr(byte) if byte in kept else chr(next(shifted)) for byte in range(256)}


CHARACTER_BY_BYTE = _character_by_byte()


def gpt2_pieces(text: str) -> list[str]:
    """The pieces that GPT-2 encodes one by one."""
    return [match.group() for match in _GPT2_PIECES.finditer(text)]


def pieces_with_single_digits(text: str) -> list[str]:
    """Every numeral apart from all else, then GPT-2's pieces of what is between them."""
    return [piece for part in _DIGIT.split(text) for piece in gpt2_pieces(part)]


def encode(pieces: Sequence[str], merges: Sequence[tuple[str, str]], ids: Mapping[str, int]) -> list[int]:
    """The token ids of text cut into `pieces`; `merges` are in the order of their rank."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    return [ids[symbol] for piece in pieces for symbol in _merge(_symbols(piece, ids), ranks)]


def _symbols(piece: str, ids: Mapping[str, int]) -> list[str]:
    """One symbol per byte; a byte that the vocabulary lacks is dropped (the default model's lacks 21)."""
    return [symbol for symbol in (CHARACTER_BY_BYTE[byte] for byte in piece.encode("utf-8")) if symbol in ids]


def _merge(symbols: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    while True:
        pairs = [pair for pair in itertools.pairwise(symbols) if pair in ranks]
        if not pairs:
            return symbols
        best = min(pairs, key=ranks.__getitem__)
        merged: list[str] = []
        for symbol in symbols:
            if merged and (merged[-1], symbol) == best:
                merged[-1] += symbol
            else:
                merged.append(symbol)
        symbols = merged
