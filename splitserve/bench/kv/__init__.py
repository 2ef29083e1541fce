"""KV blocks from one process to another, as two workers move them, and what the machine allows."""
