"""Between the contract of `Join` (proto) and the worker's own messages: the only place that knows both."""

from collections.abc import Iterable

from kvtransfer.endpoint import KVEndpoint
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker import commands, messages, reports
from splitserve.worker.clock import Signs
from splitserve.worker.contract import REASON_TO_PROTO, ticket_from_proto, ticket_to_proto

_FINISH_REASONS = {
    "": pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


def to_command(message: pb.RouterMessage, session: int) -> commands.Command | None:
    """The engine's command for a router's message; None for what the front handles itself."""
    match message.WhichOneof("body"):
        case "reserve":
            reserve = message.reserve
            return commands.Reserve(
                session=session,
                attempt=reserve.attempt_id,
                start=_start(reserve.start),
                timeout_s=reserve.timeout_s,
                traceparent=reserve.traceparent,
                keep_s=reserve.keep_s,
                is_local=reserve.is_local,
            )
        case "renew":
            renew = message.renew
            return commands.Renew(
                session=session,
                attempt=renew.attempt_id,
                transfer_id=renew.transfer_id,
                samples=_samples(renew.samples),
                timeout_s=renew.timeout_s,
            )
        case "prefill":
            prefill = message.prefill
            return commands.Prefill(
                session=session,
                attempt=prefill.attempt_id,
                start=_start(prefill.start),
                ticket=ticket_from_proto(prefill.ticket, prefill.traceparent),
                timeout_s=prefill.timeout_s,
            )
        case "release":
            release = message.release
            return commands.Release(release.attempt_id, release.reason, tuple(release.samples))
        case _:
            return None


def _start(start: pb.SequenceStart) -> messages.Start:
    limits = start.limits
    return messages.Start(
        prompt_ids=list(start.prompt_ids),
        samples=_samples(start.samples),
        limits=messages.Limits(
            seed=limits.seed,
            temperature=limits.temperature,
            top_p=limits.top_p,
            top_k=limits.top_k,
            min_p=limits.min_p,
            max_tokens=limits.max_tokens,
            min_tokens=limits.min_tokens,
            stop_token_ids=list(limits.stop_token_ids),
            ignore_eos=limits.ignore_eos,
            repetition_penalty=limits.repetition_penalty,
            presence_penalty=limits.presence_penalty,
            frequency_penalty=limits.frequency_penalty,
            logit_bias=dict(limits.logit_bias),
            logprobs=limits.logprobs if limits.HasField("logprobs") else None,
            prompt_logprobs=limits.prompt_logprobs if limits.HasField("prompt_logprobs") else None,
        ),
    )


def _samples(samples: Iterable[pb.SampleStart]) -> list[messages.Sample]:
    return [messages.Sample(sample.index, list(sample.output_ids)) for sample in samples]


def to_endpoint(endpoint: pb.KVEndpoint) -> KVEndpoint:
    return KVEndpoint(
        tcp=endpoint.tcp,
        ipc_path=endpoint.ipc_path,
        nonce_path=endpoint.nonce_path,
        nonce_digest=endpoint.nonce_digest,
    )


def to_worker_message(report: reports.Report) -> pb.WorkerMessage:
    """What the router is told; raises TypeError for a report that is the front's own business."""
    match report:
        case reports.Reserved(attempt=attempt, ticket=ticket):
            return pb.WorkerMessage(
                reserved=pb.Reserved(
                    attempt_id=attempt,
                    ticket=ticket_to_proto(ticket),
                )
            )
        case reports.AlreadyRunning(attempt=attempt):
            return pb.WorkerMessage(already_running=pb.AlreadyRunning(attempt_id=attempt))
        case reports.TransferLost(attempt=attempt, transfer_id=transfer_id, reason=reason, message=text):
            return pb.WorkerMessage(
                transfer_lost=pb.TransferLost(
                    attempt_id=attempt, transfer_id=transfer_id, reason=REASON_TO_PROTO[reason], message=text
                )
            )
        case reports.Transferred(attempt=attempt, transfer_id=transfer_id, num_bytes=num_bytes):
            return pb.WorkerMessage(
                transferred=pb.Transferred(attempt_id=attempt, transfer_id=transfer_id, num_bytes=num_bytes)
            )
        case reports.Accepted(attempt=attempt, num_cached_tokens=cached):
            return pb.WorkerMessage(accepted=pb.Accepted(attempt_id=attempt, num_cached_tokens=cached))
        case reports.Refused(attempt=attempt, reason=reason, message=text):
            return pb.WorkerMessage(
                refused=pb.Refused(attempt_id=attempt, reason=REASON_TO_PROTO[reason], message=text)
            )
        case reports.AttemptEnded(attempt=attempt, reason=reason, message=text, samples=samples):
            ended = pb.AttemptEnded(attempt_id=attempt, reason=REASON_TO_PROTO[reason], message=text, samples=samples)
            return pb.WorkerMessage(attempt_ended=ended)
        case reports.LinkReport(peer=peer, reachable=reachable, detail=detail, bytes_per_s=bytes_per_s):
            link = pb.LinkReport(peer_worker_id=peer, reachable=reachable, detail=detail, bytes_per_s=bytes_per_s)
            link.fallback = report.fallback
            return pb.WorkerMessage(link_report=link)
        case _:
            return _tokens_message(report)


def _tokens_message(report: reports.Report) -> pb.WorkerMessage:
    match report:
        case reports.PromptLogprobs(attempt=attempt, start=start, tokens=entries):
            return pb.WorkerMessage(
                prompt_logprobs=pb.PromptLogprobs(attempt_id=attempt, start=start, tokens=map(_logprobs, entries))
            )
        case reports.FirstTokens(attempt=attempt, tokens=tokens):
            return pb.WorkerMessage(first_tokens=pb.FirstTokens(attempt_id=attempt, tokens=map(_token, tokens)))
        case reports.StepTokens(tokens=tokens):
            return pb.WorkerMessage(step_tokens=pb.StepTokens(tokens=map(_token, tokens)))
        case _:
            raise TypeError(f"{type(report).__name__} is not for routers")


def _token(token: messages.Token) -> pb.Token:
    return pb.Token(
        attempt_id=token.attempt,
        sample=token.sample,
        position=token.position,
        token_id=token.token_id,
        finish_reason=_FINISH_REASONS[token.finish_reason],
        logprobs=_logprobs(token.logprobs) if token.logprobs is not None else None,
    )


def _logprobs(logprobs: messages.Logprobs) -> pb.Logprobs:
    return pb.Logprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def load_message(load: reports.Load, signs: Signs) -> pb.WorkerMessage:
    return pb.WorkerMessage(
        load=pb.Load(
            engine_steps=signs.steps,
            step_age_s=signs.step_age_s,
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
            silence_s=signs.silence_s,
            kv_messages_dropped=load.kv_messages_dropped,
        )
    )


def hello_message(
    ready: reports.Ready, *, worker_id: str, role: pb.Role.ValueType, host_id: str, pid: int
) -> pb.WorkerMessage:
    fingerprint, endpoint = ready.fingerprint, ready.kv_endpoint
    return pb.WorkerMessage(
        hello=pb.Hello(
            worker_id=worker_id,
            role=role,
            model=fingerprint.model,
            revision=fingerprint.revision,
            fingerprint=pb.Fingerprint(
                model=fingerprint.model,
                revision=fingerprint.revision,
                dtype=fingerprint.dtype,
                block_size=fingerprint.block_size,
                num_layers=fingerprint.num_layers,
                num_kv_heads=fingerprint.num_kv_heads,
                head_dim=fingerprint.head_dim,
                layout_version=fingerprint.layout_version,
                tp_rank=fingerprint.tp_rank,
                tp_size=fingerprint.tp_size,
            ),
            capacity=pb.Capacity(
                num_blocks=ready.num_blocks,
                block_size=ready.block_size,
                max_num_seqs=ready.max_num_seqs,
                max_num_batched_tokens=ready.max_num_batched_tokens,
                long_prefill_threshold=ready.long_prefill_threshold,
                max_model_len=ready.max_model_len,
            ),
            host_id=host_id,
            kv_endpoint=pb.KVEndpoint(
                tcp=endpoint.tcp,
                ipc_path=endpoint.ipc_path,
                nonce_path=endpoint.nonce_path,
                nonce_digest=endpoint.nonce_digest,
            ),
            pid=pid,
            device=ready.device,
            topology_group=ready.topology_group,
            transport=ready.transport,
            numerics=ready.numerics,
            recompute_exact=ready.recompute_exact,
        )
    )
