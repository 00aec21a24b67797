"""Where the commands that answer over the network listen."""

from __future__ import annotations

import ipaddress
import socket
import sys
from dataclasses import dataclass

from medusa.errors import RequestError
from medusa.options import Options, option


@dataclass(frozen=True, kw_only=True)
class Network(Options):
    """An address to listen at."""

    host: str = option(
        "127.0.0.1", "listen at this address; 127.0.0.1 is this machine only, 0.0.0.0 is open to everybody", metavar="A"
    )
    port: int = option(
        8000, "listen at port N", f"a whole number from 1 to {2**16 - 1}", lambda value: 0 < value < 2**16, "N"
    )

    def require_free(self) -> None:
        """Check the address before models are loaded.

        Raises:
            RequestError: this machine cannot listen there, or another program does."""
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((self.host, self.port))
        except OSError as error:
            raise RequestError(
                f"cannot listen at {self.host}, port {self.port} ({error.strerror or error}); choose another --port or "
                "--host"
            ) from None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def allowed_hosts(self) -> list[str]:
        """The Host headers that requests may have.

        A server for this machine only allows this machine's names, so that no web page can reach the server through a
        domain that resolves to this machine (DNS rebinding)."""
        return ["127.0.0.1", "localhost", "[::1]"] if self.is_loopback else ["*"]

    def announce(self, command: str) -> None:
        """Print the address of a command that now listens, also with --quiet."""
        address = f"http://localhost:{self.port}"
        if not self.is_loopback:
            host = f"[{self.host}]" if ":" in self.host else self.host
            address = f"http://{host}:{self.port}, open to everybody who reaches this machine"
        print(f"{command}: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
