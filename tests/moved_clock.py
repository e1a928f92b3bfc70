"""Redis servers whose clock a test sets: a real redis-server with a small library in front of the C library's clock."""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from penstock.shared.redis_access.embedded import find_redis_server

# Each call is answered with the true time and the microseconds that a file holds, which the test writes at any moment.
# The monotonic clock stays as it is, as it does where a clock is set right.
_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_us;

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("PENSTOCK_TEST_CLOCK");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *offset_us, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) offset_us = page;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (result || !offset_us || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return result;
  int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + *offset_us * 1000;
  now->tv_sec = ns / 1000000000LL;
  now->tv_nsec = ns % 1000000000LL;
  return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
"""


class MovedClock:
    """A clock that starts right, and a ``program`` that runs redis-server by it.

    Args:
        folder: of its files.
        name: of the clock, where a test has several.
    """

    def __init__(self, folder: Path, name: str = "clock") -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler (cc), which the library in front of the clock needs")
        folder.mkdir(parents=True, exist_ok=True)
        library, offset = _library(compiler), folder / f"{name}.offset"
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self.program = folder / f"redis-server-{name}"
        self.program.write_text(
            f"#!/bin/sh\nPENSTOCK_TEST_CLOCK='{offset}' LD_PRELOAD='{library}' exec '{find_redis_server()}' \"$@\"\n"
        )
        self.program.chmod(0o755)

    def move(self, by_s: float) -> None:
        """Set the clock forward, or back if ``by_s`` is below 0."""
        (offset_us,) = struct.unpack("q", self._page[:8])
        self._page[:8] = struct.pack("q", offset_us + round(by_s * 1e6))


@cache
def _library(compiler: str) -> Path:
    """Return the library, which is compiled once for this process and removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-clock-"))
    atexit.register(_remove, folder, os.getpid())
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


def _remove(folder: Path, pid: int) -> None:
    """Remove the folder, unless this is a fork of the process that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
