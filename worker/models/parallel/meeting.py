"""How ranks connect before they compute: through a file on one host, or a TCP store over several.

torch's store and gloo authenticate no connection, so they listen only at the address by which the other ranks reach
them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import psutil
import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

# gloo listens at the addresses of this interface; an operator may have set one.
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

log = structlog.get_logger(__name__)


class Meeting(Protocol):
    """The place where all ranks of an engine meet.

    Attributes:
        address: ``host``, ``port`` and ``own_host`` of a ``NetworkMeeting``; empty on one host.
    """

    @property
    def address(self) -> tuple[str, int, str]: ...

    def open_store(self, world_size: int, timeout: timedelta) -> Store:
        """Choose the interface of gloo in this process, and return the store of the ranks.

        Raises:
            RuntimeError, OSError: the store cannot be reached.
        """
        ...


@dataclass(frozen=True)
class FileMeeting:
    """The meeting of ranks of one host.

    Do not close ``descriptor`` afterwards. When torch's store is destroyed, it opens the file by this number again and
    writes into it, which would be another file if the number had been reused.

    Args:
        descriptor: of the file that ``make_rendezvous`` creates, which all ranks inherit.
    """

    descriptor: int
    address = ("", 0, "")

    def open_store(self, world_size: int, timeout: timedelta) -> Store:
        os.environ.setdefault(_INTERFACE_VARIABLE, "lo")
        store = FileStore(f"/proc/self/fd/{self.descriptor}", world_size)
        store.set_timeout(timeout)
        return store


@dataclass(frozen=True)
class NetworkMeeting:
    """The meeting of ranks of several hosts.

    Args:
        host: address at which the first rank listens.
        port: its port.
        own_host: address of this host, by which the others reach this rank.
        listener: in the first rank, the result of ``listen`` for that port, which the store closes.
    """

    host: str
    port: int
    own_host: str
    listener: int | None = None

    @property
    def address(self) -> tuple[str, int, str]:
        return self.host, self.port, self.own_host

    def open_store(self, world_size: int, timeout: timedelta) -> Store:
        choose_interface(self.own_host)
        # Early ranks wait until the first rank listens.
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - torch's documentation says so
            self.host,
            self.port,
            world_size,
            self.listener is not None,
            timeout,
            wait_for_workers=False,
            master_listen_fd=self.listener,
        )


def make_rendezvous() -> int:
    """Return the descriptor of a new file for a ``FileMeeting``."""
    return os.memfd_create("penstock-ranks")


def listen(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens only at ``host``.

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
