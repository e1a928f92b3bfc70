// Asks the kernel for the tile registers.
#include "tiles.h"

#include <cerrno>

#if defined(__linux__) && defined(__x86_64__) && !defined(PENSTOCK_EMULATED_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool tiles::are_given = false;

namespace {

// Their state is too large for every task to have it from the start, so a process asks once for all of its threads and
// children. ENOSPC: an alternate signal stack of the asking thread could not hold it. EINVAL: a kernel before 5.16.
int ask() {
#if defined(PENSTOCK_EMULATED_TILES)
  return 0;
#elif defined(__linux__) && defined(__x86_64__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

}  // namespace

// 0 if they are used from now on, -1 where the processor has none, else why the kernel refuses (an errno).
extern "C" int64_t request_tiles() {
  if (!tiles::EXIST) return -1;
  const int refusal = ask();
  tiles::are_given = refusal == 0;
  return refusal;
}
