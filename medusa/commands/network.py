"""The network address of the commands that run a server: `medusa serve` and `medusa chat --web`."""

from __future__ import annotations

import ipaddress
import socket
import sys

from medusa.errors import RequestError
from medusa.options import Options, option


class Network(Options):
    host: str = option(
        "127.0.0.1", "listen on this address: 127.0.0.1 is this machine, 0.0.0.0 is open to all", metavar="A"
    )
    port: int = option(
        8000, "listen on port N", f"a whole number from 1 to {2**16 - 1}", lambda value: 0 < value < 2**16, "N"
    )

    def require_free(self) -> None:
        """Raise RequestError if a server cannot listen on the host and port; called before models are loaded."""
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
        """Whether only programs on this machine can reach the server's address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def allowed_hosts(self) -> list[str]:
        """The values of the HTTP header Host that the server accepts: all, or on a loopback address its names.

        With other names, a web page could reach it through a domain that resolves to this machine (DNS rebinding)."""
        return ["127.0.0.1", "localhost", "[::1]"] if self.is_loopback else ["*"]

    def announce(self, command: str) -> None:
        """Print the address of a running server on standard error, even with --quiet."""
        address = f"http://localhost:{self.port}"
        if not self.is_loopback:
            host = f"[{self.host}]" if ":" in self.host else self.host
            address = f"http://{host}:{self.port}, open to every machine that can reach this address"
        print(f"{command}: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
