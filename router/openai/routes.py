"""The OpenAI-compatible API over HTTP: an edge of `serving`, mounted by `http.create_app`."""

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from router.long_work import LongWork
from router.openai import replies
from router.openai.answers import Answer, Asked, ChatAnswer, CompletionAnswer
from router.openai.bodies import Bodies
from router.openai.exchange import Exchange
from router.openai.messages import contract_error, of_chat, of_completion, of_detokenize, of_tokenize
from router.openai.openapi import Responses, body_of, reply_of
from router.openai.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.openai.token_texts import TokenBytes, TokenTexts
from router.serving import Serving, traceparent_of
from router.validation import RequestValidator, unknown_model
from splitserve.models.description import ModelDescription
from splitserve.service.errors import SplitserveError
from splitserve.v1 import inference_pb2 as pb


class OpenAI:
    """A method for each path. `validator` makes ids of text, `tokenizer` text of ids."""

    def __init__(
        self, *, model: ModelDescription, serving: Serving, validator: RequestValidator, tokenizer: TokenBytes
    ) -> None:
        self._model = model
        self._serving = serving
        self._validator = validator
        self._texts = TokenTexts(tokenizer)
        self._long_work = LongWork()
        self._bodies = Bodies(self._long_work)
        self._started = int(time.time())

    def routes(self) -> APIRouter:
        """Paths and shapes as OpenAI has them; `/tokenize` and `/detokenize` as vLLM has them."""
        api = APIRouter()
        chat = reply_of(replies.ChatCompletion, replies.ChatChunk)
        completion = reply_of(replies.Completion, replies.Completion)

        def post(path: str, endpoint: Callable[..., Any], body: type[BaseModel], responses: Responses) -> None:
            api.add_api_route(path, endpoint, methods=["POST"], openapi_extra=body_of(body), responses=responses)

        post("/v1/chat/completions", self.chat_completions, ChatCompletionRequest, chat)
        post("/v1/completions", self.completions, CompletionRequest, completion)
        post("/tokenize", self.tokenize, TokenizeRequest, reply_of(replies.Tokens))
        post("/detokenize", self.detokenize, DetokenizeRequest, reply_of(replies.Text))
        api.add_api_route("/v1/models", self.models, responses=reply_of(replies.ModelList))
        # A name may have slashes.
        api.add_api_route("/v1/models/{name:path}", self.one_model, responses=reply_of(replies.Model))
        return api

    async def chat_completions(self, request: Request) -> Response:
        def read(body: ChatCompletionRequest) -> tuple[ChatCompletionRequest, list[pb.GenerateRequest]]:
            return body, [of_chat(body, _request_id(request, body))]

        body, messages = await self._bodies.read(request, ChatCompletionRequest, read)
        answer = ChatAnswer(self._asked("chatcmpl", body, messages), self._texts)
        return self._exchange(request, body, messages, answer)

    async def completions(self, request: Request) -> Response:
        def read(body: CompletionRequest) -> tuple[CompletionRequest, list[pb.GenerateRequest]]:
            return body, of_completion(body, _request_id(request, body))

        body, messages = await self._bodies.read(request, CompletionRequest, read)
        answer = CompletionAnswer(self._asked("cmpl", body, messages), self._texts)
        return self._exchange(request, body, messages, answer)

    async def models(self) -> Response:
        return _json(replies.ModelList([self._description()]))

    async def one_model(self, name: str) -> Response:
        if name != self._model.name:
            raise unknown_model(name, self._model.name)
        return _json(self._description())

    async def tokenize(self, request: Request) -> Response:
        body, message = await self._bodies.read(request, TokenizeRequest, lambda body: (body, of_tokenize(body)))
        try:
            ids = list(await self._validator.tokenize(message))
        except SplitserveError as error:
            raise contract_error(error, body) from None
        return _json(replies.Tokens(ids, len(ids), self._validator.context_len))

    async def detokenize(self, request: Request) -> Response:
        body, message = await self._bodies.read(request, DetokenizeRequest, lambda body: (body, of_detokenize(body)))
        try:
            return _json(replies.Text(await self._validator.detokenize(message)))
        except SplitserveError as error:
            raise contract_error(error, body) from None

    def _description(self) -> replies.Model:
        return replies.Model(self._model.name, self._started, self._model.revision, self._validator.context_len)

    def _asked(
        self,
        prefix: str,
        body: CompletionRequest | ChatCompletionRequest,
        messages: list[pb.GenerateRequest],
    ) -> Asked:
        params, options = messages[0].sampling_params, body.stream_options
        return Asked(
            id=f"{prefix}-{uuid.uuid4().hex}",
            model=self._model.name,
            num_prompts=len(messages),
            n=params.n if params.HasField("n") else 1,
            has_logprobs=params.HasField("logprobs"),
            has_prompt_logprobs=body.prompt_logprobs is not None,
            is_stream=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
        )

    def _exchange(
        self,
        request: Request,
        body: CompletionRequest | ChatCompletionRequest,
        messages: list[pb.GenerateRequest],
        answer: Answer,
    ) -> Exchange:
        return Exchange(
            self._serving,
            answer,
            messages,
            long_work=self._long_work,
            rename=lambda error: contract_error(error, body),
            is_stream=bool(body.stream),
            traceparent=traceparent_of(request.headers.get("traceparent", "")),
            headers=_name_header(messages[0].request_id),
        )


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _request_id(request: Request, body: CompletionRequest | ChatCompletionRequest) -> str:
    """The client's own name for the request, or one that we draw: it is in the log and in the reply's header."""
    return body.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex


def _name_header(request_id: str) -> dict[str, str]:
    is_sayable = request_id.isascii() and request_id.isprintable()
    return {"x-request-id": request_id} if is_sayable else {}
