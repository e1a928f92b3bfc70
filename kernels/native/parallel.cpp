#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

// Some 20 us: longer than the time between two operations of a model, shorter than that between two steps.
constexpr int SPINS_BEFORE_SLEEP = 1500;
// A caller that waits longer than this for a helper's last piece lets others have the core.
constexpr int SPINS_BEFORE_YIELD = 3000;
constexpr int64_t MAX_ITEMS = (1 << 24) - 1;

void pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
}

// This thread is at an item of work: what it runs within that, it does alone.
thread_local bool is_at_item = false;

void run_item(void (*work)(const void*, int64_t), const void* context, int64_t item) {
  is_at_item = true;
  work(context, item);
  is_at_item = false;
}

// One word says which work it is, how many items it has and which is next, so whoever takes an item takes it of that
// work: round (16 bits), number of items (24), next item (24).
uint64_t ticket(uint64_t round, uint64_t num_items, uint64_t next) { return round << 48 | num_items << 24 | next; }
uint64_t items_of(uint64_t word) { return word >> 24 & 0xffffff; }
uint64_t next_of(uint64_t word) { return word & 0xffffff; }

class Pool {
 public:
  ~Pool() { resize(1); }

  int64_t size() const { return static_cast<int64_t>(helpers_.size()) + 1; }

  void resize(int64_t num_threads) {
    std::lock_guard<std::mutex> only(caller_);
    {
      std::lock_guard<std::mutex> lock(sleep_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
    is_ending_ = false;
    for (int64_t i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  void run(int64_t num_items, void (*work)(const void*, int64_t), const void* context) {
    std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
    // Another thread of the process computes: the pool is its own till then.
    if (!only.owns_lock() || helpers_.empty() || num_items < 2 || num_items > MAX_ITEMS) {
      for (int64_t item = 0; item < num_items; ++item) run_item(work, context, item);
      return;
    }
    work_ = work;
    context_ = context;
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store(ticket(++round_ & 0xffff, num_items, 0));
    if (num_sleeping_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    while (take()) continue;
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_items; ++spins) {
      spins < SPINS_BEFORE_YIELD ? pause() : std::this_thread::yield();
    }
  }

 private:
  // Does one item, if any is left.
  bool take() {
    uint64_t word = ticket_.load(std::memory_order_acquire);
    do {
      if (next_of(word) >= items_of(word)) return false;
    } while (!ticket_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    // Till this item is done, the caller waits, so what belongs to the work stays.
    run_item(work_, context_, next_of(word));
    num_done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void help() {
    for (int spins = 0;;) {
      if (take()) {
        spins = 0;
      } else if (++spins < SPINS_BEFORE_SLEEP) {
        pause();
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, [this] { return is_ending_ || has_items(); });
        num_sleeping_.fetch_sub(1);
        if (is_ending_) return;
        spins = 0;
      }
    }
  }

  bool has_items() const {
    const uint64_t word = ticket_.load();
    return next_of(word) < items_of(word);
  }

  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_done_{0};
  std::atomic<int> num_sleeping_{0};
  void (*work_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  uint64_t round_ = 0;
  bool is_ending_ = false;
  std::mutex caller_, sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> helpers_;
};

Pool& pool() {
  static Pool* const only = new Pool;  // outlives every thread that might still look at it while the process ends
  return *only;
}

}  // namespace

void run_items(int64_t num_items, void (*work)(const void*, int64_t), const void* context) {
  if (!is_at_item) return pool().run(num_items, work, context);
  for (int64_t item = 0; item < num_items; ++item) work(context, item);
}

int64_t num_threads() { return is_at_item ? 1 : pool().size(); }

extern "C" void set_num_threads(int64_t num_threads) { pool().resize(num_threads); }
extern "C" int64_t get_num_threads() { return num_threads(); }
