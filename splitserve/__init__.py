"""splitserve: LLM serving that runs prefill and decode in different processes.

An application needs two names from here, `Client` and `AsyncClient`; they load on first use, so that importing any
other part of the package costs nothing of theirs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.client.aio import AsyncClient
    from splitserve.client.sync import Client

__all__ = ["AsyncClient", "Client", "__version__"]

_HOMES = {"AsyncClient": "splitserve.client.aio", "Client": "splitserve.client.sync"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("splitserve")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
