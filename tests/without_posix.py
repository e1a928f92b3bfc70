"""Run a script in a process that lacks the modules and names that Windows lacks.

    python tests/without_posix.py SCRIPT_FILE [ARGUMENT...]

Libraries are imported before, since those of Linux are not those of Windows. Penstock is imported after.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import runpy
import signal
import socket
import sys

MODULES = (
    "fcntl",
    "termios",
    "resource",
    "pwd",
    "grp",
    "pty",
    "tty",
    "syslog",
    "posix",
    "readline",
    "curses",
    "spwd",
    "uvloop",
)
_OF_OS = """
    fork forkpty register_at_fork getuid geteuid getgid getegid getgroups getpgid getpgrp getsid setsid setuid setgid
    killpg wait wait3 wait4 waitid WNOHANG pread pwrite preadv pwritev sendfile posix_spawn posix_spawnp posix_fallocate
    posix_fadvise nice getpriority setpriority getloadavg sysconf confstr uname chown fchown lchown fchmod chroot mkfifo
    mknod statvfs fstatvfs openpty ctermid ttyname pidfd_open memfd_create eventfd splice getrandom fdatasync sync lockf
    sched_getaffinity sched_setaffinity sched_yield O_CLOEXEC O_NONBLOCK O_DIRECTORY O_NOFOLLOW O_SYNC O_DSYNC
"""
_OF_SIGNAL = """
    SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGQUIT SIGCHLD SIGCONT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGPIPE SIGALRM SIGWINCH
    pthread_sigmask pthread_kill sigwait sigwaitinfo sigtimedwait sigpending siginterrupt setitimer alarm pause
    SIG_BLOCK SIG_UNBLOCK SIG_SETMASK
"""
_OF_SOCKET = "AF_UNIX SO_REUSEPORT SOCK_CLOEXEC SOCK_NONBLOCK send_fds recv_fds MSG_NOSIGNAL SO_PEERCRED"
NAMES = ((os, _OF_OS), (signal, _OF_SIGNAL), (socket, _OF_SOCKET), (asyncio, "open_unix_connection"))
LIBRARIES = ("redis.asyncio.sentinel", "msgspec", "structlog", "hiredis", "numpy", "PIL.Image", "httpx", "psutil")


class NoPosix:
    """Finder that refuses the modules which Windows lacks."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove_posix() -> None:
    """Remove the modules and names for all later imports."""
    for library in LIBRARIES:
        importlib.import_module(library)
    # The event loop of Linux makes such a pair for itself.
    socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)
    for module, names in NAMES:
        for name in names.split():
            vars(module).pop(name, None)
    asyncio.SelectorEventLoop.add_signal_handler = asyncio.AbstractEventLoop.add_signal_handler
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, NoPosix())


if __name__ == "__main__":
    remove_posix()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
