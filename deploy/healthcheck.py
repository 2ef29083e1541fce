"""Whether the process in this container is ready: `python healthcheck.py PORT`. Compose calls it every few seconds.

Prints the answer's body, which names what is missing; `docker inspect` shows it. Needs the standard library alone.
"""

import http.client
import sys

TIMEOUT_S = 4.0


def main(port: int) -> int:
    # Not urllib: it would ask a proxy that the environment names.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        sys.stdout.write(answer.read().decode("utf-8", errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"no answer from port {port}: {error}")
        return 1
    return 0 if answer.status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
