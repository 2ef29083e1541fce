"""A model's chat template: where it lies, and messages through it. Never imports torch.

Called by `splitserve.models.tokenizer`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from splitserve.models.description import read_json
from splitserve.service.errors import InvalidRequest

ROLES = ("system", "user", "assistant", "tool")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """`source` is None for a model without a template; `special_tokens` are the variables it may use."""

    source: str | None
    special_tokens: Mapping[str, str]

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Finds the template as transformers does: a file of its own, else in the tokenizer's configuration."""
        config = _json_if_there(directory / "tokenizer_config.json")
        own_file = directory / "chat_template.jinja"
        source = (
            own_file.read_text(encoding="utf-8") if own_file.is_file() else _default_of(config.get("chat_template"))
        )
        return cls(source, special_tokens(directory))

    def prepare(self) -> None:
        """Does what the first `render` would take longer for than the others."""
        if self.source is not None:
            with suppress(InvalidRequest):  # a template may refuse these messages and take others
                self.render([{"role": "user", "content": "Hello"}])

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text, with the opening of the assistant's answer. Raises `InvalidRequest` (field `messages`)."""
        if self.source is None:
            raise _invalid("this model has no chat template: send the prompt as text", "NO_CHAT_TEMPLATE")
        check_messages(messages)
        # Takes as long as half of a router's start, which needs none of it.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.source,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise _invalid(f"the model's chat template refuses these messages: {error}") from error
        return str(rendered[0])


def check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raises `InvalidRequest` naming the first message that is not a known role with a text."""
    if not messages:
        raise _invalid("messages is empty: at least one is needed")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _invalid(f"message {index} is a {type(message).__name__}, expected an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _invalid(f"message {index} has role {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise _invalid(f"message {index} has content of type {type(content).__name__}, expected a string")


def special_tokens(directory: Path) -> dict[str, str]:
    """The model's special tokens by name (`bos_token` …), as far as its tokenizer configuration names them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = _json_if_there(directory / name)
        for key in _SPECIAL_TOKENS:
            value = config.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[key] = content
    return found


def _default_of(template: object) -> str | None:
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _invalid(message: str, reason: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, reason=reason, field="messages")
