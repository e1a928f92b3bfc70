"""The address at which ranks of a data-parallel group listen: that by which the others reach them, and no other.

torch's store and gloo authenticate no connection, so they must not listen on every interface of the host.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import psutil
import structlog

# gloo listens at the addresses of this interface; an operator may have set one.
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

log = structlog.get_logger(__name__)


def listen(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens only at ``host``, for torch's store, which closes it.

    If no interface of this host has the address, because it is translated on the way, the socket listens on all.

    Raises:
        OSError: the port is in use.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = addresses[0]
    try:
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        log.warning("group_listens_everywhere", address=host)
        return socket.create_server(("", port), family=family).detach()


def choose_interface(host: str) -> None:
    """Let gloo of this process listen on the interface that has ``host``; on gloo's own choice if none has."""
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    is_loopback = ipaddress.ip_address(address).is_loopback
    for name, addresses in psutil.net_if_addrs().items():
        interface_addresses = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        if address in interface_addresses or (is_loopback and "127.0.0.1" in interface_addresses):
            os.environ.setdefault(_INTERFACE_VARIABLE, name)
            return
