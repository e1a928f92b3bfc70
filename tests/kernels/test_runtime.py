"""What the wheels of the compiled kernels have instead of a C++ library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "ops" / "lab" / "kernels_runtime.c"
# What the kernels use: memory of usual and larger alignment, and variables that are initialised once, also per thread.
SOURCE = """
#include <atomic>
#include <cstdint>
#include <pthread.h>

struct alignas(64) Wide { char bytes[64]; };

static std::atomic<int> starts, ends;

struct Counted {
  int* number;
  Counted() : number(new int(7)) { starts++; }
  ~Counted() { delete number, ends++; }
};

static int for_all() { static Counted one; return *one.number; }
static int for_each() { thread_local Counted one; return *one.number; }

static void* both_often(void* wrong) {
  for (int i = 0; i < 64; i++)
    if (for_all() != 7 || for_each() != 7) ++*static_cast<std::atomic<int>*>(wrong);
  return nullptr;
}

// Returns how many calls of eight threads saw a wrong number. A thread that was joined here has run its destructors,
// which one that Python joined need not have.
extern "C" int num_wrong() {
  std::atomic<int> wrong{0};
  pthread_t threads[8];
  for (pthread_t& one : threads)
    if (pthread_create(&one, nullptr, both_often, &wrong)) return -1;
  for (pthread_t& one : threads) pthread_join(one, nullptr);
  return wrong;
}

extern "C" int num_starts() { return starts; }
extern "C" int num_ends() { return ends; }
extern "C" int misalignment() {
  Wide* wide = new Wide;
  int rest = reinterpret_cast<std::uintptr_t>(wide) % 64;
  delete wide;
  int* several = new int[3];
  delete[] several;
  return rest;
}
"""


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    cxx, cc = shutil.which("c++"), shutil.which("cc")
    if cxx is None or cc is None:
        pytest.skip("no C++ compiler is installed")
    (tmp_path / "source.cpp").write_text(SOURCE)
    flags = ["-O1", "-fPIC", "-pthread"]
    compiling = [cxx, *flags, "-std=c++17", "-fno-exceptions", "-fno-rtti", "-c", "source.cpp", "-o", "source.o"]
    # The C compiler links no C++ library, and refuses names that are not defined.
    linking = [cc, *flags, "-shared", "-Wl,-z,defs", str(RUNTIME), "source.o", "-o", "library.so"]
    for command in (compiling, linking):
        subprocess.run(command, cwd=tmp_path, check=True)
    return ctypes.CDLL(str(tmp_path / "library.so"))


def test_a_library_works_without_a_cxx_library(library: ctypes.CDLL) -> None:
    assert library.misalignment() == 0
    assert library.num_wrong() == 0
    # One for all threads, which lasts, and one for each of the eight, which have ended.
    assert library.num_starts() == 1 + 8
    assert library.num_ends() == 8
