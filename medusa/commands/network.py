"""The options of servers: the address and port where a server listens, and the machines that can connect."""

from __future__ import annotations

import ipaddress
import socket
import sys

from medusa.errors import RequestError
from medusa.options import Options, option

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Network(Options):
    host: str = option(
        "127.0.0.1",
        "listen on this address; 0.0.0.0 is open to other machines",
        metavar="A",
        brief="listen on this address",
    )
    port: int = option(8000, "listen on port N", "a whole number from 1 to 65535", lambda value: 0 < value < 2**16, "N")

    def require_free(self) -> None:
        """Raise RequestError if a server cannot listen on the host and port; called before models are loaded."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            for family, *_, address in found:
                try:
                    trial = socket.socket(family, socket.SOCK_STREAM)
                except OSError:
                    if len(found) == 1:
                        raise
                    continue  # a machine without IPv6, for example: the server leaves this address out, too
                with trial:
                    if family == socket.AF_INET6:  # otherwise it would take the port of IPv4, too
                        trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(address)
        except OSError as error:
            reason = f"{error.strerror or error}; choose another --port or --host"
            raise RequestError(f"cannot listen at {self.host}, port {self.port}: {reason}") from None

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can reach the server's address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def allowed_hosts(self) -> list[str]:
        """The values of the HTTP header Host that the server accepts; `*` means all.

        On a loopback address, only that address and the loopback names are accepted. Otherwise a web page could reach
        the server through a domain that resolves to this machine (DNS rebinding)."""
        return list(dict.fromkeys([*LOOPBACK, self.written])) if self.is_loopback else ["*"]

    @property
    def written(self) -> str:
        """The host as clients write it in an address."""
        try:
            own = ipaddress.ip_address(self.host).compressed
        except ValueError:
            return self.host
        return f"[{own}]" if ":" in own else own

    def announce(self, command: str) -> None:
        """Print the address of a running server on standard error, even with --quiet."""
        host = "localhost" if self.written in LOOPBACK else self.written
        address = f"http://{host}:{self.port}"
        if not self.is_loopback:
            address += ", open to every machine that can reach this address"
        print(f"{command}: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
