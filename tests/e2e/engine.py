"""Whether this machine has a Docker engine that can build and run the cluster."""

import json
import shutil
import subprocess

# The first whose builds take additional contexts.
OLDEST_ENGINE = 23


def why_no_engine() -> str | None:
    """None when `docker compose` can be used, else the reason why not."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    asked = _ask("docker", "version", "--format", "{{json .Server}}")
    if asked.returncode != 0:
        return f"no Docker engine answers: {asked.stderr.strip()}"
    version = str(json.loads(asked.stdout)["Version"])
    if int(version.split(".")[0]) < OLDEST_ENGINE:
        return f"the Docker engine is {version}; {OLDEST_ENGINE} or newer is needed"
    asked = _ask("docker", "compose", "version", "--short")
    return f"docker compose cannot be used: {asked.stderr.strip()}" if asked.returncode != 0 else None


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
