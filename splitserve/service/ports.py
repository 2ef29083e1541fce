"""Finds out, before anything is started, whether the ports that a local cluster needs are free."""

import socket
from collections.abc import Mapping

from splitserve.service.errors import InvalidRequest, Unavailable

LOOPBACK = "127.0.0.1"


def claim(asked: Mapping[str, int]) -> dict[str, int]:
    """Maps each flag to its port; 0 becomes a free port.

    Raises Unavailable naming the flag and the port for one that is in use, InvalidRequest for one asked for twice.
    """
    held: list[socket.socket] = []
    ports: dict[str, int] = {}
    try:
        for flag, port in asked.items():
            # Bound until all are found, so that no port is given out twice. Without SO_REUSEPORT this meets every
            # listener, also those of servers that would let a second one share their port.
            held.append(_bound(flag, port, ports))
            ports[flag] = held[-1].getsockname()[1]
    finally:
        for taken in held:
            taken.close()
    return ports


def _bound(flag: str, port: int, before: Mapping[str, int]) -> socket.socket:
    for other, taken in before.items():
        if port == taken:
            raise InvalidRequest(f"{flag} and {other} are both {port}", field=flag)
    candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        candidate.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        candidate.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise Unavailable(
            f"port {port} of {LOOPBACK} cannot be had: {reason}. Stop what uses it, or choose another with {flag}.",
            reason="PORT_IN_USE",
            field=flag,
        ) from None
    return candidate
