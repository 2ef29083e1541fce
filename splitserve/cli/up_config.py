"""The settings of `splitserve up`, one declaration for flags, environment (SPLITSERVE_*) and defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from splitserve.service.config import Device, NonNegative, Positive, Size, Transports

_WORKER_FLAGS = (
    "dtype",
    "device",
    "workers_per_gpu",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "kv_cache_memory",
    "kv_transport",
    "threads",
    "trust_remote_code",
    "allow_pickle",
)


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """What is left out takes the worker's own default (`python -m decode_worker --help` shows them).

    Settings of router and workers that have no flag here reach them through the environment, as SPLITSERVE_*.
    """

    model: str | None = None
    "Hugging Face repo id, local directory, or GGUF file; default: SmolLM2-135M-Instruct."
    revision: str | None = None
    "Branch, tag or commit of a Hugging Face repo."
    served_model_name: str | None = None
    "The name that requests use; default: the model's own."
    prefill: NonNegative = 1
    "Number of prefill workers; 0: the aggregated mode, in which decode workers compute prompts themselves."
    decode: Positive = 1
    "Number of decode workers."
    split_threshold: NonNegative | None = None
    "A prompt of at most this many tokens is computed by its decode worker; default 0: none, beside prefill workers."
    cores: str = "auto"
    "Processor cores that the workers share out, such as 0,2-3; auto: all; none: nothing is pinned."
    grpc_port: int = 50051
    "Router's gRPC port; 0 picks a free one."
    http_port: int = 8000
    "Router's HTTP port; 0 picks a free one."
    internal_port: int = 50052
    "Router's port for workers; 0 picks a free one."
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    "auto: bfloat16 where the device has bfloat16 units, else float32."
    device: Device | None = None
    "auto, cpu, cuda or cuda:N, for every worker; auto: each takes a GPU, or the processor where there is none."
    workers_per_gpu: NonNegative = 0
    "How many workers may take the same GPU, once each GPU has one; 0: any number."
    block_size: Positive | None = None
    "Tokens in one KV block."
    max_model_len: Positive | None = None
    "Largest prompt + output in tokens; default: the model's context."
    max_num_seqs: Positive | None = None
    "Sequences that run at once on a worker."
    max_num_batched_tokens: Positive | None = None
    "Tokens that one step computes at most."
    long_prefill_token_threshold: Positive | None = None
    "A longer prompt gets this many tokens of a step while others wait; default, and at most: half of the step."
    kv_cache_memory: Size | None = None
    "Size of each worker's KV pool, such as 2GiB."
    enable_prefix_caching: Annotated[bool, Parameter(negative="--no-enable-prefix-caching")] = True
    "Keep the blocks of ended sequences while there is room, and use them again where tokens are the same."
    kv_transport: Transports | None = None
    "How KV blocks travel: zmq, nccl, gloo, or several in order of preference; auto: nccl,zmq on a GPU."
    threads: Positive | None = None
    "Compute threads of each worker; default: as many as it has cores."
    trust_remote_code: bool = False
    "Accept models that bring their own code."
    allow_pickle: bool = False
    "Accept weights in pickle files."
    log_dir: Path | None = None
    "Write each process's output to a file here, too."

    def worker_flags(self) -> dict[str, Any]:
        """What every worker is told besides its own name, place and router; what is left out stays away."""
        given = {name.replace("_", "-"): getattr(self, name) for name in _WORKER_FLAGS}
        given["no-enable-prefix-caching"] = not self.enable_prefix_caching
        return {name: value for name, value in given.items() if value is not None}
