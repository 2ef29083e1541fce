"""Turns a client's `GenerateRequest` into a `GenerationRequest`, or refuses it with the true numbers.

`serving` calls it before anything else: no worker ever sees a value that was not checked here. `RequestValidator` owns
the codec of prompts; everything else is a pure function of the message and the model.
"""

from collections.abc import Callable, Sequence

from router.prompt_codec import CONTEXT_LENGTH_EXCEEDED, EMPTY_PROMPT, Encoder, PromptCodec
from router.request import ClusterLimits, GenerationRequest
from router.sampling import check_samples, fit_to_room, read_sampling, with_usable_defaults
from router.tokenizing import TokenizingLimits
from splitserve.models.description import ModelDescription
from splitserve.service.errors import InvalidRequest, NotFound
from splitserve.v1 import inference_pb2 as pb

MAX_REQUEST_ID_CHARS = 256

DEFAULT_TOKENIZING = TokenizingLimits()

PROMPT_TOO_LARGE = "PROMPT_TOO_LARGE"
MODEL_NOT_FOUND = "MODEL_NOT_FOUND"


def unknown_model(name: str, served: str) -> NotFound:
    """The refusal of a request for another model than the one that is `served`."""
    message = f"the model {name[:200]!r} does not exist here; {served!r} is served"
    return NotFound(message, reason=MODEL_NOT_FOUND, field="model")


class RequestValidator:
    """Checks requests for one model. `limits` tells what the workers joined at this moment can take."""

    def __init__(
        self,
        model: ModelDescription,
        encoder: Encoder,
        limits: Callable[[], ClusterLimits],
        *,
        tokenizing: TokenizingLimits = DEFAULT_TOKENIZING,
    ) -> None:
        self._model = with_usable_defaults(model)
        self._limits = limits
        self._codec = PromptCodec(encoder, tokenizing)

    def close(self) -> None:
        """Gives the threads back without waiting for text that is still being tokenized."""
        self._codec.close()

    @property
    def context_len(self) -> int:
        """Largest prompt + output, in tokens: the model's own, or less where every worker has less."""
        joined = self._limits().max_model_len
        return min(self._model.max_model_len, joined) if joined > 0 else self._model.max_model_len

    async def validate(
        self, message: pb.GenerateRequest, *, deadline: float, traceparent: str = ""
    ) -> GenerationRequest:
        """Raises InvalidRequest (with `field`), NotFound or Overloaded; then nothing was started for the request."""
        if len(message.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                f"request_id has {len(message.request_id)} characters; at most {MAX_REQUEST_ID_CHARS} are allowed",
                field="request_id",
            )
        self._check_model(message.model)
        # Everything that is cheap to refuse is refused before any text is tokenized.
        params, context_len = message.sampling_params, self.context_len
        _check_echo(message)
        sampling = read_sampling(params, self._model, context_len, has_echo=message.echo)
        prompt_ids = await self._prompt_ids(message)
        self._check_prompt_len(len(prompt_ids), context_len, message.WhichOneof("prompt"))
        check_samples(sampling, len(prompt_ids), self._limits().decodes)
        largest, limited_by = self._largest_sequence(context_len)
        return GenerationRequest(
            request_id=message.request_id,
            model=self._model.name,
            prompt_ids=prompt_ids,
            sampling=fit_to_room(
                sampling,
                asked=params.HasField("max_tokens"),
                num_prompt_tokens=len(prompt_ids),
                largest=largest,
                limited_by=limited_by,
            ),
            priority=message.priority,
            deadline=deadline,
            traceparent=traceparent,
            echo=await self._echo(message, prompt_ids),
            shows_output=not (params.HasField("max_tokens") and params.max_tokens == 0),
        )

    async def tokenize(self, message: pb.TokenizeRequest) -> Sequence[int]:
        """The ids that Generate would use. Raises as `validate` does, but does not mind the workers' limits."""
        self._check_model(message.model)
        match message.WhichOneof("prompt"):
            case "text":
                return await self._codec.encode_text(message.text, self.context_len)
            case "chat":
                return await self._codec.encode_chat(message.chat, self.context_len)
        raise InvalidRequest("one of text or chat is required", field="prompt", reason=EMPTY_PROMPT)

    async def detokenize(self, message: pb.DetokenizeRequest) -> str:
        """The text of any ids. Raises as `validate` does."""
        self._check_model(message.model)
        if len(message.token_ids) > self.context_len:
            raise InvalidRequest(
                f"there are {len(message.token_ids)} tokens; the context is {self.context_len} tokens",
                field="token_ids",
                reason=CONTEXT_LENGTH_EXCEEDED,
            )
        return await self._codec.decode(message.token_ids, "token_ids")

    def _check_model(self, model: str) -> None:
        if model and model != self._model.name:
            raise unknown_model(model, self._model.name)

    async def _prompt_ids(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        match message.WhichOneof("prompt"):
            case "text":
                ids, field = await self._codec.encode_text(message.text, self.context_len), "text"
            case "chat":
                ids, field = await self._codec.encode_chat(message.chat, self.context_len), "chat"
            case "token_ids":
                return self._given_ids(message.token_ids.ids)
            case _:
                raise InvalidRequest("one of text, token_ids or chat is required", field="prompt", reason=EMPTY_PROMPT)
        # Tokens can be added to a tokenizer that its model has no embedding for.
        if (index := self._first_unknown(ids)) is not None:
            raise InvalidRequest(
                f"{field} tokenizes to id {ids[index]} at position {index}; the model's vocabulary is 0 to "
                f"{self._model.vocab_size - 1}",
                field=field,
            )
        return tuple(ids)

    async def _echo(self, message: pb.GenerateRequest, prompt_ids: Sequence[int]) -> str | None:
        """The prompt's text for the client: as it was sent, where it was sent as a text."""
        if not message.echo:
            return None
        if message.HasField("text"):
            return message.text
        return await self._codec.decode(prompt_ids, "token_ids")

    def _given_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest(
                "token_ids is empty: a prompt needs at least one token", field="token_ids", reason=EMPTY_PROMPT
            )
        # The length first: a message may hold millions of ids.
        self._check_prompt_len(len(ids), self.context_len, "token_ids")
        ids = tuple(ids)  # protobuf's own list is slow to look through
        if (index := self._first_unknown(ids)) is not None:
            raise InvalidRequest(
                f"token_ids[{index}] is {ids[index]}; the model's vocabulary is 0 to {self._model.vocab_size - 1}",
                field="token_ids",
            )
        return ids

    def _first_unknown(self, ids: Sequence[int]) -> int | None:
        """Where the first id stands that the model does not have. Not for an empty sequence."""
        vocab_size = self._model.vocab_size
        if min(ids) >= 0 and max(ids) < vocab_size:
            return None
        return next(index for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)

    def _largest_sequence(self, context_len: int) -> tuple[int, str]:
        """Prompt + output, and whose limit it is. A pool that is too small would hold up the next attempt for ever.

        One token more than the largest prompt: the last one of the output is never computed.
        """
        return min(
            [
                (context_len, "the context is"),
                *((most + 1, f"the {role} workers allow") for role, most in self._sides()),
            ]
        )

    def _sides(self) -> list[tuple[str, int]]:
        """The largest prompt that each role's workers can hold, for the roles that are here."""
        limits = self._limits()
        sides = (("prefill", limits.max_prompt_tokens_prefill), ("decode", limits.max_prompt_tokens_decode))
        return [(role, most) for role, most in sides if most > 0]

    def _check_prompt_len(self, num_tokens: int, context_len: int, field: str | None) -> None:
        if num_tokens >= context_len:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; the context is {context_len} tokens, and at least 1 of them must "
                f"remain for the output, so a prompt can have at most {context_len - 1}",
                field=field,
                reason=CONTEXT_LENGTH_EXCEEDED,
            )
        for role, limit in sorted(self._sides(), key=lambda side: side[1]):
            if limit < num_tokens:
                raise InvalidRequest(
                    f"the prompt has {num_tokens} tokens; the largest that the {role} workers can hold is {limit}",
                    field=field,
                    reason=PROMPT_TOO_LARGE,
                )


def _check_echo(message: pb.GenerateRequest) -> None:
    if message.echo and message.HasField("chat"):
        raise InvalidRequest(
            "echo is for text and token_ids: the answer to a chat is a text of its own, before which nothing stands",
            field="echo",
        )
