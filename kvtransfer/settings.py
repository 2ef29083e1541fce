"""Sizes and time limits of the KV thread, as one value. Built by the worker's configuration, varied by tests."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class KVSettings:
    """Bytes and seconds. Every state that waits for a peer ends at one of these limits."""

    # Block bytes that one source may have sent to us and not yet had acknowledged.
    window_bytes: int = 64 * MIB
    # Block bytes per message; a single larger block still travels, alone.
    frame_bytes: int = MIB
    # A transfer with bytes or a Finish at the peer ends after this long without progress.
    transfer_timeout_s: float = 10.0
    # An open source transfer to which our own engine adds nothing ends after this long.
    idle_timeout_s: float = 600.0
    # A transfer to a peer without a ready link waits this long for one.
    link_wait_s: float = 5.0
    # Dialling and handshake together.
    connect_timeout_s: float = 3.0
    redial_min_s: float = 0.1
    redial_max_s: float = 2.0
    # While a transfer depends on a link, its peer is asked this often and given this long to be heard of.
    ping_interval_s: float = 1.0
    ping_timeout_s: float = 4.0
    # A peer that was told of a failed transfer must confirm it within this time, else the link is cut.
    closing_timeout_s: float = 4.0
