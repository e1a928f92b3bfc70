// Ends with 0 once two threads have shared what one of them runs within an item that is helped with, and every item was
// run once; with 1 if that has not happened in a minute. "alone" as the argument: they must never share it.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/parallel.h"

extern "C" void set_num_threads(int64_t num_threads);

namespace {

constexpr int64_t NUM_PARTS = 64;
constexpr int NUM_ROUNDS_ALONE = 2000;

// Runs parts within an item, each of them once, and says whether several threads did.
bool run_parts() {
  std::atomic<int64_t> times[NUM_PARTS] = {};
  std::atomic<bool> was_another{false};
  const std::thread::id own = std::this_thread::get_id();
  for_each(NUM_PARTS, [&](int64_t part) {
    times[part].fetch_add(1);
    if (std::this_thread::get_id() != own) was_another = true;
    // What is within such a part again is its thread's own.
    for_each(2, [&](int64_t) { if (num_threads() != 1) std::abort(); });
  });
  for (const std::atomic<int64_t>& count : times) {
    if (count != 1) std::abort();
  }
  return was_another;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_helped = !(argc > 1 && std::strcmp(argv[1], "alone") == 0);
  bool is_shared = false;
  set_num_threads(2);
  for_each(2, [&](int64_t item) {
    if (item == 0) return;  // whoever has this one is free
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    for (int round = 0; !is_shared && (is_helped || round < NUM_ROUNDS_ALONE); ++round) {
      if (std::chrono::steady_clock::now() > until) return;
      is_shared = run_parts();
      std::this_thread::yield();
    }
  }, is_helped);
  set_num_threads(1);
  return is_shared == is_helped ? 0 : 1;
}
