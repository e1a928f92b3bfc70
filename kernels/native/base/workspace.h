#pragma once
#include <vector>

#include "base/lanes.h"

// Thread-local memory that is reused from step to step, cut into parts.
class Workspace {
 public:
  explicit Workspace(size_t num_bytes) {
    if (memory().size() < num_bytes) memory().resize(num_bytes);
    next_ = memory().data();
  }

  template <typename T>
  T* allocate(int64_t num) {
    T* start = reinterpret_cast<T*>(next_);
    next_ += (num * sizeof(T) + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
    return start;
  }

 private:
  static std::vector<char>& memory() {
    static thread_local std::vector<char> buffer;
    return buffer;
  }

  char* next_;
};
