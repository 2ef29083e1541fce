"""`splitserve chat`: a conversation, from a terminal or from a pipe with one turn a line. Owns the conversation."""

import sys
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from splitserve.cli.generate import DEFAULT_CONNECTION, DEFAULT_SAMPLING, print_stream
from splitserve.cli.main import print_error
from splitserve.cli.options import Connection, Sampling
from splitserve.client.sync import Client
from splitserve.client.types import GenerateOptions, Message
from splitserve.service.config import Positive
from splitserve.service.errors import SplitserveError


def chat(
    *,
    system: str | None = None,
    max_tokens: Positive = 1024,
    sampling: Annotated[Sampling, Parameter(name="*")] = DEFAULT_SAMPLING,
    connection: Annotated[Connection, Parameter(name="*")] = DEFAULT_CONNECTION,
) -> None:
    """Talk with the model, turn by turn.

    In a terminal, Ctrl-C ends a running answer and leaves the turn out of the conversation; at the prompt, Ctrl-C or
    Ctrl-D ends the chat. From a pipe, every line is a turn.

    Parameters
    ----------
    system
        What the model is told before the first turn.
    max_tokens
        End each answer after this many tokens.
    """
    conversation: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    options = sampling.options(max_tokens, connection)
    with Client(connection.target) as client:
        for content in _turns():
            turn: Message = {"role": "user", "content": content}
            answer = _answer(client, [*conversation, turn], options)
            if answer is not None:
                conversation += [turn, {"role": "assistant", "content": answer}]


def _answer(client: Client, messages: list[Message], options: GenerateOptions) -> str | None:
    """The answer's text, printed as it arrives; None where a person at a terminal may try again."""
    try:
        with client.stream_chat(messages, **options) as stream:
            print_stream(stream)
            return stream.result().text
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except SplitserveError as error:
        if not sys.stdin.isatty():
            raise
        print_error(error)
    return None


def _turns() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401, line editing for input(), which finds it by itself

    while True:
        try:
            content = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if content:
            yield content
