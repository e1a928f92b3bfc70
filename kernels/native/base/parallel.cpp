#include "base/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>

#include "base/pause.h"

namespace {

// A caller that spins longer than this for the last item of another thread yields the core.
constexpr int SPINS_BEFORE_YIELD = 3000;

// Scope of this thread's work. Within an item, it runs nested work alone. Within a helped item, idle threads share its
// nested work.
enum class Scope { NONE, ITEM, HELPED_ITEM };
thread_local Scope scope = Scope::NONE;

void run_item(void (*work)(const void*, int64_t), const void* context, int64_t item, Scope item_scope) {
  const Scope before = scope;
  scope = item_scope;
  work(context, item);
  scope = before;
}

// Items that threads claim one by one. One atomic word holds the round (16 bits), the number of items (24) and the next
// item (24), so a thread that claims an item claims it from the current round.
class Items {
 public:
  static constexpr int64_t MAX_ITEMS = (1 << 24) - 1;

  void begin(int64_t num_items, void (*work)(const void*, int64_t), const void* context, Scope item_scope) {
    work_ = work;
    context_ = context;
    scope_ = item_scope;
    num_finished_.store(0, std::memory_order_relaxed);
    ticket_.store((++round_ & 0xffff) << 48 | static_cast<uint64_t>(num_items) << 24);
  }

  // Runs one item; returns false if none is left.
  bool run_next() {
    uint64_t word = ticket_.load(std::memory_order_acquire);
    do {
      if (next_of(word) >= items_of(word)) return false;
    } while (!ticket_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    // The caller waits until this item has finished, so work and context stay valid.
    run_item(work_, context_, next_of(word), scope_);
    num_finished_.fetch_add(1, std::memory_order_release);
    return true;
  }

  bool has_items_left() const {
    const uint64_t word = ticket_.load();
    return next_of(word) < items_of(word);
  }

  // Number of items that have not finished, including unclaimed ones.
  int64_t num_unfinished() const {
    return static_cast<int64_t>(items_of(ticket_.load())) - num_finished_.load(std::memory_order_acquire);
  }

 private:
  static uint64_t items_of(uint64_t word) { return word >> 24 & 0xffffff; }
  static uint64_t next_of(uint64_t word) { return word & 0xffffff; }

  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_finished_{0};
  void (*work_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  Scope scope_ = Scope::ITEM;
  uint64_t round_ = 0;
};

// Holds a mutex while it is in scope.
class Lock {
 public:
  explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Lock() { pthread_mutex_unlock(&mutex_); }
  Lock(const Lock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

// With threads of the C library and without a destructor, so that it needs no C++ library and no start.
class Pool {
 public:
  int64_t size() const { return num_helpers_ + 1; }

  void resize(int64_t num_threads) {
    Lock guard(caller_);
    {
      Lock lock(sleep_);
      is_ending_ = true;
    }
    pthread_cond_broadcast(&wake_);
    for (int64_t i = 0; i < num_helpers_; ++i) pthread_join(helpers_[i], nullptr);
    delete[] helpers_;
    helpers_ = num_threads > 1 ? new pthread_t[num_threads - 1] : nullptr;
    num_helpers_ = 0;
    is_ending_ = false;
    // With fewer helpers if the system has no more threads.
    while (num_helpers_ < num_threads - 1 && !pthread_create(&helpers_[num_helpers_], nullptr, start, this)) {
      ++num_helpers_;
    }
  }

  void run(int64_t num_items, void (*work)(const void*, int64_t), const void* context, bool is_helped) {
    // While another thread of the process uses the pool, this thread works alone.
    if (num_items < 2 || num_items > Items::MAX_ITEMS || pthread_mutex_trylock(&caller_) != 0) {
      return run_alone(num_items, work, context);
    }
    if (num_helpers_ == 0) {
      run_alone(num_items, work, context);
    } else {
      items_.begin(num_items, work, context, is_helped ? Scope::HELPED_ITEM : Scope::ITEM);
      wake();
      while (items_.run_next()) continue;
      wait_for(items_);
    }
    pthread_mutex_unlock(&caller_);
  }

  // Runs work within a helped item, by this thread and by idle ones.
  void run_nested(int64_t num_items, void (*work)(const void*, int64_t), const void* context) {
    const bool has_idle_thread = !items_.has_items_left() && items_.num_unfinished() < size();
    if (num_items < 2 || num_items > Items::MAX_ITEMS || !has_idle_thread || is_nested_busy_.exchange(true)) {
      for (int64_t item = 0; item < num_items; ++item) work(context, item);
      return;
    }
    nested_.begin(num_items, work, context, Scope::ITEM);
    wake();
    while (nested_.run_next()) continue;
    wait_for(nested_);
    is_nested_busy_.store(false);
  }

 private:
  static void* start(void* pool) {
    static_cast<Pool*>(pool)->help();
    return nullptr;
  }

  static void run_alone(int64_t num_items, void (*work)(const void*, int64_t), const void* context) {
    for (int64_t item = 0; item < num_items; ++item) run_item(work, context, item, Scope::ITEM);
  }

  void wake() {
    if (num_sleeping_.load() == 0) return;
    Lock lock(sleep_);
    pthread_cond_broadcast(&wake_);
  }

  // Helps with nested work meanwhile.
  void wait_for(const Items& items) {
    for (int spins = 0; items.num_unfinished() > 0; ++spins) {
      if (nested_.run_next()) {
        spins = 0;
      } else {
        spins < SPINS_BEFORE_YIELD ? spin_pause() : static_cast<void>(sched_yield());
      }
    }
  }

  void help() {
    for (int spins = 0;;) {
      if (items_.run_next() || nested_.run_next()) {
        spins = 0;
      } else if (++spins < SPINS_BEFORE_SLEEP) {
        spin_pause();
      } else {
        Lock lock(sleep_);
        num_sleeping_.fetch_add(1);
        while (!is_ending_ && !items_.has_items_left() && !nested_.has_items_left()) {
          pthread_cond_wait(&wake_, &sleep_);
        }
        num_sleeping_.fetch_sub(1);
        if (is_ending_) return;
        spins = 0;
      }
    }
  }

  Items items_, nested_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_nested_busy_{false};
  bool is_ending_ = false;
  pthread_mutex_t caller_ = PTHREAD_MUTEX_INITIALIZER, sleep_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  pthread_t* helpers_ = nullptr;
  int64_t num_helpers_ = 0;
};

// Never destroyed, because threads may still use it while the process exits.
Pool pool;

}  // namespace

void run_items(int64_t num_items, void (*work)(const void*, int64_t), const void* context, bool is_helped) {
  if (scope == Scope::NONE) return pool.run(num_items, work, context, is_helped);
  if (scope == Scope::HELPED_ITEM) return pool.run_nested(num_items, work, context);
  for (int64_t item = 0; item < num_items; ++item) work(context, item);
}

int64_t num_threads() { return scope == Scope::NONE ? pool.size() : 1; }

extern "C" void set_num_threads(int64_t num_threads) { pool.resize(num_threads); }
extern "C" int64_t get_num_threads() { return num_threads(); }
