"""Bounds that both ends of a connection must share. Imported by servers and by the client library."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest gRPC message: several million token ids, or 64 MiB of text."""

GRPC_MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
"""Channel and server options: gRPC's own default of 4 MiB refuses long prompts."""
