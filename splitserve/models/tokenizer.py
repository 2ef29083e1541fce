"""Text to token ids and back, without torch: what the router needs of a model.

Ids are made here once and travel from then on. A `Tokenizer` holds no state of a request and may be used by several
threads at once; encoding a long text takes time, so never call it on an event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from splitserve.models.chat_template import ChatTemplate, special_tokens
from splitserve.models.description import read_json
from splitserve.models.detokenizer import DecodeStream, Detokenizer
from splitserve.models.special_tokens import add_special_tokens
from splitserve.service.errors import InvalidRequest
from splitserve.service.unicode import lone_surrogate

_MAX_TOKEN_ID = 2**32 - 1


class Tokenizer:
    """One model's tokenizer and chat template. Build it with `load`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._detokenizer = Detokenizer.for_tokenizer(tokenizer)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Reads `tokenizer.json` and the chat template. Raises `InvalidRequest` when the first is missing or broken."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequest(f"{directory} has no tokenizer.json", reason="NO_TOKENIZER", field="model")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
            _apply_settings(tokenizer, directory)
        except Exception as error:  # the library raises nothing narrower
            raise InvalidRequest(f"{path} cannot be used: {error}", field="model") from error
        return cls(tokenizer, ChatTemplate.load(directory))

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included; the model's logits may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template.source is not None

    def prepare_chat(self) -> None:
        """Spares the first conversation the time that it would take longer than the others; not for an event loop."""
        self._chat_template.prepare()

    def encode(self, text: str) -> list[int]:
        """The ids of a plain text, with the special tokens that the tokenizer itself puts around a text, once.

        Raises `InvalidRequest` (field `text`) for a text that is no valid Unicode.
        """
        return self._encode(text, field="text", adds_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins.

        The template writes the special tokens, so none are added. Raises `InvalidRequest` (field `messages`).
        """
        return self._encode(self._chat_template.render(messages), field="messages", adds_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, equal to what a stream over them gives in all. Ids that name no token give no text.

        Raises `InvalidRequest` for an id that cannot be one.
        """
        stream = self.decode_stream(skip_special_tokens)
        pieces = [stream.step(_checked(token_id)) for token_id in ids]
        return "".join(piece for piece in (*pieces, stream.flush()) if piece)

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        """A stream for one sample: feed every id once and in order, then `flush`."""
        return self._detokenizer.stream(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character."""
        return self._detokenizer.token_bytes(token_id)

    def _encode(self, text: str, *, field: str, adds_special_tokens: bool) -> list[int]:
        if (found := lone_surrogate(text)) is not None:
            message = f"{field} is no valid Unicode: a lone surrogate {found[1]}"
            raise InvalidRequest(message, reason="INVALID_UNICODE", field=field)
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special_tokens)[0].ids


def _apply_settings(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """What `tokenizer_config.json` says of special tokens wins, as in transformers. Nothing is ever cut or padded."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    adds_bos, adds_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if adds_bos is None and adds_eos is None:
        return
    names = special_tokens(directory)
    add_special_tokens(
        tokenizer, names.get("bos_token") if adds_bos else None, names.get("eos_token") if adds_eos else None
    )


def _checked(token_id: int) -> int:
    if not 0 <= token_id <= _MAX_TOKEN_ID:
        raise InvalidRequest(f"token id {token_id} is out of range", field="token_ids")
    return token_id
