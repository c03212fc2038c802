"""The image's HEALTHCHECK: whether the task of this container answers. Imports no TensorFlow."""

import http.client
import os
import sys

from trainer.plan.environment import CONTROL

TIMEOUT_SECS = 4.0


def is_healthy(control: str | None) -> bool:
    """Whether the status page at "host:port" answers; True without one, as the container then runs no task."""
    if control is None:
        return True
    connection = http.client.HTTPConnection(control, timeout=TIMEOUT_SECS)
    try:
        connection.request("GET", "/status")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_healthy(os.environ.get(CONTROL)))
