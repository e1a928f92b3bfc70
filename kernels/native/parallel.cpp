#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "pause.h"

namespace {

// A caller that waits longer than this for a helper's last piece lets others have the core.
constexpr int SPINS_BEFORE_YIELD = 3000;

// What this thread runs within an item of work, it does alone; or, where the item is one that is helped with, together
// with threads that have no item.
enum class At { NOTHING, ITEM, HELPED_ITEM };
thread_local At at = At::NOTHING;

void run_item(void (*work)(const void*, int64_t), const void* context, int64_t item, At as) {
  const At before = at;
  at = as;
  work(context, item);
  at = before;
}

// Items that threads take one by one. One word says which work it is, how many items it has and which is next, so whoever
// takes an item takes it of that work: round (16 bits), number of items (24), next item (24).
class Items {
 public:
  static constexpr int64_t MOST = (1 << 24) - 1;

  void begin(int64_t num_items, void (*work)(const void*, int64_t), const void* context, At as) {
    work_ = work;
    context_ = context;
    as_ = as;
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store((++round_ & 0xffff) << 48 | static_cast<uint64_t>(num_items) << 24);
  }

  // Does one item, if any is left.
  bool take() {
    uint64_t word = ticket_.load(std::memory_order_acquire);
    do {
      if (next_of(word) >= items_of(word)) return false;
    } while (!ticket_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    // Till this item is done, the caller waits, so what belongs to the work stays.
    run_item(work_, context_, next_of(word), as_);
    num_done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  bool are_left() const {
    const uint64_t word = ticket_.load();
    return next_of(word) < items_of(word);
  }

  // Items that were not taken, or are not done.
  int64_t num_undone() const {
    return static_cast<int64_t>(items_of(ticket_.load())) - num_done_.load(std::memory_order_acquire);
  }

 private:
  static uint64_t items_of(uint64_t word) { return word >> 24 & 0xffffff; }
  static uint64_t next_of(uint64_t word) { return word & 0xffffff; }

  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_done_{0};
  void (*work_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  At as_ = At::ITEM;
  uint64_t round_ = 0;
};

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

  void run(int64_t num_items, void (*work)(const void*, int64_t), const void* context, bool is_helped) {
    std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
    // Another thread of the process computes: the pool is its own till then.
    if (!only.owns_lock() || helpers_.empty() || num_items < 2 || num_items > Items::MOST) {
      for (int64_t item = 0; item < num_items; ++item) run_item(work, context, item, At::ITEM);
      return;
    }
    items_.begin(num_items, work, context, is_helped ? At::HELPED_ITEM : At::ITEM);
    wake();
    while (items_.take()) continue;
    wait_for(items_);
  }

  // The same within an item that is helped with, by this thread and those that have none.
  void run_within(int64_t num_items, void (*work)(const void*, int64_t), const void* context) {
    const bool is_anybody_free = !items_.are_left() && items_.num_undone() < size();
    if (num_items < 2 || num_items > Items::MOST || !is_anybody_free || is_helping_.exchange(true)) {
      for (int64_t item = 0; item < num_items; ++item) work(context, item);
      return;
    }
    within_.begin(num_items, work, context, At::ITEM);
    wake();
    while (within_.take()) continue;
    wait_for(within_);
    is_helping_.store(false);
  }

 private:
  void wake() {
    if (num_sleeping_.load() == 0) return;
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }

  // Helps meanwhile with what others are at.
  void wait_for(const Items& items) {
    for (int spins = 0; items.num_undone() > 0; ++spins) {
      if (within_.take()) {
        spins = 0;
      } else {
        spins < SPINS_BEFORE_YIELD ? pause_for_a_turn() : std::this_thread::yield();
      }
    }
  }

  void help() {
    for (int spins = 0;;) {
      if (items_.take() || within_.take()) {
        spins = 0;
      } else if (++spins < SPINS_BEFORE_SLEEP) {
        pause_for_a_turn();
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, [this] { return is_ending_ || items_.are_left() || within_.are_left(); });
        num_sleeping_.fetch_sub(1);
        if (is_ending_) return;
        spins = 0;
      }
    }
  }

  Items items_, within_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_helping_{false};
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

void run_items(int64_t num_items, void (*work)(const void*, int64_t), const void* context, bool is_helped) {
  if (at == At::NOTHING) return pool().run(num_items, work, context, is_helped);
  if (at == At::HELPED_ITEM) return pool().run_within(num_items, work, context);
  for (int64_t item = 0; item < num_items; ++item) work(context, item);
}

int64_t num_threads() { return at == At::NOTHING ? pool().size() : 1; }

extern "C" void set_num_threads(int64_t num_threads) { pool().resize(num_threads); }
extern "C" int64_t get_num_threads() { return num_threads(); }
