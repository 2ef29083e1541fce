"""The public edge with a real tokenizer and chat template from a model directory."""

import json
from pathlib import Path

import pytest

from router.request import FinishReason, GenerationRequest, TokenEvent
from splitserve.models.description import describe
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, running
from tests.router.fakes import FakeDispatcher, Step, events
from tests.tiny_models import EOS_TOKEN_ID, add_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "eos_token_id": EOS_TOKEN_ID,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    add_tokenizer(path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    return path


def edge_of(directory: Path, dispatcher: FakeDispatcher) -> Edge:
    tokenizer = Tokenizer.load(directory)
    return Edge(dispatcher, describe(directory, "tiny", "r1"), tokenizer)


async def test_a_chat_is_tokenized_once_and_its_answer_comes_back_as_text(directory: Path) -> None:
    """C12, C13: several tokens per character, and an end-of-sequence token that is no text."""
    answer = "naïve 👩‍👩‍👧‍👦  ok"
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode(answer)

    def script(_: GenerationRequest) -> list[Step]:
        return [*events(ids, None), TokenEvent(0, len(ids), EOS_TOKEN_ID, FinishReason.STOP)]

    async with running(edge_of(directory, FakeDispatcher(script))) as edge:
        messages = [message async for message in edge.generate(chat=[("user", "hi")])]
        assert "".join(message.chunk.text for message in messages) == answer
        assert all("\ufffd" not in message.chunk.text for message in messages)
        [request] = edge.dispatcher.requests
        assert list(request.prompt_ids) == tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert messages[-1].complete.prompt_tokens == len(request.prompt_ids)
        assert (request.sampling.temperature, request.sampling.top_p) == (0.6, 0.9)


@pytest.mark.parametrize(
    ("stop", "expected"), [(["ve 👩"], "naï"), (["\u200d"], "naïve 👩"), (["k!"], "naïve 👩\u200dok")]
)
async def test_stop_strings_see_characters_and_not_tokens(directory: Path, stop: list[str], expected: str) -> None:
    """C16, C18."""
    ids = Tokenizer.load(directory).encode("naïve 👩\u200dok")
    async with running(edge_of(directory, FakeDispatcher(lambda _: events(ids)))) as edge:
        messages = [message async for message in edge.generate(sampling_params={"stop": stop})]
        assert "".join(message.chunk.text for message in messages) == expected


async def test_tokenize_equals_the_tokenizer(directory: Path) -> None:
    async with running(edge_of(directory, FakeDispatcher())) as edge:
        answer = await edge.stub.Tokenize(pb.TokenizeRequest(text="the thing"))
        assert list(answer.token_ids) == Tokenizer.load(directory).encode("the thing")


async def test_a_role_that_cannot_be_is_refused_by_field(directory: Path) -> None:
    """C61."""
    async with running(edge_of(directory, FakeDispatcher())) as edge:
        error = from_rpc_error(await edge.refusal(chat=[("", "hi")]))
        assert error.field == "chat"
        assert edge.dispatcher.requests == []
