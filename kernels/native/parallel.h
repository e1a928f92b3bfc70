// Work shared among threads of our own, who take pieces as they get to them: one that waits for a core holds up no
// more than the piece it has. (OpenMP hands out equal parts beforehand, and its threads wait in a way that costs twice
// to thirty times the work itself when another process wants the core.)
#pragma once
#include <cstdint>

// Within an item its thread is alone: what is run there, it does by itself. Where items are few and long, threads that have
// none any more help with those that others are still at: is_helped.

// Runs work(context, 0) .. work(context, num_items - 1), each once, in any order; returns when all are done.
void run_items(int64_t num_items, void (*work)(const void* context, int64_t item), const void* context,
               bool is_helped = false);

// That share what is run next; 1 within an item.
int64_t num_threads();

// Runs body(item) for each item.
template <typename Body>
void for_each(int64_t num_items, const Body& body, bool is_helped = false) {
  run_items(
      num_items, [](const void* context, int64_t item) { (*static_cast<const Body*>(context))(item); }, &body, is_helped);
}

// Runs body(start, end) on pieces of 0 .. size that are a multiple of grain, but for the last.
template <typename Body>
void for_ranges(int64_t size, int64_t grain, const Body& body) {
  for_each((size + grain - 1) / grain, [&](int64_t piece) {
    const int64_t start = piece * grain;
    body(start, start + grain < size ? start + grain : size);
  });
}
