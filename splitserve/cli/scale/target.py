"""What a scale command asks for, and what it may not. Plain data and pure functions."""

import re
from collections.abc import Iterable, Mapping

from splitserve.cli.roster import ROLES
from splitserve.service.errors import InvalidRequest

MOST_OF_A_ROLE = 64
"""On one host; more is a slip of the keyboard, and would take the host's memory before anybody noticed."""

Target = Mapping[str, int]
"""The wanted number of workers by role; a role that is not there stays as it is."""


def parse_target(words: Iterable[str]) -> Target:
    """From words such as "decode=3". Raises InvalidRequest."""
    target: dict[str, int] = {}
    for word in words:
        match = re.fullmatch(rf"({'|'.join(ROLES)})=(\d{{1,9}})", word)
        if match is None:
            raise InvalidRequest(f"{word!r} is not a role and a number, such as decode=3 or prefill=2", field="targets")
        if match[1] in target:
            raise InvalidRequest(f"{match[1]} is given twice", field="targets")
        target[match[1]] = int(match[2])
        if target[match[1]] > MOST_OF_A_ROLE:
            raise InvalidRequest(
                f"{word}: {MOST_OF_A_ROLE} workers of a role are the most on one host", field="targets"
            )
    if not target:
        raise InvalidRequest("say what to scale, such as: splitserve scale decode=3", field="targets")
    return target


def refuse_unservable(target: Target, *, serves_without_prefill: bool) -> None:
    """Raises InvalidRequest for a role at 0 without which the router would refuse every request."""
    if target.get("decode") == 0:
        raise InvalidRequest("decode=0: nothing would be served without a decode worker", field="decode")
    if target.get("prefill") == 0 and not serves_without_prefill:
        raise InvalidRequest(
            "prefill=0: this router refuses requests while there is no prefill worker; one that was started with "
            "--without-prefill local has decode workers compute prompts (`splitserve up --prefill 0` starts it so)",
            field="prefill",
        )
