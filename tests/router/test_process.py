"""How the router's process could fail to start on settings that are right, or hold up others by what it
does at its start."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.__main__ import Router
from router.config import RouterConfig
from router.dispatcher import ClusterDispatcher
from splitserve.models.tokenizer import Tokenizer
from tests.router.fakes import model_description
from tests.tiny_models import add_tokenizer

CONFIG = {
    "architectures": ["MineForCausalLM"],
    "model_type": "mine",
    "auto_map": {"AutoModelForCausalLM": "modeling.Mine"},
    "vocab_size": 384,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
}


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A model with pickled weights and code of its own: workers need two flags for it."""
    folder = tmp_path / "model"
    folder.mkdir()
    add_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "pytorch_model.bin").write_bytes(b"never read by a router")
    return folder


@contextmanager
def router(model: Path, *flags: str, ending: signal.Signals = signal.SIGTERM) -> Iterator[dict[str, Any]]:
    """The log line that says where it listens; an early end fails the test with all that it wrote. `ending` ends it."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--internal-port", "0")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "router", "--model", str(model), *ports, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if '"listening"' in line:
                yield json.loads(line)
                break
        else:
            pytest.fail(f"the router ended with {process.wait()}:\n{''.join(lines)}")
        process.send_signal(ending)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_model_that_only_workers_have_to_trust_was_refused_by_the_router(pickled: Path) -> None:
    """It loads neither weights nor code, so there is nothing to allow."""
    with router(pickled) as listening:
        assert listening["grpc"] > 0


def test_an_internal_address_of_ipv6_could_not_be_bound(pickled: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with router(pickled, "--bind", "::1", "--internal-bind", "::1") as listening:
        socket.create_connection(("::1", listening["internal"])).close()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_router_without_streams_waited_for_its_drain_to_pass(pickled: Path, ending: signal.Signals) -> None:
    """Nothing is to be waited for: it ends at once, or this test runs into its own time limit."""
    with router(pickled, "--drain-timeout", "1000s", ending=ending) as listening:
        assert listening["grpc"] > 0


def test_workers_wait_for_what_only_conversations_need(pickled: Path) -> None:
    """They start beside the router, on the same cores: what it imports is taken from them."""
    program = f"""
import sys
from pathlib import Path
import router.__main__
tokenizer = router.__main__.Tokenizer.load(Path({str(pickled)!r}))
assert not {{"torch", "transformers"}} & sys.modules.keys()
tokenizer.prepare_chat()
assert "transformers" in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


async def test_first_conversation_waits_for_what_is_not_prepared(
    pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is prepared once, as soon as the cluster is ready."""
    prepared = asyncio.Event()
    num_prepared, loop = 0, asyncio.get_running_loop()

    def prepare_chat(_: Tokenizer) -> None:
        nonlocal num_prepared
        num_prepared += 1
        loop.call_soon_threadsafe(prepared.set)

    monkeypatch.setattr(Tokenizer, "prepare_chat", prepare_chat)
    router = Router(RouterConfig(), model_description(), Tokenizer.load(pickled))
    router._tell_readiness()
    assert router._chat_preparation is None
    monkeypatch.setattr(ClusterDispatcher, "is_ready", True)
    for _ in range(2):
        router._tell_readiness()
        await prepared.wait()
    assert num_prepared == 1
