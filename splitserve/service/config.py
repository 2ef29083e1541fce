"""How every process reads its settings: one frozen dataclass is flags, environment (SPLITSERVE_*) and defaults at once.

Types here only say how a text becomes a value; the settings themselves are declared beside the process they belong to.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import cyclopts
import cyclopts.validators
from cyclopts import App, Parameter

from splitserve.service.errors import InvalidRequest, NotFound

C = TypeVar("C")

ENVIRONMENT_PREFIX = "SPLITSERVE_"

# sysexits.h: the configuration is wrong, so starting again cannot help; what was missing may be there later, so it can.
EXIT_CONFIG = 78
EXIT_TEMPORARY = 75

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}I": 1 << shift for letter, shift in (("K", 10), ("M", 20), ("G", 30), ("T", 40))
}
_DURATION_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0}


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "512M", "1000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_duration(text: str) -> float:
    """Seconds from "30s", "500ms", "2m", "1.5"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 30s")
    return float(match[1]) * _DURATION_UNITS[match[2] or ""]


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers from "0,2-3"."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of cores such as 0,2-3")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cores)


def parse_device(text: str) -> str:
    """Checks the words only: whether there is such a device, the engine finds out."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise ValueError(f"{text!r} is not a device such as auto, cpu, cuda or cuda:1")
    return text


def parse_transports(text: str) -> str:
    """Checks the words only: which of them can be had between two workers, these find out."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if names != ["auto"] and not set(names) <= {"zmq", "nccl", "gloo"}:
        raise ValueError(f"{text!r} is neither auto nor a list of zmq, nccl and gloo, the preferred one first")
    return ",".join(names)


def _converter(parse: Callable[[str], Any]) -> Parameter:
    def convert(_type: Any, tokens: Sequence[cyclopts.Token]) -> Any:
        return parse(tokens[0].value)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False)


Size = Annotated[int, _converter(parse_size)]
Duration = Annotated[float, _converter(parse_duration)]
NonNegative = Annotated[int, Parameter(validator=cyclopts.validators.Number(gte=0))]
Positive = Annotated[int, Parameter(validator=cyclopts.validators.Number(gte=1))]
Device = Annotated[str, _converter(parse_device)]
Transports = Annotated[str, _converter(parse_transports)]
Cores = Annotated[tuple[int, ...], _converter(parse_cores)]


def exit_status_of(error: Exception) -> int:
    """What a process that `error` kept from starting ends with: EXIT_CONFIG or EXIT_TEMPORARY."""
    return EXIT_CONFIG if isinstance(error, InvalidRequest | NotFound | ValueError) else EXIT_TEMPORARY


def new_app(name: str, help_text: str) -> App:
    """A command line whose options may also come from the environment."""
    return App(
        name=name,
        help=help_text,
        config=cyclopts.config.Env(ENVIRONMENT_PREFIX, command=False),
        default_parameter=Parameter(negative=""),
        result_action="return_value",
    )


def run_process(name: str, help_text: str, config_type: type[C], main: Callable[[C], int]) -> None:
    """Parses `config_type` from the command line and the environment, runs `main`, and ends the process with its
    result."""
    app = new_app(name, help_text)

    def command(config: Any) -> int:
        return main(config)

    # cyclopts reads annotations and defaults; the type is known only here.
    command.__defaults__ = (config_type(),)
    command.__annotations__ = {"config": Annotated[config_type, Parameter(name="*")], "return": int}
    app.default(command)
    try:
        status = app(exit_on_error=False)
    except cyclopts.CycloptsError:  # printed by cyclopts
        status = EXIT_CONFIG
    sys.exit(status)
