"""The first thing that anyone tries: `splitserve up` with the default model, then `splitserve generate`."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve import Client
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from tests.cluster.expected import Reference
from tests.cluster.harness import wait_for
from tests.cluster.up import COMMAND, Up
from tests.cluster.up import up as start_up
from tests.reference import greedy

pytestmark = pytest.mark.cluster

QUESTION = "Write a short introduction about the US capital city."


@pytest.fixture(scope="module")
def directory() -> Path:
    return locate_model(None).directory


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with start_up(tmp_path_factory.mktemp("up") / "log", "--dtype", "float32") as cluster:
        yield cluster


def run(up: Up, *args: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"SPLITSERVE_TARGET": up.target, "SPLITSERVE_URL": up.url}
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=120, env=environment)


def cluster(up: Up) -> Any:
    return httpx.get(f"{up.url}/cluster", timeout=5).json()


def test_answer_does_not_come_over_two_processes(up: Up, directory: Path) -> None:
    """The text is the model's own, and its blocks crossed from one process to the other."""
    before = sum(worker["kv_bytes_received"] for worker in cluster(up)["workers"])
    done = run(up, "generate", QUESTION, "--temperature", "0", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.load(directory)
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    expected = greedy(directory, prompt, 24, ignore_eos=False)
    assert done.stdout == tokenizer.decode(expected) + "\n"
    blocks = -(-len(prompt) // 16)
    received = wait_for("the blocks", lambda: sum(w["kv_bytes_received"] for w in cluster(up)["workers"]) - before)
    assert received == blocks * 16 * 23_040 * 2  # 23,040 bytes a token in bfloat16, twice that in float32
    prefill, decode = (next(w for w in cluster(up)["workers"] if w["role"] == role) for role in ("prefill", "decode"))
    assert prefill["pid"] != decode["pid"]
    assert decode["kv_bytes_sent"] == prefill["kv_bytes_received"] == 0


def test_text_differs_from_one_process(up: Up, directory: Path) -> None:
    """Prompts of less than a block, of whole blocks, and of several chunks."""
    tokenizer = Tokenizer.load(directory)
    text = "In 1790 the site of the new capital was chosen on the Potomac, 38°53′ north; " * 40
    ids, reference = tokenizer.encode(text), Reference(directory)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with Client(up.target) as client:
        for length in (1, 15, 16, 17, 32, 600):
            answer = client.generate(ids[:length], **options)
            reference.check(ids[:length], answer, options)


def test_chat_and_status_say_nothing(up: Up) -> None:
    done = run(up, "chat", "--max-tokens", "8", "--temperature", "0", stdin="Hello!\nAnd again.\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 0
    status = run(up, "status", "--json")
    state = json.loads(status.stdout)
    assert state["ready"]
    assert {worker["role"] for worker in state["workers"]} == {"prefill", "decode"}
    assert state["pool"]["free"] + state["pool"]["cached"] == state["pool"]["total"]
