"""`splitserve status`: the router's `GET /cluster`, as a table or as it is."""

import json as json_module
import math
import sys
from typing import Annotated, Any

import httpx
from cyclopts import Parameter
from rich.console import Console, Group
from rich.table import Table

from splitserve.client.channel import is_loopback
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.grpc_errors import UNREACHABLE

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
BLOCK_STATES = ("total", "free", "cached", "in_use", "reserved")
MAX_LINKS = 20


def status(
    *,
    url: Annotated[str, Parameter(env_var="SPLITSERVE_URL")] = DEFAULT_URL,
    json: bool = False,
) -> None:
    """Show the cluster's workers, queue and KV blocks.

    Parameters
    ----------
    url
        Router's HTTP address.
    json
        Print the router's answer as it is.
    """
    text = fetch(f"{url if '://' in url else f'http://{url}'}".rstrip("/") + "/cluster")
    if json:
        sys.stdout.write(text.rstrip("\n") + "\n")
        return
    try:
        rendered = render(json_module.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise Internal(f"{url} did not answer as a splitserve router does: {error!r}") from error
    Console(markup=False, highlight=False).print(rendered)


def fetch(url: str) -> str:
    """The body of a 200 answer; raises Unavailable or Internal for anything else."""
    try:
        # A proxy of the environment cannot reach this machine's loopback.
        response = httpx.get(url, timeout=TIMEOUT_S, trust_env=not is_loopback(url))
    except httpx.InvalidURL as error:
        raise Internal(f"{url} is no address: {error}") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} does not answer: {error}", reason=UNREACHABLE) from error
    if response.status_code != httpx.codes.OK:
        raise Internal(f"{url} answered {response.status_code}: {response.text[:200]}")
    return response.text


def render(cluster: dict[str, Any]) -> Group:
    """Raises KeyError or TypeError where `cluster` is not what GET /cluster promises."""
    queue = cluster["queue"]
    summary = Table(box=None, show_header=False)
    summary.add_row("model", str(cluster["model"]))
    summary.add_row("ready", "yes" if cluster["ready"] else "no")
    if cluster.get("aggregated"):
        summary.add_row("mode", "aggregated: decode workers compute prompts themselves")
    summary.add_row("queue", f"{queue['requests']} requests, {queue['prompt_tokens']} prompt tokens")
    summary.add_row("KV blocks", _blocks(cluster["pool"]))
    workers = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    # 80 columns have room for these; the rest is in --json.
    for heading in ("worker", "role", "state", "pid", "device", "running", "waiting", "free + cached"):
        workers.add_column(heading, overflow="fold")
    for worker in sorted(cluster["workers"], key=lambda worker: (worker["role"], worker["id"])):
        counts = worker["blocks"]
        cells = [worker[key] for key in ("id", "role", "state", "pid", "device", "running", "waiting")]
        # Cached blocks are given up as soon as they are needed.
        workers.add_row(*map(str, cells), f"{counts['free'] + counts['cached']}/{counts['total']}")
    if not cluster["workers"]:
        return Group(summary, "", "no workers have joined")
    return Group(summary, "", workers, *_links(cluster["workers"]))


def _links(workers: list[dict[str, Any]]) -> list[Table | str]:
    """Those that are down come first, then the slowest; what has not been measured comes last."""
    links = [(worker["id"], peer, link) for worker in workers for peer, link in worker["links"].items()]
    if not links:
        return []
    links.sort(key=lambda link: (link[2]["reachable"], link[2].get("bytes_per_s") or math.inf, link[0], link[1]))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("from", "to", "link", "MB/s"):
        table.add_column(heading, overflow="fold")
    for source, peer, link in links[:MAX_LINKS]:
        speed = link.get("bytes_per_s")
        table.add_row(source, peer, str(link["detail"]), f"{speed / 1e6:,.0f}" if speed else "-")
    num_left = len(links) - MAX_LINKS
    left = [f"and {num_left} more links, see --json"] if num_left > 0 else []
    return ["", table, *left, *_warnings(links)]


def _warnings(links: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Each once, with the first of the links that it is about."""
    about: dict[str, list[str]] = {}
    for source, peer, link in links:
        if warning := link.get("warning"):
            about.setdefault(warning, []).append(f"{source} to {peer}")
    return [
        f"warning: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {warning}"
        for warning, names in about.items()
    ]


def _blocks(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state.replace('_', ' ')}" for state in BLOCK_STATES)
