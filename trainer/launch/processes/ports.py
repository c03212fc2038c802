"""Reserves ports so that no other program can take them before the tasks use them."""

from __future__ import annotations

import socket


class HeldPorts:
    """Ports of the loopback interface, bound here (not listening) for as long as the tasks live.

    TensorFlow servers (with TF_GRPC_REUSE_PORT) and status pages bind them with SO_REUSEPORT; a bound socket that does
    not listen takes no connection away from them.
    """

    def __init__(self, count: int) -> None:
        self._sockets = [self._hold() for _ in range(count)]
        self.ports: list[int] = [bound.getsockname()[1] for bound in self._sockets]

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *_: object) -> None:
        for bound in self._sockets:
            bound.close()

    def hold(self, port: int) -> None:
        """Reserves a port that the config names.

        Raises:
            OSError: if another program uses it.
        """
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended run may linger
            probe.bind(("", port))  # without SO_REUSEPORT: fails if any program holds it, another run of ours included
        self._sockets.append(self._hold(port))

    @staticmethod
    def _hold(port: int = 0) -> socket.socket:
        bound = socket.socket()
        if hasattr(socket, "SO_REUSEPORT"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("", port))  # every interface, as TensorFlow's server does
        return bound
