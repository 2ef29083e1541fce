"""Who is measured: each peer's name, what it needs, and how its processes are started on given cores.

How each was made to run on a processor is written beside it: these are the settings that did best, and where the
default does badly, the default has a row of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitserve.bench.load.openai_client import Api
from splitserve.bench.peers.environments import Environment, environment
from splitserve.bench.peers.servers import Process
from splitserve.service.errors import Unavailable
from splitserve.service.ports import LOOPBACK

# Two libraries that vLLM's build for processors leans on: without them one stream has half the tokens per second.
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
_NAME = "model"
_KV_GIB = "2"
_CONVERT_S = 600.0
_SLOTS, _SLOT_TOKENS = 9, 4096


@dataclass(frozen=True)
class Site:
    """Where peers run: `model` is the directory of the weights that all of them load, in bfloat16."""

    root: Path
    model: Path
    cores: Sequence[int]
    port: Callable[[], int]

    @property
    def halves(self) -> tuple[Sequence[int], Sequence[int]]:
        middle = max(1, len(self.cores) // 2)
        return self.cores[:middle], self.cores[middle:] or self.cores[:middle]

    def environment(self, name: str) -> Environment:
        """Raises Unavailable where it was not made."""
        found = environment(self.root, name)
        found.require()
        return found


@dataclass(frozen=True)
class Setup:
    """A peer that can be started; requests go to `url`."""

    processes: Sequence[Process]
    url: str
    extra_body: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    api: Api = "completions"
    model: str | None = None
    "None: what the server names itself."
    stream_tokens: int = 4000
    "A running stream's answer has so many, and then begins anew."


@dataclass(frozen=True)
class Peer:
    """`set_up` raises Unavailable where something that it needs is missing."""

    name: str
    title: str
    set_up: Callable[[Site], Setup]


# Ours


def _ours(*flags: str) -> Callable[[Site], Setup]:
    def set_up(site: Site) -> Setup:
        http, grpc, internal = site.port(), site.port(), site.port()
        url = f"http://{LOOPBACK}:{http}"
        command = [sys.executable, "-P", "-m", "splitserve", "up", "--model", str(site.model), *flags]
        command += ["--http-port", str(http), "--grpc-port", str(grpc), "--internal-port", str(internal)]
        return Setup(
            [Process(name="splitserve", command=command, cores=site.cores, ready_url=f"{url}/health/ready")], url
        )

    return set_up


# vLLM


def _vllm_process(site: Site, name: str, port: int, cores: Sequence[int], *flags: str, **environ: str) -> Process:
    env = site.environment("vllm")
    preload = [str(path) for path in (_TCMALLOC, env.folder / "lib" / "libiomp5.so") if path.is_file()]
    return Process(
        name=name,
        command=[
            *(str(env.python), str(env.folder / "bin" / "vllm"), "serve", str(site.model)),
            *("--served-model-name", _NAME, "--dtype", "bfloat16", "--host", LOOPBACK, "--port", str(port)),
            *flags,
        ],
        cores=cores,
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": _KV_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "LD_PRELOAD": ":".join(preload),
            **environ,
        },
        ready_url=f"http://{LOOPBACK}:{port}/health",
    )


def _vllm(*flags: str) -> Callable[[Site], Setup]:
    def set_up(site: Site) -> Setup:
        port = site.port()
        return Setup([_vllm_process(site, "vllm", port, site.cores, *flags)], f"http://{LOOPBACK}:{port}")

    return set_up


def _two_vllm(site: Site) -> Setup:
    ports = site.port(), site.port()
    both = zip(("vllm-first", "vllm-second"), ports, site.halves, strict=True)
    servers = [_vllm_process(site, name, port, cores) for name, port, cores in both]
    return _behind_proxy(site, servers, "round-robin", ports)


def _vllm_1p1d(site: Site) -> Setup:
    """As shipped: the connector pins both servers' threads to the last core, and its progress thread spins."""
    ports = site.port(), site.port()
    roles = zip(("kv_producer", "kv_consumer"), ports, site.halves, (5600, 5700), strict=True)
    servers = [
        _vllm_process(
            site,
            f"vllm-{role}",
            port,
            cores,
            "--kv-transfer-config",
            _NIXL_CONFIG.replace("ROLE", role),
            UCX_TLS="tcp,sm,self",
            UCX_NET_DEVICES="lo",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(side_port),
        )
        for role, port, cores, side_port in roles
    ]
    return _behind_proxy(site, servers, "prefill-decode", ports)


_NIXL_CONFIG = (
    '{"kv_connector": "NixlConnector", "kv_role": "ROLE", "kv_buffer_device": "cpu", '
    '"kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 4}}'
)


def _behind_proxy(site: Site, servers: Sequence[Process], mode: str, ports: Sequence[int]) -> Setup:
    port = site.port()
    url = f"http://{LOOPBACK}:{port}"
    urls = [f"http://{LOOPBACK}:{server}" for server in ports]
    command = [sys.executable, "-P", "-m", "splitserve.bench.peers.proxy", str(port), mode, *urls]
    front = Process(name="proxy", command=command, cores=site.cores, ready_url=f"{url}/v1/models")
    return Setup([*servers, front], url)


# llama.cpp and transformers


def _llama(*flags: str) -> Callable[[Site], Setup]:
    def set_up(site: Site) -> Setup:
        env = site.environment("llama")
        weights = _gguf(env, site.model)
        port, threads = site.port(), str(len(site.cores))
        url = f"http://{LOOPBACK}:{port}"
        command = [
            *(str(env.folder / "build" / "bin" / "llama-server"), "-m", str(weights), "--alias", _NAME),
            *("--host", LOOPBACK, "--port", str(port), "-t", threads, "-tb", threads, "-fa", "on"),
            *("-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS), "--no-kv-unified", "--cache-ram", "0"),
            *flags,
        ]
        process = Process(name="llama", command=command, cores=site.cores, ready_url=f"{url}/health")
        return Setup([process], url, {"ignore_eos": True, "cache_prompt": False})

    return set_up


def _gguf(env: Environment, model: Path) -> Path:
    """The same weights as llama.cpp reads them, made by its own converter and kept beside it."""
    digest = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
    weights = env.folder / f"{digest}.gguf"
    if not weights.is_file():
        converter = (env.folder / "converter.txt").read_text(encoding="utf-8").strip()
        partial = weights.with_suffix(".partial")
        command = [sys.executable, converter, str(model), "--outtype", "bf16", "--outfile", str(partial)]
        environ = os.environ | {"PYTHONPATH": str(env.converter_packages)}
        done = subprocess.run(  # noqa: S603
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CONVERT_S,
            check=False,
        )
        if done.returncode != 0:
            raise Unavailable(f"llama.cpp's converter failed: {done.stderr.strip().splitlines()[-1:]}")
        partial.rename(weights)
    return weights


def _transformers(site: Site) -> Setup:
    """Two tokens per second without the sizes given here."""
    env, port = site.environment("transformers"), site.port()
    url = f"http://{LOOPBACK}:{port}"
    command = [
        *(str(env.folder / "bin" / "transformers"), "serve", str(site.model), "--device", "cpu", "--dtype", "bfloat16"),
        *("--host", LOOPBACK, "--port", str(port), "--continuous-batching"),
        *("--cb-block-size", "32", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"),
    ]
    environ = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(site.cores))}
    process = Process(
        name="transformers", command=command, cores=site.cores, environment=environ, ready_url=f"{url}/health"
    )
    # Its own way to say ignore_eos.
    return Setup([process], url, {"generation_config": json.dumps({"eos_token_id": -1})})


PEERS: Sequence[Peer] = (
    Peer("split", "splitserve, 1 prefill + 1 decode", _ours()),
    Peer("aggregated", "splitserve, aggregated", _ours("--prefill", "0")),
    Peer("vllm", "vLLM, default", _vllm()),
    Peer("vllm-256", "vLLM, --max-num-batched-tokens 256", _vllm("--max-num-batched-tokens", "256")),
    Peer("vllm-two", "two vLLM on half the cores each", _two_vllm),
    Peer("vllm-1p1d", "vLLM 1P1D, NixlConnector as shipped", _vllm_1p1d),
    Peer("llama", "llama.cpp server", _llama()),
    Peer("llama-256", "llama.cpp server, -b 256 -ub 256", _llama("-b", "256", "-ub", "256")),
    Peer("transformers", "transformers serve, continuous batching", _transformers),
)
"""Servers. `sequential` has two more rows, which are none."""
