"""Answers as clients tell them, brought to one form, so that those of two edges and of two ways can be compared."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion

from router.openai.token_texts import TokenTexts
from splitserve import Client
from splitserve.client.types import Generation, TokenLogprobs
from splitserve.models.tokenizer import Tokenizer


@dataclass
class Choice:
    """One sample. Of tokens their texts, and the logprobs of the likeliest in their place by text."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Told:
    choices: list[Choice]
    num_prompt_tokens: int
    num_tokens: int


def assert_same(told: Told, expected: Told) -> None:
    """The protobuf contract has logprobs in single precision."""
    assert [_exact(choice) for choice in told.choices] == [_exact(choice) for choice in expected.choices]
    for choice, other in zip(told.choices, expected.choices, strict=True):
        assert choice.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for top, others in zip(choice.top, other.top, strict=True):
            assert top == pytest.approx(others, abs=1e-4)
    assert (told.num_prompt_tokens, told.num_tokens) == (expected.num_prompt_tokens, expected.num_tokens)


def _exact(choice: Choice) -> tuple[Any, ...]:
    return (choice.text, choice.tokens, choice.finish_reason, choice.stop_reason)


def over_grpc(client: Client, tokenizer: Tokenizer, prompt: Any, *, is_stream: bool, **options: Any) -> Told:
    """A string is a text, other prompts are as the client library has them."""
    if not is_stream:
        return of_generation(client.generate(prompt, **options), tokenizer)
    with client.stream(prompt, **options) as stream:
        texts: dict[int, str] = {}
        for chunk in stream:
            texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        answer = stream.result()
    assert texts == {index: sample.text for index, sample in enumerate(answer.samples)}
    return of_generation(answer, tokenizer)


def of_generation(answer: Generation, tokenizer: Tokenizer) -> Told:
    names = TokenTexts(tokenizer)
    choices = [
        Choice(
            sample.text,
            [names.text(token_id) for token_id in sample.token_ids],
            [entry.logprob for entry in sample.logprobs],
            [_top(entry, names) for entry in sample.logprobs],
            sample.finish_reason,
            sample.matched_stop,
        )
        for sample in answer.samples
    ]
    return Told(choices, answer.prompt_tokens, answer.completion_tokens)


def _top(entry: TokenLogprobs, names: TokenTexts) -> dict[str, float]:
    return first_of((names.text(token_id), logprob) for token_id, logprob in entry.top.items())


def first_of(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, logprob in pairs:
        found.setdefault(name, logprob)
    return found


def split_options(method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's client has no name for goes into the body beside the rest."""
    own = inspect.signature(method).parameters
    extra = {name: value for name, value in options.items() if name not in own}
    return {name: value for name, value in options.items() if name in own} | {"extra_body": extra}


def completion(openai: OpenAI, prompt: Any, *, is_stream: bool, **options: Any) -> Told:
    """Text completions, with all choices of all prompts."""
    create = openai.completions.create
    given = split_options(create, {"model": "llama", "prompt": prompt, **options})
    if not is_stream:
        return of_completions([create(**given)])
    return of_completions(create(stream=True, stream_options={"include_usage": True}, **given))


def of_completions(replies: Iterable[Completion]) -> Told:
    """A whole answer, or the chunks of one with usage at its end."""
    choices: dict[int, Choice] = {}
    usage = None
    for reply in replies:
        usage = usage or reply.usage
        for each in reply.choices:
            choice = choices.setdefault(each.index, Choice())
            assert choice.finish_reason is None, "something comes after the end"
            choice.text += each.text
            if each.logprobs is not None:
                choice.tokens += each.logprobs.tokens or []
                choice.logprobs += each.logprobs.token_logprobs or []
                choice.top += each.logprobs.top_logprobs or []
            _end(choice, each)
    return _told(choices, usage)


def chat(openai: OpenAI, messages: Sequence[Any], *, is_stream: bool, **options: Any) -> Told:
    create = openai.chat.completions.create
    given = split_options(create, {"model": "llama", "messages": messages, **options})
    choices: dict[int, Choice] = {}
    if not is_stream:
        whole = create(**given)
        for each in whole.choices:
            choice = choices.setdefault(each.index, Choice(each.message.content))
            assert each.message.role == "assistant"
            _add_chat_logprobs(choice, each)
            _end(choice, each)
        return _told(choices, whole.usage)
    usage = None
    for chunk in create(stream=True, stream_options={"include_usage": True}, **given):
        assert usage is None, "something comes after the usage"
        usage = chunk.usage
        for each in chunk.choices:
            assert (each.delta.role == "assistant") is (each.index not in choices), "the role is not in the first chunk"
            choice = choices.setdefault(each.index, Choice())
            assert choice.finish_reason is None, "something comes after the end"
            choice.text += each.delta.content or ""
            _add_chat_logprobs(choice, each)
            _end(choice, each)
    return _told(choices, usage)


def _add_chat_logprobs(choice: Choice, each: Any) -> None:
    for entry in each.logprobs.content if each.logprobs is not None else ():
        choice.tokens.append(entry.token)
        choice.logprobs.append(entry.logprob)
        choice.top.append(first_of((top.token, top.logprob) for top in entry.top_logprobs))


def _end(choice: Choice, each: Any) -> None:
    choice.finish_reason = each.finish_reason
    choice.stop_reason = getattr(each, "stop_reason", None)


def _told(choices: dict[int, Choice], usage: Any) -> Told:
    assert sorted(choices) == list(range(len(choices)))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return Told([choices[index] for index in sorted(choices)], usage.prompt_tokens, usage.completion_tokens)
