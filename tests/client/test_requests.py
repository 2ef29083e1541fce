"""Values that cannot travel are refused by name, without repeating the prompt."""

import math
import subprocess
import sys
from typing import Any

import pytest

from splitserve.client import requests
from splitserve.client.channel import is_loopback
from splitserve.service.errors import InvalidRequest

SECRET = "my secret prompt"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (SECRET + "\ud800", {}, "prompt"),
        ([1, 2**64], {}, "prompt"),
        ([1, "2"], {}, "prompt"),
        ([1, 2.5], {}, "prompt"),
        (None, {}, "prompt"),
        ([{"role": "user", "content": SECRET + "\udfff"}], {}, "messages"),
        ([{"role": "user"}], {}, "messages"),
        ([{"role": "user", "content": "a", "name": "b"}], {}, "messages"),
        ([{"role": "user", "content": "a"}, 7], {}, "messages"),
        ("a", {"max_tokens": 2**31}, "max_tokens"),
        ("a", {"seed": -1}, "seed"),
        ("a", {"seed": 2**64}, "seed"),
        ("a", {"temperature": "hot"}, "temperature"),
        ("a", {"stop": ["\ud800"]}, "stop"),
        ("a", {"stop": [1]}, "stop"),
        ("a", {"logit_bias": {"x": 1.0}}, "logit_bias"),
        ("a", {"request_id": "\ud800"}, "request_id"),
        ("a", {"priority": 2**40}, "priority"),
        ("a", {"timeout": 0.0}, "timeout"),
        ("a", {"timeout": math.nan}, "timeout"),
        ("a", {"timeout": math.inf}, "timeout"),
    ],
)
def test_value_that_cannot_travel_escaped_as_another_error(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests.generate_call(prompt, options, 60.0)
    assert caught.value.field == field
    assert SECRET not in caught.value.message


def test_misspelt_option_was_swallowed() -> None:
    options: Any = {"max_token": 3}
    with pytest.raises(TypeError, match="unknown option max_token"):
        requests.generate_call("a", options, 60.0)


def test_single_stop_string_was_split_into_letters() -> None:
    assert list(requests.sampling_params({"stop": "END"}).stop) == ["END"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("http://127.0.0.1:8000", True),
        ("router:50051", False),
        ("10.0.0.1:50051", False),
        ("dns:///router:50051", False),
        ("http://[", False),
    ],
)
def test_loopback_was_misjudged(target: str, expected: bool) -> None:
    assert is_loopback(target) is expected


def test_import_of_the_package_pulled_in_heavy_modules() -> None:
    code = (
        "import sys, splitserve\n"
        "early = {'grpc', 'google.protobuf', 'importlib.metadata'} & sys.modules.keys()\n"
        "assert not early, early\n"
        "from splitserve import Client, AsyncClient\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'msgspec', 'zmq'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
