"""Entry point of the `splitserve` command: knows the commands' names, and turns what ended one into an exit status.

Exit status: 0 done, 1 refused or failed (the reason is on stderr), 2 a bad flag, 130 interrupted, 141 nobody reads the
output.
"""

import os
import sys

from cyclopts import App, Parameter

from splitserve.service.errors import SplitserveError
from splitserve.service.huge_pages import restart_with_huge_pages

INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13
_UNREACHABLE_HINT = "Is a router running there? Start one on this machine with: splitserve up"


def make_app() -> App:
    app = App(
        name="splitserve",
        help="Serves a language model with prefill and decode in different processes, and talks to such a cluster.",
        version=_version,
        default_parameter=Parameter(negative=""),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.command("splitserve.cli.generate:generate", help="Generate text from a prompt; it streams to stdout.")
    app.command("splitserve.cli.chat:chat", help="Talk with the model, turn by turn; also reads turns from a pipe.")
    app.command("splitserve.cli.status:status", help="Show the cluster's workers, queue and KV blocks.")
    app.command("splitserve.cli.up:app", name="up", help="Run a cluster on this machine until Ctrl-C.")
    app.command("splitserve.cli.scale.command:scale", name="scale", help="Change the number of workers of a role.")
    app.command("splitserve.cli.plan:plan", help="Say what one worker of a model carries, and how many it takes.")
    app.command("splitserve.cli.secret:app", name="secret", help="Make the secret that the parts of a cluster share.")
    app.command("splitserve.cli.bench:app", name="bench", help="Measure this machine, this installation, any server.")
    return app


def run() -> None:
    """Never returns: ends the process with the command's exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end an answer.
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    if sys.argv[1:3] == ["bench", "engine"]:  # it computes in this process what an engine's process computes
        restart_with_huge_pages()
    try:
        status = make_app()() or 0
        sys.stdout.flush()
    except SplitserveError as error:
        print_error(error)
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; that must find an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    sys.exit(status)


def print_error(error: SplitserveError) -> None:
    print(f"splitserve: {error.message}", file=sys.stderr)  # noqa: T201
    if error.reason == "UNREACHABLE":
        print(_UNREACHABLE_HINT, file=sys.stderr)  # noqa: T201
    elif error.retry_after_s is not None:
        print(f"It may work again in {error.retry_after_s:g} s.", file=sys.stderr)  # noqa: T201


def _version() -> str:
    from importlib.metadata import version  # costs more than the rest of a `--help`

    return version("splitserve")
