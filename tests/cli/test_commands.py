"""The commands as a user runs them: processes, their output and their exit status."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console

from splitserve.cli.status import render
from tests.client.fake_router import WORDS, FakeRouter

PATIENCE_S = 60.0
COMMAND = (sys.executable, "-P", "-c", "from splitserve.cli.main import run; run()")
BLOCKS = {"total": 64, "free": 60, "cached": 1, "in_use": 2, "reserved": 1}
CLUSTER = {
    "model": "fake",
    "ready": True,
    "aggregated": False,
    "pool": BLOCKS,
    "queue": {"requests": 3, "prompt_tokens": 99},
    "workers": [
        {
            "id": "0123456789abcdef",
            "role": "decode",
            "pid": 42,
            "host": "h",
            "state": "ready",
            "device": "cuda[1]",
            "transport": "zmq",
            "blocks": BLOCKS,
            "running": 2,
            "waiting": 0,
            "links": {},
            "recompute_exact": True,
        }
    ],
}


def run(*args: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"COLUMNS": "80"} | (env or {}),
    )


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as running:
        yield running


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def test_text_and_statistics_were_mixed(router: FakeRouter) -> None:
    done = run("generate", "Where?", "--target", router.target, "--stop", "a", "--stop", "b", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, "".join(WORDS) + "\n")
    assert "3 prompt tokens (2 cached), 4 tokens" in done.stderr
    assert f"end: stop, 2 attempts; seed {2**63 + 1}" in done.stderr
    params = router.requests[0].sampling_params
    assert (list(params.stop), params.temperature, params.max_tokens) == (["a", "b"], 0.0, 256)
    assert params.HasField("temperature")
    assert not params.HasField("seed")


def test_sampling_flag_does_nothing(router: FakeRouter) -> None:
    flags = "--top-p 0.9 --top-k 5 --min-p 0.1 --min-tokens 2 --ignore-eos --seed 7 --repetition-penalty 1.2 "
    flags += "--presence-penalty -0.5 --frequency-penalty 0.25 --stop-token-ids 5 --stop-token-ids 9 "
    flags += "--logit-bias 50 -100 --logit-bias 7 2.5 --logprobs 3 --prompt-logprobs 0"
    done = run("generate", "Where?", "--target", router.target, *flags.split())
    assert done.returncode == 0, done.stderr
    params = router.requests[0].sampling_params
    assert (params.top_p, params.top_k, params.min_p, params.min_tokens) == (0.9, 5, 0.1, 2)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, -0.5, 0.25)
    assert (list(params.stop_token_ids), params.ignore_eos, params.seed) == ([5, 9], True, 7)
    assert (dict(params.logit_bias), params.logprobs, params.prompt_logprobs) == ({50: -100.0, 7: 2.5}, 3, 0)


def test_logprobs_were_asked_for_uninvited(router: FakeRouter) -> None:
    assert run("generate", "Where?", "--target", router.target).returncode == 0
    params = router.requests[0].sampling_params
    assert {field.name for field, _ in params.ListFields()} == {"max_tokens"}


def test_samples_were_lost_or_mixed(router: FakeRouter) -> None:
    done = run("generate", "three", "--n", "3", "--target", router.target)
    assert (done.returncode, done.stdout) == (0, "[0]\naaa\n[1]\nb\n[2]\nccc\n")
    assert "5 tokens" in done.stderr
    assert "end: length, stop, length, 3 attempts" in done.stderr
    assert router.requests[0].sampling_params.n == 3


def test_timings_are_not_told_or_in_the_text(router: FakeRouter) -> None:
    done = run("generate", "timings", "--timings", "--quiet", "--target", router.target)
    assert (done.returncode, done.stdout) == (0, "a\n")
    assert done.stderr == (
        "[tokenize 0.500 s, queue 1.000 s, prefill 2.000 s, hand-off 4.000 s, decode 8.000 s; 4,096 bytes sent]\n"
    )


TABLES = """\
 prompt   token   logprob  likeliest in its place
      0       5
      1       6   -2.5000  0 -0.5000
      2       7      -inf
 answer   token   logprob  text  likeliest in its place
      0       1   -0.2500  'x'   1 -0.2500, 9 -4.0000
      1       2    0.0000  'x'   2 0.0000, 9 -4.0000
"""


def test_echo_is_lost_or_asked_of_a_chat(router: FakeRouter) -> None:
    done = run("generate", "echo", "--echo", "--max-tokens", "0", "--quiet", "--target", router.target)
    assert (done.returncode, done.stdout) == (0, "echoa\n")
    assert router.requests[-1].sampling_params.HasField("max_tokens")
    router.has_chat_template = True
    done = run("generate", "echo", "--echo", "--target", router.target)
    assert done.returncode != 0
    assert "--raw" in done.stderr
    assert len(router.requests) == 1


@pytest.mark.parametrize("args", [("generate", "logprobs", "--quiet"), ("chat",)])
def test_logprobs_were_lost_or_mixed_into_the_text(args: tuple[str, ...], router: FakeRouter) -> None:
    done = run(*args, "--target", router.target, "--logprobs", "2", "--prompt-logprobs", "1", stdin="logprobs\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "xx\n", TABLES)


def test_prompt_logprobs_counted_as_the_first_token(router: FakeRouter) -> None:
    """They come before it, and tell nothing of how long it took."""
    done = run("generate", "slow prompt", "--target", router.target, "--prompt-logprobs", "0")
    (first_s,) = re.findall(r"first after ([\d.]+) s", done.stderr)
    assert float(first_s) >= 0.3


def test_quiet_was_not_quiet(router: FakeRouter) -> None:
    done = run("generate", "Where?", "--quiet", env={"SPLITSERVE_TARGET": router.target})
    assert (done.returncode, done.stderr) == (0, "")


def test_piped_prompt_was_ignored(router: FakeRouter) -> None:
    assert run("generate", "--target", router.target, stdin="from a pipe\n").returncode == 0
    assert router.requests[0].text == "from a pipe\n"


def test_question_was_sent_as_a_text_to_continue(router: FakeRouter) -> None:
    """A chat model asked without its template may say nothing at all; --raw is for who wants just that."""
    router.has_chat_template = True
    assert run("generate", "Where?", "--target", router.target).returncode == 0
    assert run("generate", "Where?", "--target", router.target, "--raw").returncode == 0
    asked, continued = router.requests
    assert [(turn.role, turn.content) for turn in asked.chat.messages] == [("user", "Where?")]
    assert continued.text == "Where?"


def test_interrupt_left_the_request_running_or_hid_the_text(router: FakeRouter) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "forever", "--target", router.target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 6) == b"first "  # before the answer is over
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest, errors) == (130, b"\n", b"")
    assert router.cancelled.wait(PATIENCE_S)


def test_reader_that_left_kept_the_request_running(router: FakeRouter) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "Where?", "--target", router.target], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_half_an_answer_exited_with_success(router: FakeRouter) -> None:
    done = run("generate", "fail midway", "--target", router.target)
    assert (done.returncode, done.stdout) == (1, "half an \n")
    assert done.stderr == "splitserve: attempt 3 of 3 failed\n"


def test_refusal_did_not_say_when_to_retry(router: FakeRouter) -> None:
    done = run("generate", "refuse", "--target", router.target)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "splitserve: queue holds 64 of 64 requests\nIt may work again in 1.5 s.\n"


@pytest.mark.parametrize("args", [("generate", "Where?", "--target"), ("chat", "--target")])
def test_dead_router_left_the_user_without_a_hint(args: tuple[str, ...], free_port: int) -> None:
    done = run(*args, f"127.0.0.1:{free_port}", stdin="Where?\n")
    assert done.returncode == 1
    assert f"127.0.0.1:{free_port}" in done.stderr
    assert "splitserve up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "a", "--max-tokens", "-1"),
        ("generate", "a", "--no-such-flag"),
        ("fly",),
        ("chat", "--logit-bias", "5"),
    ],
)
def test_bad_flag_was_accepted(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_chat_forgot_earlier_turns(router: FakeRouter) -> None:
    done = run("chat", "--target", router.target, "--system", "Be brief.", stdin="Where?\n\nAnd then?\n")
    assert (done.returncode, done.stdout) == (0, ("".join(WORDS) + "\n") * 2)
    second = [(message.role, message.content) for message in router.requests[1].chat.messages]
    assert second == [
        ("system", "Be brief."),
        ("user", "Where?"),
        ("assistant", "".join(WORDS)),
        ("user", "And then?"),
    ]


def test_interrupted_answer_ended_the_chat_or_stayed_in_it(router: FakeRouter) -> None:
    terminal, its_stdin = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--target", router.target], stdin=its_stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.write(terminal, b"forever\n")
    assert process.stdout is not None
    seen = b""
    while b"first " not in seen:
        seen += os.read(process.stdout.fileno(), 100)
    process.send_signal(signal.SIGINT)
    assert router.cancelled.wait(PATIENCE_S)
    os.write(terminal, b"refuse\n")
    os.write(terminal, b"Where?\n")
    while b"".join(map(str.encode, WORDS)) not in seen:
        seen += os.read(process.stdout.fileno(), 100)
    os.write(terminal, b"\x04")
    _, errors = process.communicate(timeout=PATIENCE_S)
    os.close(terminal)
    os.close(its_stdin)
    assert process.returncode == 0
    assert b"queue holds 64 of 64 requests" in errors
    assert [message.content for message in router.requests[2].chat.messages] == ["Where?"]


class ClusterHandler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, str]]] = {
        "/cluster": (200, json.dumps(CLUSTER)),
        "/other/cluster": (200, '{"model": "fake"}'),
        "/text/cluster": (200, "<html>"),
        "/error/cluster": (500, "broken"),
    }

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing: the tests read what the command prints."""


@pytest.fixture
def cluster_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), ClusterHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_status_lost_a_part_of_the_cluster(cluster_url: str) -> None:
    done = run("status", "--url", cluster_url)
    assert done.returncode == 0
    for part in ("fake", "3 requests, 99 prompt tokens", "64 total, 60 free, 1 cached, 2 in use, 1 reserved"):
        assert part in done.stdout
    row = next(line for line in done.stdout.splitlines() if "0123456789abcdef" in line)
    assert row.split() == ["0123456789abcdef", "decode", "ready", "42", "cuda[1]", "2", "0", "61/64"]


def test_status_hides_that_prefill_workers_are_missing() -> None:
    console = Console(record=True, width=80)
    for is_aggregated in (False, True):
        console.print(render(CLUSTER | {"aggregated": is_aggregated}))
        assert ("decode workers compute prompts" in console.export_text()) == is_aggregated


def test_status_hides_a_slow_link_or_one_that_is_down() -> None:
    """Of many links those are left out that nobody needs to look at."""
    links: dict[str, Any] = {
        "d-fast": {"reachable": True, "detail": "ipc", "bytes_per_s": 2_500_000_000},
        "d-slow": {"reachable": True, "detail": "tcp", "bytes_per_s": 110_000_000},
        "d-down": {"reachable": False, "detail": "[refused]", "bytes_per_s": None},
    }
    links |= {f"d-{index:02}": {"reachable": True, "detail": "ipc", "bytes_per_s": None} for index in range(20)}
    [worker] = CLUSTER["workers"]
    console = Console(record=True, width=80, markup=False)
    console.print(render(CLUSTER | {"workers": [worker | {"links": links}]}))
    shown = console.export_text()
    lines = [line.split()[1:] for line in shown.splitlines() if " d-" in line]
    assert lines[:3] == [["d-down", "[refused]", "-"], ["d-slow", "tcp", "110"], ["d-fast", "ipc", "2,500"]]
    assert (len(lines), lines[-1]) == (20, ["d-16", "ipc", "-"])
    assert "and 3 more links" in shown


def test_status_hides_what_is_wrong_with_a_link_that_works() -> None:
    why = "not what was asked for first: nccl: no GPU"
    links = {
        f"d-{index}": {"reachable": True, "detail": "tcp", "bytes_per_s": None, "warning": why if index else None}
        for index in range(4)
    }
    [worker] = CLUSTER["workers"]
    console = Console(record=True, width=200, markup=False)
    console.print(render(CLUSTER | {"workers": [worker | {"links": links}]}))
    [line] = [line for line in console.export_text().splitlines() if "warning" in line]
    assert line.rstrip() == f"warning: {worker['id']} to d-1 and 2 more: {why}"


def test_status_json_was_not_what_the_router_said(cluster_url: str) -> None:
    done = run("status", "--json", env={"SPLITSERVE_URL": cluster_url + "/", "http_proxy": "http://127.0.0.1:9"})
    assert done.returncode == 0
    assert json.loads(done.stdout) == CLUSTER


@pytest.mark.parametrize("path", ["/other", "/text", "/error"])
def test_strange_answer_ended_in_a_traceback(cluster_url: str, path: str) -> None:
    done = run("status", "--url", cluster_url + path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"splitserve: {cluster_url}{path}")


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "http://[", "nonsense"])
def test_status_of_nothing_ended_in_a_traceback(url: str, free_port: int) -> None:
    done = run("status", "--url", url.format(free_port))
    assert done.returncode == 1
    assert done.stderr.startswith("splitserve: ")
    assert "Traceback" not in done.stderr


def test_version_or_help_failed() -> None:
    assert run("--version").stdout.strip().count(".") == 2
    for command in ([], ["generate"], ["chat"], ["status"], ["up"]):
        assert run(*command, "--help").returncode == 0
