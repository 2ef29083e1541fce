"""Huge pages for processes that read all of a model's weights in every step.

With pages of 4 KiB the processor spends a tenth and more of a step looking up addresses. glibc takes huge pages when it
is told so before a process starts; where the kernel has none to give (its setting "never"), nothing changes. The front
of a worker starts its engine so, and the engine's benchmark itself.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"
_MADVISE = "1"  # transparent ones, asked for by address: no pages have to be set aside


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a new process that is to have them; whoever has chosen the tunable already keeps that."""
    tunables = [each for each in environment.get(_VARIABLE, "").split(":") if each]
    if not any(each.startswith(f"{_TUNABLE}=") for each in tunables):
        tunables.append(f"{_TUNABLE}={_MADVISE}")
    return {**environment, _VARIABLE: ":".join(tunables)}


def restart_with_huge_pages() -> None:
    """Replaces this process by the same command with them; returns at once in a process that was started so."""
    environment = with_huge_pages(os.environ)
    if environment != dict(os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


def huge_page_nbytes() -> int:
    """Bytes of this process's memory that lie in huge pages now; 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith("AnonHugePages:")]
    return int(sizes[0]) * 1024 if sizes else 0
