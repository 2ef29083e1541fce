"""The error tree over a real call, in both directions."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from splitserve import Client
from splitserve.service.errors import ERRORS_BY_GRPC_CODE, SplitserveError
from splitserve.service.grpc_errors import from_rpc_error, to_status
from tests.client import fake_router


class LocalRpcError(grpc.RpcError):
    """An RpcError that never travelled."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        self._parts = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


@pytest.mark.parametrize("kind", ERRORS_BY_GRPC_CODE.values())
def test_error_changed_on_the_wire(
    kind: type[SplitserveError], router: fake_router.FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = kind("prompt has 9 tokens, limit 8", reason="PROMPT_TOO_LONG", field="prompt", retry_after_s=0.25)
    got = _round_trip(sent, router, monkeypatch)
    assert type(got) is kind
    assert (got.message, got.reason, got.field, got.retry_after_s) == (
        sent.message,
        sent.reason,
        sent.field,
        sent.retry_after_s,
    )


@pytest.mark.parametrize("text", ["x" * 100_000, "\u20ac" * 100_000, "bad \ud800 text" * 10_000])
def test_long_or_broken_message_lost_the_status(
    text: str, router: fake_router.FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = ERRORS_BY_GRPC_CODE["INVALID_ARGUMENT"](text, field="prompt")
    got = _round_trip(sent, router, monkeypatch)
    assert got.grpc_code == "INVALID_ARGUMENT"
    assert got.field == "prompt"
    assert text.startswith(got.message[:3])


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN])
def test_foreign_code_escaped_the_tree(code: grpc.StatusCode) -> None:
    error = from_rpc_error(LocalRpcError(code, "what"))
    assert (error.grpc_code, error.reason, error.message) == ("INTERNAL", code.name, "what")


def test_garbled_details_hid_the_status() -> None:
    garbled = LocalRpcError(grpc.StatusCode.NOT_FOUND, "no such model", (("grpc-status-details-bin", b"\xff\xff"),))
    assert from_rpc_error(garbled).grpc_code == "NOT_FOUND"


def test_code_of_the_status_differs_from_the_tree() -> None:
    for name, kind in ERRORS_BY_GRPC_CODE.items():
        assert to_status(kind("m")).code is grpc.StatusCode[name]


def _round_trip(
    error: SplitserveError, router: fake_router.FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> SplitserveError:
    async def script(_: fake_router.FakeRouter) -> AsyncIterator[fake_router.Response]:
        raise error
        yield

    monkeypatch.setitem(fake_router.SCRIPTS, "raise", script)
    with Client(router.target) as client, pytest.raises(SplitserveError) as caught:
        client.generate("raise")
    return caught.value
