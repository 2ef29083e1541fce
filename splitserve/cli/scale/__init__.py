"""`splitserve scale`: another number of workers of a role, of a local cluster or of a compose project.

`command.py` is the command, `target.py` what is asked for. `local.py` asks a running `splitserve up`, over the socket
of `sockets.py` in the words of `messages.py`; there `server.py` listens and `scaler.py` does it. `compose.py` does the
same through the Docker engine.
"""
