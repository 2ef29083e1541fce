"""The second road: control messages on ZeroMQ as ever, block bytes between two ranks of NCCL or Gloo."""
