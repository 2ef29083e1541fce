"""Huge pages: who asks for them gets them, and nothing else about the process changes."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.service.huge_pages import with_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RESTARTED = """
import os, sys
from splitserve.service.huge_pages import huge_page_nbytes, restart_with_huge_pages
print("began", flush=True)
restart_with_huge_pages()
memory = bytearray(64 << 20)
for at in range(0, len(memory), 4096):
    memory[at] = 1
print(os.environ["GLIBC_TUNABLES"], sys.argv[1:], huge_page_nbytes())
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0:glibc.malloc.check=1"},
            "glibc.malloc.hugetlb=0:glibc.malloc.check=1",
        ),
    ],
    ids=["none", "others", "chosen"],
)
def test_environment_loses_what_someone_chose(before: dict[str, str], after: str) -> None:
    assert with_huge_pages({"PATH": "/bin"} | before) == {"PATH": "/bin", "GLIBC_TUNABLES": after}


def _restarted(tunables: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-P", "-c", _RESTARTED, "--flag", "two words"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()


def test_restarted_process_is_another_command_or_restarts_for_ever() -> None:
    *began, told = _restarted(None)
    assert began == ["began", "began"]
    assert told.startswith("glibc.malloc.hugetlb=1 ['--flag', 'two words'] ")


def test_process_that_was_started_so_restarts() -> None:
    began, told = _restarted("glibc.malloc.hugetlb=0")
    assert told == "glibc.malloc.hugetlb=0 ['--flag', 'two words'] 0"
    assert began == "began"


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this kernel gives no transparent huge pages"
)
def test_memory_stays_in_small_pages() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("this C library is not glibc")
    assert int(_restarted(None)[-1].split()[-1]) >= 32 << 20
