"""Log lines: complete, parseable, and without what must not be in them."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from splitserve.service.logging import configure_logging


@pytest.fixture(autouse=True)
def untouched_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_line_lacked_who_wrote_it() -> None:
    stream = io.StringIO()
    configure_logging("router", json=True, stream=stream)
    structlog.get_logger().info("worker_joined", worker_id="w1")
    logging.getLogger("somewhere").warning("from %s", "elsewhere")
    ours, theirs = lines(stream)
    assert (ours["event"], ours["worker_id"], ours["role"], ours["level"]) == ("worker_joined", "w1", "router", "info")
    assert (theirs["event"], theirs["role"], theirs["logger"]) == ("from elsewhere", "router", "somewhere")


def test_prompt_or_secret_reached_a_line() -> None:
    stream = io.StringIO()
    configure_logging("router", json=True, stream=stream)
    structlog.get_logger().error("bad", prompt="my diary", api_key="hunter2", token_ids=[1, 2], num_tokens=2)
    assert "diary" not in stream.getvalue()
    assert "hunter2" not in stream.getvalue()
    assert lines(stream)[0]["token_ids"] == "(withheld)"
    assert lines(stream)[0]["num_tokens"] == 2


@pytest.mark.parametrize("as_json", [True, False])
def test_traceback_printed_local_variables(as_json: bool) -> None:
    stream = io.StringIO()
    configure_logging("router", json=as_json, stream=stream)
    diary = "my " + "diary"
    try:
        raise RuntimeError(f"length {len(diary)}")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    assert "length 8" in stream.getvalue()
    assert "my diary" not in stream.getvalue()


def test_level_was_ignored() -> None:
    stream = io.StringIO()
    configure_logging("router", "warning", json=True, stream=stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("httpx").info("HTTP Request: GET")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_noisy_libraries_logged_each_call() -> None:
    stream = io.StringIO()
    configure_logging("router", "debug", json=True, stream=stream)
    logging.getLogger("httpx").info("HTTP Request: GET")
    assert stream.getvalue() == ""


def test_unknown_level_was_accepted() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        configure_logging("router", "loud")


def test_format_of_the_environment_was_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_LOG_FORMAT", "console")
    stream = io.StringIO()
    configure_logging("router", stream=stream)
    structlog.get_logger().info("hello")
    assert "hello" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
