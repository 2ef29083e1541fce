"""A link whose handshake is done, as the source sees it. Plain state, owned by `source.Source`."""

from dataclasses import dataclass, field

from kvtransfer.bandwidth import Bandwidth
from kvtransfer.carrier import Connected, LinkId
from kvtransfer.credit import CreditWindow
from kvtransfer.source_transfer import SourceTransfer


@dataclass
class ReadyLink:
    """Its credit, and the transfers on it, oldest first."""

    connection: Connected
    worker_id: str
    credit: CreditWindow
    max_message_bytes: int
    progress_at: float
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    transfers: dict[str, SourceTransfer] = field(default_factory=dict)
    # Transfers that the sink was told have failed, by the time its Closed is due.
    closing: dict[str, float] = field(default_factory=dict)

    @property
    def link(self) -> LinkId:
        return self.connection.link
