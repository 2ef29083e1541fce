"""The public edge with a real tokenizer and chat template from a model directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.request import FinishReason, GenerationRequest, TokenEvent
from router.translate import start_to_proto
from router.worker import Start
from splitserve.models.description import describe
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import cluster_pb2 as cluster_pb
from splitserve.v1 import inference_pb2 as pb
from splitserve.worker.commands import Reserve
from splitserve.worker.translate import to_command
from tests.router.cluster_fakes import Router
from tests.router.edge import Edge, running
from tests.router.fakes import FakeDispatcher, Step, events
from tests.tiny_models import BOS_TOKEN_ID, EOS_TOKEN_ID, add_tokenizer

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


def edge_of(directory: Path, dispatcher: Any) -> Edge:
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


async def test_a_prompt_is_tokenized_again_on_its_way(directory: Path, tmp_path: Path) -> None:
    """C12: template and tokenizer both know BOS. Reserve and Prefill bring each engine the ids that transformers makes
    of the chat and of the text, and so many are counted."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "{{ bos_token }}" + settings["chat_template"], "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    library = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = library.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)["input_ids"]
    text = [BOS_TOKEN_ID, *library.encode("hi there", add_special_tokens=False)]
    assert (chat[0], chat.count(BOS_TOKEN_ID)) == (BOS_TOKEN_ID, 1)

    router = Router()
    (prefill,), (decode,) = router.pairs()
    async with running(edge_of(tmp_path, router.dispatcher)) as edge:
        prompts: list[tuple[dict[str, object], list[int]]] = [
            ({"chat": [("user", "hi")]}, chat),
            ({"text": "hi there"}, text),
        ]
        for number, (prompt, expected) in enumerate(prompts):
            call = edge.generate(**prompt)
            attempt, reserve = await decode.command("reserve", number)
            decode.reserved(attempt)
            _, to_compute = await prefill.command("prefill", number)
            assert ids_in_engine(reserve) == ids_in_engine(to_compute) == expected
            prefill.accepted(attempt)
            prefill.first(attempt, 0, 7, FinishReason.LENGTH)
            decode.token(attempt, 0, 7, FinishReason.LENGTH)
            messages = [message async for message in call]
            assert messages[-1].complete.prompt_tokens == len(expected)


def ids_in_engine(start: Start | None) -> list[int]:
    """The prompt as a worker's engine gets it, through the stream's messages."""
    assert start is not None
    message = cluster_pb.RouterMessage(reserve=cluster_pb.Reserve(start=start_to_proto(start)))
    command = to_command(cluster_pb.RouterMessage.FromString(message.SerializeToString()), 1)
    assert isinstance(command, Reserve)
    return command.start.prompt_ids


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
