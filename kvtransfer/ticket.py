"""The right to send one attempt's blocks to one sink. Issued by the sink, carried to the source by the router."""

import msgspec


class Ticket(msgspec.Struct, frozen=True):
    """Logical blocks num_cached_blocks..num_blocks-1 have to be sent; there may be none of them.

    `transfer_id` is fresh per attempt and never derived from a client's request id.
    """

    transfer_id: str
    sink_worker_id: str
    num_cached_blocks: int
    num_blocks: int
    traceparent: str = ""

    @property
    def num_blocks_to_send(self) -> int:
        return self.num_blocks - self.num_cached_blocks
