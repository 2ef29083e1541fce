"""BOS and EOS around a plain text: the last stage of a tokenizer, built from two settings."""

from tokenizers import Tokenizer, processors


def add_special_tokens(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `tokenizer` put `bos` before and `eos` behind every text, in place; None: nothing there.

    Raises ValueError for a token that is not in the vocabulary.
    """
    ids: list[tuple[str, int]] = []
    for token in dict.fromkeys(token for token in (bos, eos) if token is not None):
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"special token {token!r} is not in the vocabulary")
        ids.append((token, token_id))
    around = [*([] if bos is None else [bos]), "$A", *([] if eos is None else [eos])]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
