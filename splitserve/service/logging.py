"""Sets up structured logging for one process; its `__main__` calls `configure_logging` once, before anything logs.

Log an event name in snake_case and key-value pairs: `structlog.get_logger().info("worker_joined", worker_id=...)`.
Everything goes to stderr: stdout belongs to what a command prints.

**Prompts, generated text, token ids and secrets never go into a log line**, at any level: logs are copied to places
where requests must not be. Log lengths, counts and ids of requests instead. `_withhold` is the net under that rule, not
a licence to pass such values: it blanks the keys that such values usually come under.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LOG_FORMAT_VARIABLE = "SPLITSERVE_LOG_FORMAT"
"""Environment variable, "console" or "json": the form where the caller leaves it open, as under a supervisor."""

_WITHHELD_KEYS = frozenset(
    {
        "api_key",
        "authorization",
        "content",
        "messages",
        "output_ids",
        "password",
        "prompt",
        "prompt_ids",
        "secret",
        "secret_key",
        "text",
        "token_ids",
    }
)
# One line per HTTP or RPC call says nothing that our own lines do not say better.
_NOISY_LOGGERS = ("asyncio", "filelock", "grpc", "httpcore", "httpx", "huggingface_hub", "urllib3", "uvicorn.access")


def configure_logging(
    role: str, level: str = "info", json: bool | None = None, *, stream: TextIO | None = None
) -> None:
    """Sends every log line of this process, structlog's and the standard library's, to stderr.

    `role` ("router", "prefill_worker", …) and the process id are in every line. `level` is a standard level name in any
    case; ValueError if it is none. `json` chooses JSON lines or console form; None means what SPLITSERVE_LOG_FORMAT
    says, else console form on a terminal and JSON lines elsewhere. Calling it again replaces the set-up.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is none of debug, info, warning, error, critical")
    stream = stream or sys.stderr
    as_json = _wants_json(stream) if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _process_adder(role),
        _withhold,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(as_json, colors=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    # gRPC's core writes its own lines past this set-up; from errors on is enough. It reads this at first use.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _wants_json(stream: TextIO) -> bool:
    asked = os.environ.get(LOG_FORMAT_VARIABLE, "").lower()
    return asked == "json" if asked in {"json", "console"} else not stream.isatty()


def _renderers(as_json: bool, *, colors: bool) -> list[Processor]:
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # Rich tracebacks would print local variables, and with them prompts.
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]


def _process_adder(role: str) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def add(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["role"] = role
        event["pid"] = os.getpid()
        return event

    return add


def _withhold(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for key in _WITHHELD_KEYS & event.keys():
        event[key] = "(withheld)"
    event.pop("color_message", None)  # uvicorn's second copy of its message, for terminals
    return event
