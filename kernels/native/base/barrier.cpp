// Barrier of processes on one host. Each rank counts its arrivals in memory that all ranks have mapped. A rank that
// waits for another polls the other's count for a while, and then sleeps until the other wakes it.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "base/pause.h"

namespace {

constexpr int64_t NS_PER_MS = 1'000'000, NS_PER_S = 1'000'000'000;

struct alignas(64) Arrivals {
  std::atomic<uint32_t> number;
  std::atomic<uint32_t> num_sleeping;
};
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is a word");

// Numbers wrap around after 2^32 arrivals.
bool is_reached(uint32_t number, uint32_t target) { return static_cast<int32_t>(number - target) >= 0; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * NS_PER_S + now.tv_nsec;
}

// Shared between processes, so without FUTEX_PRIVATE_FLAG.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

// Waits until the rank has arrived. It has the same work to do, so it usually arrives at about the same time.
bool wait_for(Arrivals& rank_arrivals, uint32_t target, int64_t deadline_ns) {
  for (int spins = 0; spins < SPINS_BEFORE_SLEEP; ++spins) {
    if (is_reached(rank_arrivals.number.load(), target)) return true;
    spin_pause();
  }
  // The arriving rank writes its number and then reads num_sleeping; this rank increments num_sleeping and then reads
  // the number again. So at least one of them sees the other's write.
  rank_arrivals.num_sleeping.fetch_add(1);
  uint32_t current;
  while (!is_reached(current = rank_arrivals.number.load(), target)) {
    const int64_t remaining_ns = deadline_ns - now_ns();
    if (remaining_ns <= 0) break;
    const timespec timeout{remaining_ns / NS_PER_S, remaining_ns % NS_PER_S};
    futex(rank_arrivals.number, FUTEX_WAIT, current, &timeout);
  }
  rank_arrivals.num_sleeping.fetch_sub(1);
  return is_reached(current, target);
}

}  // namespace

// Arrives for the number-th time, and waits until all ranks have. Returns whether they have within timeout_ms. A caller
// can continue to wait by calling again with the same number.
extern "C" int64_t wait_at_barrier(void* memory, int64_t rank, int64_t num_ranks, int64_t number, int64_t timeout_ms) {
  Arrivals* ranks = static_cast<Arrivals*>(memory);
  const uint32_t target = static_cast<uint32_t>(number);
  Arrivals& own = ranks[rank];
  own.number.store(target);
  if (own.num_sleeping.load() > 0) futex(own.number, FUTEX_WAKE, INT_MAX, nullptr);
  const int64_t deadline_ns = now_ns() + timeout_ms * NS_PER_MS;
  for (int64_t other = 0; other < num_ranks; ++other)
    if (other != rank && !wait_for(ranks[other], target, deadline_ns)) return 0;
  return 1;
}
