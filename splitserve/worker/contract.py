"""Words of the `Join` contract that the router's edge and the worker's edge translate alike."""

from kvtransfer.ticket import Ticket
from splitserve.service.reasons import Reason
from splitserve.v1 import cluster_pb2 as pb

REASON_TO_PROTO = {reason: pb.Reason.Value(f"REASON_{reason.name}") for reason in Reason}
_REASON_FROM_PROTO = {value: reason for reason, value in REASON_TO_PROTO.items()}


def reason_from_proto(value: pb.Reason.ValueType) -> Reason:
    """One that is not known here, from a newer worker, is a failure that another worker may not have."""
    return _REASON_FROM_PROTO.get(value, Reason.TRANSFER_FAILED)


def ticket_to_proto(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        transfer_id=ticket.transfer_id,
        sink_worker_id=ticket.sink_worker_id,
        num_cached_blocks=ticket.num_cached_blocks,
        num_blocks=ticket.num_blocks,
    )


def ticket_from_proto(ticket: pb.Ticket, traceparent: str = "") -> Ticket:
    """`traceparent` rides in the headers of the transfer, so that a trace shows the hand-off."""
    return Ticket(
        transfer_id=ticket.transfer_id,
        sink_worker_id=ticket.sink_worker_id,
        num_cached_blocks=ticket.num_cached_blocks,
        num_blocks=ticket.num_blocks,
        traceparent=traceparent,
    )
