"""The settings of a router, one declaration for flags, environment (SPLITSERVE_*) and defaults."""

from dataclasses import dataclass
from typing import Literal

from splitserve.service.config import Duration, NonNegative, Positive, Size

Routing = Literal["round_robin", "least_loaded"]
WithoutPrefill = Literal["refuse", "local"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    model: str | None = None
    "Hugging Face repo id, local directory, or GGUF file; default: SmolLM2-135M-Instruct."
    revision: str | None = None
    "Branch, tag or commit of a Hugging Face repo."
    served_model_name: str | None = None
    "The name that requests use; default: the model's own."
    bind: str = "127.0.0.1"
    "Address of the gRPC and HTTP ports."
    grpc_port: int = 50051
    "The public gRPC API; 0 picks a free port."
    http_port: int = 8000
    "Health, metrics and cluster state; 0 picks a free port."
    internal_bind: str = "127.0.0.1"
    "Address of the internal port. It is not authenticated: keep it on loopback or a private network."
    internal_port: int = 50052
    "Where workers join; 0 picks a free port."
    max_queue_requests: Positive = 1024
    "Requests that may wait; one more is refused."
    max_queue_tokens: Positive = 1_000_000
    "Prompt tokens that may wait; more are refused."
    max_tokenizing_requests: Positive = 256
    "Requests whose text may be tokenized or wait for it; one more is refused."
    max_tokenizing_bytes: Size = 64 * 1024 * 1024
    "Bytes of text that may be tokenized or wait for it; more are refused."
    max_attempts: Positive = 3
    "Attempts that may fail before the request does."
    max_deaths: Positive = 2
    "A request that was running on this many workers when they died is taken for the cause, and given no other."
    request_timeout: Duration = 600.0
    "Longest life of a request; a client's shorter deadline wins."
    failover_timeout: Duration = 30.0
    "How long an interrupted request waits for another pair of workers."
    passing_timeout: Duration = 2.0
    "How long a request that waits for room is passed by those that need less; then room is kept for it."
    reserve_timeout: Duration = 5.0
    "A decode worker's time to answer, and how long its reservation is kept while a prefill worker is sought."
    prefill_timeout: Duration = 120.0
    "From handing a prompt to a prefill worker to its first token."
    token_timeout: Duration = 30.0
    "Longest gap between two tokens of a running attempt, unless its worker is in a step that goes on."
    heartbeat_interval: Duration = 0.3
    "How often router and worker show each other a sign of life."
    suspect_timeout: Duration = 1.0
    "A worker silent for this long gets no new work."
    heartbeat_timeout: Duration = 3.0
    "A worker silent for this long is dead."
    stall_timeout: Duration = 10.0
    "A worker whose step gets no further for this long is dead."
    routing: Routing = "least_loaded"
    "How to choose among workers with room."
    split_threshold: NonNegative = 0
    "A prompt, outputs so far included, of at most this many tokens is computed by its decode worker; 0: none."
    without_prefill: WithoutPrefill = "refuse"
    "While no prefill worker can reach a decode worker: refuse new requests, or local: decode workers compute prompts."
    drain_timeout: Duration = 7.0
    "After SIGTERM, how long running streams may go on before they are ended with an error."
    parent_fd: int | None = None
    "The router ends when this inherited descriptor reaches its end."
    log_level: str = "info"
    "debug, info, warning or error."
