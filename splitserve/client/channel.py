"""Where a client connects and how its channel behaves; both clients use it."""

import ipaddress
import os
from urllib.parse import urlsplit

from splitserve.service.limits import GRPC_MESSAGE_OPTIONS

DEFAULT_TARGET = "localhost:50051"
TARGET_VARIABLE = "SPLITSERVE_TARGET"


def resolve_target(target: str | None) -> str:
    """`target`, else the environment's SPLITSERVE_TARGET, else localhost:50051."""
    return target or os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET


def channel_options(target: str) -> list[tuple[str, int]]:
    options = [
        *GRPC_MESSAGE_OPTIONS,
        # A router that has just come up is found within a second; gRPC's own back-off grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if is_loopback(target):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy of the environment cannot reach this machine's loopback
    return options


def is_loopback(target: str) -> bool:
    """Whether a gRPC target or a URL names this machine's loopback."""
    try:
        host = urlsplit(target if "//" in target else f"//{target}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
