"""Prints what pyproject.toml asks for, one requirement a line: `python requirements.py FILE [EXTRA …]`.

The image build installs these before it copies the source, so that a changed line of code does not download torch
again. Runs on a bare Python 3.11.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Sorted; `pyproject` is the file's text. Raises KeyError for an extra that is not declared."""
    project = tomllib.loads(pyproject)["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return sorted(set(found))


if __name__ == "__main__":
    for line in requirements(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2:]):
        print(line)  # noqa: T201 - the output is the purpose
