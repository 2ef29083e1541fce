"""A real Prometheus for the project: its program, and questions to it from inside of the cluster's network."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.project import Project

PROGRAMS = ("prometheus", "promtool")

_ASK = """
import sys, urllib.parse, urllib.request
path, _, query = sys.argv[1].partition(" ")
url = "http://prometheus:9090" + path + ("?" + urllib.parse.urlencode({"query": query}) if query else "")
sys.stdout.write(urllib.request.urlopen(url, timeout=20).read().decode())
"""


def find_prometheus(folder: Path) -> str | None:
    """Puts the programs `prometheus` and `promtool` into `folder`: what this machine has installed, or the
    distribution's package. None for success, else the reason why there are none."""
    if all((folder / name).exists() for name in PROGRAMS):
        return None
    installed = [shutil.which(name) for name in PROGRAMS]
    if None in installed:
        package = folder / "package"
        package.mkdir(exist_ok=True)
        for command in (["apt-get", "download", "prometheus"], ["sh", "-c", "dpkg-deb -x prometheus_*.deb ."]):
            try:
                done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=300)
            except OSError as error:
                return f"there is no program prometheus here, and no package of it: {error}"
            if done.returncode != 0:
                return f"there is no program prometheus here, and no package of it: {done.stderr.strip()}"
        installed = [str(package / "usr/bin" / name) for name in PROGRAMS]
    for program in installed:
        shutil.copy(str(program), folder)
    shutil.rmtree(folder / "package", ignore_errors=True)
    return None


def ask(project: Project, path: str, query: str = "") -> Any:
    """What its API answers, as `data`."""
    text = project.compose("exec", "-T", "router", "python", "-c", _ASK, f"{path} {query}".strip())
    answer = json.loads(text)
    assert answer["status"] == "success", answer
    return answer["data"]
