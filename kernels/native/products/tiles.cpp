// Requests the permission to use tile registers from the kernel.
#include "products/tiles.h"

#include <cerrno>

#if defined(__linux__) && defined(__x86_64__) && !defined(PENSTOCK_EMULATED_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool tiles::are_enabled = false;

namespace {

// Their state is too large for the kernel to allocate it for every task, so a process requests it once for all of its
// threads and children. ENOSPC: an alternate signal stack of the calling thread is too small. EINVAL: a kernel before
// 5.16.
int request_permission() {
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

// Returns 0 if tile registers are used from now on, -1 if the processor has none, else the errno of the kernel's
// refusal.
extern "C" int64_t request_tiles() {
  if (!tiles::EXIST) return -1;
  const int error = request_permission();
  tiles::are_enabled = error == 0;
  return error;
}
