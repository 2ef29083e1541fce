"""Requests and replies in `/openapi.json`, made of the types that are used: pydantic's and msgspec's."""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai import replies, requests

_REFERENCE = "#/components/schemas/{name}"
_MODEL_REFERENCE = _REFERENCE.format(name="{model}")

_EVENTS = "Chunks and then [DONE], or an error in place of the rest."

Responses = dict[int | str, dict[str, Any]]


def reply_of(whole: type[msgspec.Struct], event: type[msgspec.Struct] | None = None) -> Responses:
    """A route's `responses`: its reply, the events where it can stream, and the shape of every error."""
    content = {"application/json": {"schema": _schema(whole)}}
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event)}
    refused: Responses = {
        status: _error(description)
        for status, description in {
            400: "The request can never be served.",
            404: "Another model's name.",
            413: "The body is too large.",
            422: "Not used: what is malformed is refused with 400.",
            429: "No capacity now; `retry-after` says when to try again.",
            500: "Our fault.",
            503: "Nobody can serve it now; `retry-after` says when to try again.",
            504: "Its time ran out.",
        }.items()
    }
    answered: Responses = {200: {"description": "The answer.", "content": content}}
    return answered | refused


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its request."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def document(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """For `app.openapi`: made once, at the first call."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            _, components = msgspec.json.schema_components(_all_replies(), ref_template=_REFERENCE)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_request_schemas() | components)
            app.openapi_schema = made
        return app.openapi_schema

    return openapi


def _request_schemas() -> dict[str, Any]:
    kinds = (
        requests.ChatCompletionRequest,
        requests.CompletionRequest,
        requests.TokenizeRequest,
        requests.DetokenizeRequest,
    )
    _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_MODEL_REFERENCE)
    schemas: dict[str, Any] = made["$defs"]
    return schemas


def _schema(reply: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=reply.__name__)}


def _event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """One event of a stream, which is how the schema of such a body is read."""
    json = {"type": "string", "contentMediaType": "application/json"}
    said = [{**json, "contentSchema": _schema(each)} for each in (chunk, replies.ErrorReply)]
    data = {"anyOf": [*said, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"], "description": _EVENTS}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _schema(replies.ErrorReply)}}}


def _all_replies() -> list[type[msgspec.Struct]]:
    found = [value for value in vars(replies).values() if isinstance(value, type)]
    return [each for each in found if issubclass(each, msgspec.Struct) and each is not msgspec.Struct]


NOT_READY: Responses = {503: _error("Nobody can serve now; the message says why.")}
"""Besides its own reply, for the route that says whether anyone can serve."""
