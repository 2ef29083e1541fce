"""Hand-written stand-ins for what the router's public edge talks to: a tokenizer, a cluster, a model."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.request import ClusterLimits, Event, FinishReason, GenerationRequest, TokenEvent
from router.stages import Stage, StageClock
from splitserve.models.description import ModelDescription
from splitserve.models.detokenizer import DecodeStream, Detokenizer
from splitserve.service.errors import InvalidRequest

NO_LIMITS = ClusterLimits(ready=True, max_prompt_tokens_prefill=0, max_prompt_tokens_decode=0, max_model_len=0)
EOS = "<eos>"
TRANSFER_BYTES = 4096  # of every request


def model_description(**changes: object) -> ModelDescription:
    fields: dict[str, object] = {
        "name": "tiny",
        "revision": "r1",
        "directory": Path("/nowhere"),
        "architecture": "LlamaForCausalLM",
        "vocab_size": 300,
        "max_model_len": 100,
        "eos_token_ids": (256,),
        "bos_token_id": None,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "default_temperature": None,
        "default_top_p": None,
        "default_top_k": None,
        "default_min_p": None,
        "default_repetition_penalty": None,
    }
    return ModelDescription(**{**fields, **changes})  # type: ignore[arg-type]


def byte_alphabet() -> dict[str, int]:
    """The character of each byte in the byte-level alphabet: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteTokenizer:
    """One token per byte, ids 0 to 255; then "<eos>" (256, special) and the given longer tokens, from 257."""

    def __init__(self, *words: str) -> None:
        alphabet = byte_alphabet()
        self._tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([EOS])
        self._tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
        self._detokenizer = Detokenizer.for_tokenizer(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        for message in messages:
            if message["role"] not in {"system", "user", "assistant"}:
                raise InvalidRequest(f"role {message['role']!r} is unknown to the template", field="chat")
        return self.encode("".join(f"[{message['role']}]{message['content']}" for message in messages))

    def decode(self, ids: list[int]) -> str:
        if min(ids, default=0) < 0:
            raise InvalidRequest("an id is out of range", field="token_ids")
        return str(self._tokenizer.decode(ids))

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        return self._detokenizer.stream(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._detokenizer.token_bytes(token_id)


class PieceDetokenizer:
    """Token i is the i-th of `pieces`, which may cut characters anywhere."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def decode_stream(self, skip_special_tokens: bool = True) -> "PieceDetokenizer.Stream":
        return PieceDetokenizer.Stream(self._pieces)

    class Stream:
        def __init__(self, pieces: list[bytes]) -> None:
            self._pieces = pieces
            self._held = b""

        def step(self, token_id: int) -> str | None:
            self._held += self._pieces[token_id]
            text = self._held.decode("utf-8", "replace")
            if not text or text.endswith("\ufffd"):
                return None
            self._held = b""
            return text

        def flush(self) -> str | None:
            return self._held.decode("utf-8", "replace")


class Wait:
    """In a script: nothing more comes until `event` is set, which by default is never."""

    def __init__(self, event: asyncio.Event | None = None) -> None:
        self.event = event or asyncio.Event()


Step = Event | BaseException | Wait


class FakeGeneration:
    """Plays a script. Knows whether it was closed, and how much of the script was taken."""

    def __init__(self, request: GenerationRequest, script: Iterable[Step]) -> None:
        self.request = request
        self.attempts = 2
        self.cached_tokens = 3
        self.num_taken = 0
        self.num_closed = 0
        self.stopped: list[int] = []
        self._script = list(script)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for step in self._script:
            if isinstance(step, Wait):
                await step.event.wait()
            elif isinstance(step, BaseException):
                raise step
            else:
                self.num_taken += 1
                yield step

    def stop(self, sample: int) -> None:
        self.stopped.append(sample)

    async def aclose(self) -> None:
        self.num_closed += 1


class FakeDispatcher:
    """Answers every request with `script(request)`; an exception there is a refusal."""

    def __init__(self, script: Callable[[GenerationRequest], Iterable[Step]] = lambda _: tokens("ok")) -> None:
        self.script = script
        self.generations: list[FakeGeneration] = []

    def submit(self, request: GenerationRequest, stages: StageClock) -> FakeGeneration:
        generation = FakeGeneration(request, self.script(request))
        stages.enter(Stage.DECODE)
        stages.transferred("t1", TRANSFER_BYTES)
        self.generations.append(generation)
        return generation

    @property
    def requests(self) -> list[GenerationRequest]:
        return [generation.request for generation in self.generations]

    @property
    def all_closed(self) -> bool:
        return all(generation.num_closed for generation in self.generations)


def events(ids: Iterable[int], finish: FinishReason | None = FinishReason.LENGTH) -> list[TokenEvent]:
    """Token events at positions 0, 1, …; the last one carries `finish`."""
    listed = list(ids)
    last = len(listed) - 1
    return [TokenEvent(0, i, token_id, finish if i == last else None) for i, token_id in enumerate(listed)]


def tokens(text: str, finish: FinishReason | None = FinishReason.LENGTH) -> list[TokenEvent]:
    """The events of `text`, a byte at a time, as `ByteTokenizer` has it."""
    return events(text.encode(), finish)
