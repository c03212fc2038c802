"""trainer console: serves the console until it is stopped."""

import contextlib
import secrets
import socket
from pathlib import Path

from trainer.config.typed import ConsoleConfig
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.observe.page_server import LOOPBACK


class ConsoleError(TrainerError):
    """The console cannot start."""

    exit_code = exit_codes.UNAVAILABLE


def run(options: ConsoleConfig, folder: Path) -> int:
    """Serves the console until Ctrl-C; returns 0.

    Raises:
        ConsoleError: if its libraries are missing, or its port is taken.
    """
    try:
        import uvicorn

        from trainer.commands.console import actions
        from trainer.commands.console.app import make_app
    except ImportError as error:
        raise ConsoleError(f"{error.name} is missing; type pip install starlette uvicorn") from error
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    with _listen(options) as listener:
        port = listener.getsockname()[1]
        app = make_app(options, folder, token=token, port=port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        if options.host not in LOOPBACK:
            print("warning: the console answers other machines, without encryption; an ssh tunnel is safer")
        print(f"runs in {folder}: open http://{host}:{port}/?token={token}", flush=True)
        settings = uvicorn.Config(app, log_level="critical", server_header=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        actions.yield_to_others()
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            server.run(sockets=[listener])
    return exit_codes.OK


def _listen(config: ConsoleConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        where = f"{config.host}:{config.port}"
        raise ConsoleError(f"{where}: {error.strerror}; console.port=0 takes a free port") from error
