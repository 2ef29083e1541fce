"""Requests that schemathesis makes of `/openapi.json`: documented answers to all, and no worker is lost over one."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.cluster.harness import Cluster
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.cluster

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
GETS = ["/v1/models", "/v1/models/{name}", "/health/live", "/health/ready", "/metrics", "/cluster"]
MAX_TOKENS = 4


@pytest.fixture
def schema(served: Cluster) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{str(served.http.base_url).rstrip('/')}/openapi.json")


def statuses(
    schema: BaseSchema,
    path: str,
    mode: GenerationMode,
    num_examples: int,
    change: Callable[[Case], Case] = lambda case: case,
) -> Counter[int]:
    """Each answer is looked at; the number of answers of each status is returned."""
    operation = schema[path]["POST" if path in POSTS else "GET"]
    found: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode).map(change))
    def ask(case: Case) -> None:
        response = case.call(timeout=60)
        found[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    ask()
    return found


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_odd_request_is_our_fault(path: str, mode: GenerationMode, schema: BaseSchema, served: Cluster) -> None:
    """C61, C62: bodies of the documented form and others."""
    with served.undisturbed():
        found = statuses(schema, path, mode, 25, as_short)
    if mode is GenerationMode.NEGATIVE:
        assert set(found) == {400}


@pytest.mark.parametrize("path", GETS)
def test_document_says_another_reply(path: str, schema: BaseSchema) -> None:
    assert set(statuses(schema, path, GenerationMode.POSITIVE, 10)) <= {200, 404}


@pytest.mark.parametrize("path", POSTS[:2])
@pytest.mark.parametrize("is_stream", [False, True])
def test_servable_request_is_answered_otherwise_than_documented(
    path: str, is_stream: bool, schema: BaseSchema, served: Cluster
) -> None:
    """Combinations of all options, which reach the workers."""
    with served.undisturbed():
        found = statuses(schema, path, GenerationMode.POSITIVE, 25, partial(as_servable, is_stream=is_stream))
    assert found[200] > 5, found


def as_short(case: Case) -> Case:
    """Of a chat, which has no limit of its own, and of many samples."""
    body = case.body
    if isinstance(body, dict):
        if "chat" in case.operation.path and body.get("max_tokens") is body.get("max_completion_tokens") is None:
            body["max_tokens"] = MAX_TOKENS
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 3)
    return case


def as_servable(case: Case, is_stream: bool) -> Case:
    """Without what is refused for what this model is, and short."""
    body: dict[str, Any] = with_whole_numbers(case.body)
    for name in ("model", "tools", "response_format", "best_of", "suffix", "max_completion_tokens"):
        body.pop(name, None)
    body |= {"max_tokens": MAX_TOKENS, "n": min(body.get("n") or 1, 3), "stream": is_stream}
    body["min_tokens"] = min(body.get("min_tokens") or 0, MAX_TOKENS)
    body["stop_token_ids"] = [abs(token_id) % VOCAB_SIZE for token_id in body.get("stop_token_ids") or []]
    body["logit_bias"] = {
        str(int(token_id) % VOCAB_SIZE): bias for token_id, bias in (body.get("logit_bias") or {}).items()
    }
    if not is_stream:
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if "prompt" in body:
        body["prompt"] = in_vocabulary(body["prompt"])
    case.body = body
    return case


def with_whole_numbers(value: Any) -> Any:
    """JSON schema takes 1.0 for an integer, the API does not."""
    if isinstance(value, dict):
        return {name: with_whole_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_vocabulary(prompt: Any) -> Any:
    if isinstance(prompt, int):
        return prompt % VOCAB_SIZE
    return [in_vocabulary(each) for each in prompt[:3]] if isinstance(prompt, list) else prompt
