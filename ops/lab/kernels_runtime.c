// What compiled kernels need of a C++ library, so that none is linked into the wheels: zig would have to compile its
// own, which takes three times as long as the kernels. Memory that cannot be had ends the process, as an exception
// that nobody catches would.
#include <sched.h>
#include <stdlib.h>

// The C library's registration of destructors of thread-local variables.
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);

int __cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
  return __cxa_thread_atexit_impl(destroy, object, library);
}

// operator new, also of arrays
void* _Znwm(size_t size) {
  void* memory = malloc(size ? size : 1);
  if (!memory) abort();
  return memory;
}
void* _Znam(size_t size) { return _Znwm(size); }

// operator delete, without and with a size, also of arrays
void _ZdlPv(void* memory) { free(memory); }
void _ZdlPvm(void* memory, size_t size) { (void)size, free(memory); }
void _ZdaPv(void* memory) { free(memory); }
void _ZdaPvm(void* memory, size_t size) { (void)size, free(memory); }

// The same of types that are aligned more than usual, whose alignment is the last argument
void* _ZnwmSt11align_val_t(size_t size, size_t alignment) {
  void* memory;
  if (posix_memalign(&memory, alignment, size ? size : 1)) abort();
  return memory;
}
void _ZdlPvmSt11align_val_t(void* memory, size_t size, size_t alignment) { (void)size, (void)alignment, free(memory); }

// Local variables that are static: one thread initialises each, and others wait. The compiler reads the first byte of
// the guard, which says that it is done; the second says that a thread is at it.
int __cxa_guard_acquire(unsigned char* guard) {
  while (__atomic_exchange_n(&guard[1], 1, __ATOMIC_ACQUIRE)) sched_yield();
  if (!guard[0]) return 1;
  __atomic_store_n(&guard[1], 0, __ATOMIC_RELEASE);
  return 0;
}
void __cxa_guard_release(unsigned char* guard) {
  __atomic_store_n(&guard[0], 1, __ATOMIC_RELEASE);
  __atomic_store_n(&guard[1], 0, __ATOMIC_RELEASE);
}
