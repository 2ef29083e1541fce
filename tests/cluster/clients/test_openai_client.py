"""OpenAI's own client against real processes: each option, and answers that are those of one process and of gRPC."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from splitserve.models.tokenizer import Tokenizer
from tests.cluster.clients.one_process import NUM_TOP, of_one_process
from tests.cluster.clients.told import assert_same, chat, completion, over_grpc
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy, logits
from tests.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]

PROMPT = "the rain in spain stays mainly in the plain; 12 čtverců"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# By the tiny tokenizer's ids: a to f, so that what is drawn is text in which a stop string turns up soon.
FEW_LETTERS = {str(token_id): 100 for token_id in range(67, 73)}

SETS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY | {"max_tokens": 12},
    "drawn": {"seed": 5, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "max_tokens": 20},
    "penalties": {
        "seed": 6, "temperature": 0.7, "presence_penalty": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.3,
        "ignore_eos": True, "max_tokens": 20,
    },
    "bias and min_tokens": {
        "seed": 7, "temperature": 1, "logit_bias": {str(EOS_TOKEN_ID): 5, "50": 3}, "min_tokens": 6, "max_tokens": 30,
    },
    "stop token": {
        "seed": 8, "temperature": 1, "logit_bias": FEW_LETTERS, "stop_token_ids": [72], "min_tokens": 3,
        "max_tokens": 60, "ignore_eos": True,
    },
    "stop string": {
        "seed": 9, "temperature": 1, "logit_bias": FEW_LETTERS, "stop": ["ace", "dc"], "max_tokens": 60,
        "ignore_eos": True, "n": 2,
    },
    "samples": {"seed": 10, "temperature": 1.1, "n": 3, "max_tokens": 15, "logit_bias": {str(EOS_TOKEN_ID): 4}},
}  # fmt: skip


@pytest.mark.parametrize("options", SETS.values(), ids=SETS)
def test_edge_or_stream_changes_the_answer(
    options: dict[str, Any], served: Cluster, openai: OpenAI, tokenizer: Tokenizer, tiny: Tiny
) -> None:
    """C10, C16, C18, C58: gRPC and HTTP, streams and whole, text and ids: one answer, that of one process."""
    ids = tokenizer.encode(PROMPT)
    expected = of_one_process(tiny("llama"), tokenizer, ids, options)
    for_grpc = options | {"logit_bias": {int(key): value for key, value in options.get("logit_bias", {}).items()}}
    for is_stream in (False, True):
        assert_same(
            over_grpc(served.client, tokenizer, PROMPT, is_stream=is_stream, logprobs=NUM_TOP, **for_grpc), expected
        )
        for prompt in (PROMPT, ids):
            assert_same(completion(openai, prompt, is_stream=is_stream, logprobs=NUM_TOP, **options), expected)


@pytest.mark.parametrize("options", SETS.values(), ids=SETS)
def test_chat_is_another_prompt_or_loses_options(
    options: dict[str, Any], served: Cluster, openai: OpenAI, tokenizer: Tokenizer
) -> None:
    """As above: what comes of the same ids as a text completion, with the newer name of max_tokens."""
    expected = completion(openai, tokenizer.encode_chat(MESSAGES), is_stream=False, logprobs=NUM_TOP, **options)
    for_grpc = options | {"logit_bias": {int(key): value for key, value in options.get("logit_bias", {}).items()}}
    options = dict(options)
    options["max_completion_tokens"] = options.pop("max_tokens")
    for is_stream in (False, True):
        assert_same(
            over_grpc(served.client, tokenizer, MESSAGES, is_stream=is_stream, logprobs=NUM_TOP, **for_grpc), expected
        )
        assert_same(
            chat(openai, MESSAGES, is_stream=is_stream, logprobs=True, top_logprobs=NUM_TOP, **options), expected
        )


@pytest.mark.parametrize("endpoint", ["text", "chat"])
def test_options_together_reach_the_prefill_leg(endpoint: str, openai: OpenAI, tokenizer: Tokenizer) -> None:
    """C58: prefill makes one token whatever is asked for; decode sees the values as they were sent."""
    options: dict[str, Any] = GREEDY | {
        "n": 2, "min_tokens": 100, "stop": ["\n\n\n"], "user": "someone", "response_format": {"type": "text"},
    }  # fmt: skip
    if endpoint == "text":
        answers = [
            completion(openai, PROMPT, is_stream=is_stream, max_tokens=120, logprobs=0, best_of=1, **options)
            for is_stream in (False, True)
        ]
        echoed = completion(openai, PROMPT, is_stream=True, max_tokens=120, logprobs=0, echo=True, **options)
        assert [each.text for each in echoed.choices] == [PROMPT + each.text for each in answers[0].choices]
    else:
        answers = [
            chat(openai, MESSAGES, is_stream=is_stream, max_completion_tokens=120, logprobs=True, **options)
            for is_stream in (False, True)
        ]
    assert_same(*answers)
    assert 200 <= answers[0].num_tokens == sum(len(each.tokens) for each in answers[0].choices) <= 240


def test_several_prompts_or_samples_are_mixed_up(openai: OpenAI) -> None:
    """C65: of each prompt its own samples, with the indices that the API gives them, and each prompt is billed once."""
    prompts = [prompt_of(length, 7) for length in (5, 40, 70)]
    options = {"seed": 3, "temperature": 1, "n": 2, "max_tokens": 9, "ignore_eos": True, "logprobs": 1}
    each = [completion(openai, prompt, is_stream=False, **options) for prompt in prompts]
    for is_stream in (False, True):
        together = completion(openai, prompts, is_stream=is_stream, **options)
        assert together.choices == [choice for told in each for choice in told.choices]
        assert (together.num_prompt_tokens, together.num_tokens) == (115, 54)


def test_echoed_prompt_or_its_logprobs_differ_from_the_model(
    served: Cluster, openai: OpenAI, tokenizer: Tokenizer, tiny: Tiny
) -> None:
    """C10, C63: also where all tokens but one are ruled out."""
    ids = tokenizer.encode(PROMPT)
    options = {"temperature": 1, "seed": 4, "max_tokens": 4, "logprobs": 1, "ignore_eos": True, "echo": True}
    told = completion(openai, PROMPT, is_stream=False, **options, top_k=1)
    assert_same(completion(openai, ids, is_stream=True, **options, top_k=1), told)
    [choice] = told.choices
    expected = greedy(tiny("llama"), ids, 4)
    rows = torch.log_softmax(logits(tiny("llama"), [*ids, *expected]), -1)[:-1]
    assert choice.text == PROMPT + tokenizer.decode(expected)
    assert (choice.logprobs[0], choice.top[0]) == (None, None)
    scored = [float(row[token_id]) for row, token_id in zip(rows, [*ids[1:], *expected], strict=True)]
    assert choice.logprobs[1:] == pytest.approx(scored, abs=1e-4)
    assert [next(iter(top.values())) for top in choice.top[1:]] == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)
    # The same of the prompt alone, as texts are scored: C64.
    options |= {"max_tokens": 0}
    for is_stream in (False, True):
        alone = completion(openai, [PROMPT, PROMPT], is_stream=is_stream, **options)
        assert (alone.num_prompt_tokens, alone.num_tokens) == (2 * len(ids), 0)
        for each in alone.choices:
            assert (each.text, each.finish_reason) == (PROMPT, "length")
            assert each.logprobs[1:] == pytest.approx(scored[: len(ids) - 1], abs=1e-4)
    answer = served.client.generate(PROMPT, echo=True, max_tokens=0, prompt_logprobs=0)
    assert (answer.prompt_text, list(answer.prompt_token_ids), answer.token_ids) == (PROMPT, ids, ())
    assert [entry.logprob for entry in answer.prompt_logprobs][1:] == pytest.approx(scored[: len(ids) - 1], abs=1e-4)


def test_text_offsets_point_elsewhere(openai: OpenAI) -> None:
    reply = openai.completions.create(
        model="llama", prompt=PROMPT, max_tokens=6, logprobs=0, echo=True, logit_bias=FEW_LETTERS
    )
    [choice] = reply.choices
    told = choice.logprobs
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text.startswith(token, offset)


@pytest.mark.parametrize("endpoint", ["text", "chat"])
def test_prompt_logprobs_differ_from_the_model(endpoint: str, openai: OpenAI, tokenizer: Tokenizer, tiny: Tiny) -> None:
    """C10: they are prefill's, the first is null; of a prompt of several chunks, in the reply and in a stream."""
    extra = {"prompt_logprobs": 1, "ignore_eos": True}
    if endpoint == "text":
        ids, create = tokenizer.encode(PROMPT * 3), openai.completions.create
        given: dict[str, Any] = {"prompt": PROMPT * 3}
    else:
        ids, create = tokenizer.encode_chat(MESSAGES), openai.chat.completions.create
        given = {"messages": MESSAGES}
    whole = create(model="llama", max_tokens=2, extra_body=extra, **given)
    first, *others = create(model="llama", max_tokens=2, stream=True, extra_body=extra, **given)
    tables = [(reply.choices[0] if endpoint == "text" else reply).prompt_logprobs for reply in (whole, first)]
    assert not any("prompt_logprobs" in each.to_json() for each in others)
    assert tables[0] == tables[1]
    unpredicted, *entries = tables[0]
    assert unpredicted is None
    rows = torch.log_softmax(logits(tiny("llama"), ids), -1)
    for entry, token_id, row in zip(entries, ids[1:], rows[:-1], strict=True):
        assert entry[str(token_id)]["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry[str(int(row.argmax()))]["logprob"] == pytest.approx(float(row.max()), abs=1e-4)


def test_broken_or_halved_characters_are_shown(served: Cluster, openai: OpenAI, tokenizer: Tokenizer) -> None:
    """C13, C19: bytes of é and of spaces at random; halves come from prefill and from decode, whole ones are shown."""
    ids = [*tokenizer.encode("é"), *tokenizer.encode(" ."), tokenizer.encode("👍")[0]]
    options = {"seed": 2, "temperature": 5, "n": 32, "max_tokens": 20, "ignore_eos": True}
    answer = served.client.generate(PROMPT, logit_bias=dict.fromkeys(ids, 100), **options)
    whole = [tokenizer.decode(sample.token_ids) for sample in answer.samples]
    assert any(text.startswith("é") for text in whole), "no character has its first half from prefill"
    assert any("\ufffd" in text for text in whole)
    told = completion(openai, PROMPT, is_stream=True, logit_bias=dict.fromkeys(map(str, ids), 100), **options)
    assert [choice.text for choice in told.choices] == whole == [sample.text for sample in answer.samples]


@pytest.mark.parametrize("endpoint", ["text", "chat"])
@pytest.mark.parametrize("asked", [{"include_usage": True}, {"include_usage": False}, None])
def test_usage_chunk_is_wrong_or_unasked(endpoint: str, asked: dict[str, bool] | None, openai: OpenAI) -> None:
    """C59: with two samples, one of which a stop string ends before any text was shown."""
    options: dict[str, Any] = {"n": 2, "seed": 1, "max_tokens": 8, "logit_bias": FEW_LETTERS, "stop": list("abc")}
    create: Any = openai.completions.create if endpoint == "text" else openai.chat.completions.create
    given = {"prompt": PROMPT} if endpoint == "text" else {"messages": MESSAGES}
    whole = create(model="llama", **given, **options)
    streamed = {} if asked is None else {"stream_options": asked}
    chunks = list(create(model="llama", stream=True, **streamed, **given, **options))
    if asked == {"include_usage": True}:
        last = chunks.pop()
        assert last.choices == []
        numbers = [
            (each.prompt_tokens, each.completion_tokens, each.total_tokens) for each in (last.usage, whole.usage)
        ]
        assert numbers[0] == numbers[1]
    assert all(chunk.usage is None for chunk in chunks)
    reasons = [(each.index, each.finish_reason) for chunk in chunks for each in chunk.choices if each.finish_reason]
    assert sorted(reasons) == [(each.index, each.finish_reason) for each in whole.choices]


def test_absent_and_null_are_two(openai: OpenAI) -> None:
    """The API's own default of 16, whether nothing or null is sent; a chat goes on to the end of its context."""
    for options in ({}, {"max_tokens": None, "temperature": None, "stop": None, "n": None, "seed": None}):
        told = completion(openai, PROMPT, is_stream=False, ignore_eos=True, **options)
        assert (told.num_tokens, told.choices[0].finish_reason) == (16, "length")
    ids_left = 1024 - chat(openai, MESSAGES, is_stream=False, max_tokens=1).num_prompt_tokens
    told = chat(openai, MESSAGES, is_stream=True, max_completion_tokens=None, logit_bias={str(EOS_TOKEN_ID): -100})
    assert (told.num_tokens, told.choices[0].finish_reason) == (ids_left, "length")


def test_model_list_leaves_the_revision_out(served: Cluster, openai: OpenAI) -> None:
    info = served.client.model_info()
    [model] = openai.models.list().data
    assert (model.id, model.object, model.owned_by) == (info.model, "model", "splitserve")
    assert (model.revision, model.max_model_len) == (info.revision, 1024)  # type: ignore[attr-defined]
    assert openai.models.retrieve(info.model) == model


def test_tokens_are_others_than_those_generated_from(openai: OpenAI, tokenizer: Tokenizer, served: Cluster) -> None:
    for body, ids in (
        ({"prompt": PROMPT}, tokenizer.encode(PROMPT)),
        ({"messages": MESSAGES}, tokenizer.encode_chat(MESSAGES)),
    ):
        told = served.http.post("/tokenize", json=body).json()
        assert told == {"tokens": ids, "count": len(ids), "max_model_len": 1024}
        assert served.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}
        assert served.client.detokenize(ids) == tokenizer.decode(ids)
    assert completion(openai, PROMPT, is_stream=False, max_tokens=1).num_prompt_tokens == len(tokenizer.encode(PROMPT))
