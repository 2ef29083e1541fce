"""Between the contract of `Join` (proto) and the router's plain data; only this module and `join` know both."""

import math
from collections.abc import Mapping

from router.events import (
    Accepted,
    AlreadyRunning,
    AttemptEvent,
    Ended,
    FirstTokensArrived,
    PromptLogprobsArrived,
    Refused,
    Reserved,
    TokenArrived,
    TransferLost,
    Transferred,
)
from router.request import FinishReason, TokenLogprobs
from router.worker import Identity, Link, LoadReport, Role, Start, Worker
from splitserve.service.errors import InvalidRequest
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker.contract import reason_from_proto, ticket_from_proto

_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}
_FINISH_REASONS = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}


# From proto


def to_identity(hello: pb.Hello) -> Identity:
    role = _ROLES.get(hello.role)
    if role is None or not hello.worker_id:
        raise InvalidRequest("the hello names no role or no worker id")
    capacity = hello.capacity
    if capacity.num_blocks < 1 or capacity.block_size < 1 or capacity.max_model_len < 1:
        raise InvalidRequest("the hello's capacity is not positive")
    return Identity(
        worker_id=hello.worker_id,
        role=role,
        model=hello.model,
        revision=hello.revision,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        long_prefill_threshold=capacity.long_prefill_threshold,
        max_model_len=capacity.max_model_len,
        host_id=hello.host_id,
        pid=hello.pid,
        device=hello.device,
        topology_group=hello.topology_group,
        transport=hello.transport,
        numerics=hello.numerics,
        recompute_exact=hello.recompute_exact,
    )


def to_load(load: pb.Load) -> LoadReport:
    return LoadReport(
        engine_steps=load.engine_steps,
        step_age_s=load.step_age_s,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_in_use=load.blocks_in_use,
        blocks_reserved=load.blocks_reserved,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        waiting_tokens=load.waiting_tokens,
        tokens_ahead=load.tokens_ahead,
        kv_bytes_sent=load.kv_bytes_sent,
        kv_bytes_received=load.kv_bytes_received,
        silence_s=load.silence_s,
        kv_messages_dropped=load.kv_messages_dropped,
    )


def to_link(report: pb.LinkReport) -> Link:
    is_measured = 1 <= report.bytes_per_s < math.inf
    return Link(report.reachable, report.detail, report.bytes_per_s if is_measured else 0.0, report.fallback)


def to_token(worker: Worker, token: pb.Token) -> TokenArrived:
    return TokenArrived(
        worker=worker.worker_id,
        sample=token.sample,
        position=token.position,
        token_id=token.token_id,
        finish_reason=_FINISH_REASONS.get(token.finish_reason),
        logprobs=_logprobs(token.logprobs) if token.HasField("logprobs") else None,
    )


def _logprobs(logprobs: pb.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob if logprobs.HasField("logprob") else None,
        top=tuple(zip(logprobs.top_ids, logprobs.top_logprobs, strict=False)),
    )


def to_event(worker: Worker, message: pb.WorkerMessage) -> tuple[str, AttemptEvent | None]:
    match message.WhichOneof("body"):
        case "reserved":
            return message.reserved.attempt_id, Reserved(ticket_from_proto(message.reserved.ticket))
        case "already_running":
            return message.already_running.attempt_id, AlreadyRunning()
        case "transfer_lost":
            lost = message.transfer_lost
            reason = reason_from_proto(lost.reason)
            return lost.attempt_id, TransferLost(worker.worker_id, lost.transfer_id, reason, lost.message)
        case "transferred":
            transferred = message.transferred
            return transferred.attempt_id, Transferred(transferred.transfer_id, transferred.num_bytes)
        case "accepted":
            return message.accepted.attempt_id, Accepted(message.accepted.num_cached_tokens)
        case "refused":
            refused = message.refused
            reason = reason_from_proto(refused.reason)
            return refused.attempt_id, Refused(worker.worker_id, reason, refused.message)
        case "prompt_logprobs":
            prompt = message.prompt_logprobs
            return prompt.attempt_id, PromptLogprobsArrived(prompt.start, tuple(map(_logprobs, prompt.tokens)))
        case "first_tokens":
            first = message.first_tokens
            tokens = tuple(to_token(worker, token) for token in first.tokens)
            return first.attempt_id, FirstTokensArrived(tokens)
        case "attempt_ended":
            ended = message.attempt_ended
            reason = reason_from_proto(ended.reason)
            return ended.attempt_id, Ended(worker.worker_id, reason, ended.message, frozenset(ended.samples))
        case _:
            return "", None


# To proto


def role_to_proto(role: Role) -> pb.Role.ValueType:
    return pb.ROLE_PREFILL if role is Role.PREFILL else pb.ROLE_DECODE


def samples_to_proto(outputs: Mapping[int, tuple[int, ...]]) -> list[pb.SampleStart]:
    return [pb.SampleStart(index=index, output_ids=output) for index, output in outputs.items()]


def start_to_proto(start: Start) -> pb.SequenceStart:
    sampling = start.sampling
    return pb.SequenceStart(
        prompt_ids=start.prompt_ids,
        samples=samples_to_proto(start.outputs),
        limits=pb.SequenceLimits(
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        ),
    )
