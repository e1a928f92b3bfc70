// Processes of one host that meet again and again: each has a seat in memory that all have mapped, and writes there how
// often it has come. Whoever waits for another looks at its seat for a while and then sleeps until it is woken.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "pause.h"

namespace {

constexpr int64_t NS_PER_MS = 1'000'000, NS_PER_S = 1'000'000'000;

struct alignas(64) Seat {
  std::atomic<uint32_t> number;
  std::atomic<uint32_t> num_sleeping;

};
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is a word");

// Numbers go round after 2^32 meetings.
bool is_reached(uint32_t number, uint32_t wanted) { return static_cast<int32_t>(number - wanted) >= 0; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * NS_PER_S + now.tv_nsec;
}

// Not of this process alone, so without FUTEX_PRIVATE_FLAG.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

// Who sits there has the same to do, and comes soon after or before.
bool wait_for(Seat& seat, uint32_t wanted, int64_t until_ns) {
  for (int spins = 0; spins < SPINS_BEFORE_SLEEP; ++spins) {
    if (is_reached(seat.number.load(), wanted)) return true;
    pause_for_a_turn();
  }
  // Whoever comes reads this after having written its number, and the number is read once more after this: one of both
  // sees the other.
  seat.num_sleeping.fetch_add(1);
  uint32_t seen;
  for (int64_t left_ns; !is_reached(seen = seat.number.load(), wanted) && (left_ns = until_ns - now_ns()) > 0;) {
    const timespec timeout{left_ns / NS_PER_S, left_ns % NS_PER_S};
    futex(seat.number, FUTEX_WAIT, seen, &timeout);
  }
  seat.num_sleeping.fetch_sub(1);
  return is_reached(seen, wanted);
}

}  // namespace

// Comes for the number-th time, and waits until all have. Returns whether they have within timeout_ms; who calls once
// more with the same number goes on waiting.
extern "C" int64_t meet(void* seats_of_all, int64_t rank, int64_t num_ranks, int64_t number, int64_t timeout_ms) {
  Seat* seats = static_cast<Seat*>(seats_of_all);
  const uint32_t wanted = static_cast<uint32_t>(number);
  Seat& own = seats[rank];
  own.number.store(wanted);
  if (own.num_sleeping.load() > 0) futex(own.number, FUTEX_WAKE, INT_MAX, nullptr);
  const int64_t until_ns = now_ns() + timeout_ms * NS_PER_MS;
  for (int64_t other = 0; other < num_ranks; ++other)
    if (other != rank && !wait_for(seats[other], wanted, until_ns)) return 0;
  return 1;
}
