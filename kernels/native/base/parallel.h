// A thread pool whose threads claim pieces of work dynamically, so a thread that waits for a core only delays its
// current piece. (OpenMP distributes equal parts in advance, and its threads wait in a way that costs twice to thirty
// times the work itself when another process needs the core.)
#pragma once
#include <cstdint>

// Nested work within an item runs on its thread alone. With is_helped, for few and long items, threads without an item
// help with the nested work of others.

// Runs work(context, 0) .. work(context, num_items - 1), each once, in any order; returns when all are done.
void run_items(int64_t num_items, void (*work)(const void* context, int64_t item), const void* context,
               bool is_helped = false);

// Number of threads that share work started here; 1 within an item.
int64_t num_threads();

// Runs body(item) for each item.
template <typename Body>
void for_each(int64_t num_items, const Body& body, bool is_helped = false) {
  run_items(
      num_items, [](const void* context, int64_t item) { (*static_cast<const Body*>(context))(item); }, &body,
      is_helped);
}

// Runs body(start, end) on pieces of 0 .. size with grain elements each, except the last.
template <typename Body>
void for_ranges(int64_t size, int64_t grain, const Body& body) {
  for_each((size + grain - 1) / grain, [&](int64_t piece) {
    const int64_t start = piece * grain;
    body(start, start + grain < size ? start + grain : size);
  });
}
