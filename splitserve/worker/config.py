"""The settings of a worker, one declaration for flags, environment (SPLITSERVE_*) and defaults.

The front parses them and hands them to its engine process unchanged.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from splitserve.service.config import Cores, Device, Duration, NonNegative, Positive, Size, Transports

DType = Literal["auto", "bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    model: str | None = None
    "Hugging Face repo id, local directory, or GGUF file; default: SmolLM2-135M-Instruct."
    revision: str | None = None
    "Branch, tag or commit of a Hugging Face repo."
    served_model_name: str | None = None
    "The name that requests use; default: the model's own."
    dtype: DType = "auto"
    "auto: bfloat16 where the device has bfloat16 units, else float32."
    device: Device = "auto"
    """auto: a GPU of the host that no other worker has claimed, or the processor where there is no GPU; cuda: the same,
    but never the processor; cuda:N: that GPU, if no other worker has claimed it; cpu."""
    device_locks: str | None = None
    "Folder in which all workers of a host lock the GPUs that they claim; default: device-locks in the cache folder."
    workers_per_gpu: NonNegative = 1
    "How many workers may claim the same GPU; 0: any number."
    block_size: Positive = 16
    "Tokens in one KV block."
    max_model_len: Positive | None = None
    "Largest prompt + output in tokens; default: the model's context."
    max_num_seqs: Positive = 64
    "Sequences that run, or are reserved, at once."
    max_num_batched_tokens: Positive = 512
    "Tokens that one step computes at most."
    long_prefill_token_threshold: Positive | None = None
    "A longer prompt gets this many tokens of a step while others wait; default, and at most: half of the step."
    kv_cache_memory: Size = 1 << 30
    "Size of the KV pool, such as 2GiB."
    enable_prefix_caching: Annotated[bool, Parameter(negative="--no-enable-prefix-caching")] = True
    "Keep the blocks of ended sequences while there is room, and use them again where tokens are the same."
    threads: Positive = 1
    "Threads that one step computes with."
    cores: Cores | None = None
    "Processor cores of the engine thread, such as 0,1; default: all."
    kv_transport: Transports = "auto"
    """How KV blocks travel: zmq, nccl, gloo, or several in order of preference, such as nccl,zmq; auto: that on a
    GPU, else zmq."""
    bind: str = "127.0.0.1"
    "Address that the KV and HTTP ports listen on."
    advertise: str | None = None
    "Address that peers dial; default: the bind address, or with a wildcard the one that reaches the router."
    router: str = "127.0.0.1:50052"
    "The router's internal port. Every address of the name is joined."
    rejoin_interval: Duration = 1.0
    "Pause before a router is dialled again; its name is looked up at every second one."
    drain_timeout: Duration = 7.0
    "After SIGTERM, how long what is here may go on before the worker ends."
    http_port: int = 8080
    "Health and metrics; 0 picks a free port."
    transfer_timeout: Duration = 10.0
    "A KV transfer without progress for this long fails."
    kv_port: NonNegative = 0
    "Where peers on other hosts send KV blocks; 0 picks a free port."
    kv_peer_timeout: Duration = 4.0
    "A peer that a KV transfer depends on is lost when nothing is heard of it for this long."
    kv_socket_dir: str | None = None
    "Folder for sockets of KV transfers, the same for all workers of a host; default: that of temporary files."
    stall_timeout: Duration = 10.0
    "A step that gets no further for this long ends the worker."
    trust_remote_code: bool = False
    "Accept models that bring their own code."
    allow_pickle: bool = False
    "Accept weights in pickle files."
    fault_plan: str | None = None
    "Faults to inject into KV transfers; testing only."
    parent_fd: int | None = None
    "The worker ends when this inherited descriptor reaches its end."

    @property
    def long_prefill_threshold(self) -> int:
        """What `long_prefill_token_threshold` comes to. Never more than half a step: the rest is for short prompts."""
        half = max(self.max_num_batched_tokens // 2, 1)
        return min(self.long_prefill_token_threshold or half, half)
