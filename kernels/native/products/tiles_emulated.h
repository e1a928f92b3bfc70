// The functions of tiles.h in plain C++, with the bits of the instructions (except for a result that rounds up to
// exactly the smallest normal number), so that machines without the instructions can test the code that uses them.
#pragma once
#include <cmath>
#include <cstring>

#include "base/scalar.h"

#define PENSTOCK_INLINE inline

namespace tiles {

struct Registers {
  Shapes shapes;
  alignas(64) uint8_t bytes[NUM][ROWS][ROW_BYTES];
};

inline Registers& registers() {
  static thread_local Registers registers;
  return registers;
}

inline void configure(const Shapes& shapes) {
  registers() = {};
  registers().shapes = shapes;
}

template <int T>
void zero() {
  std::memset(registers().bytes[T], 0, sizeof(registers().bytes[T]));
}

template <int T>
void load(const void* from, int64_t stride) {
  Registers& r = registers();
  zero<T>();
  for (int row = 0; row < r.shapes.rows[T]; ++row) {
    std::memcpy(r.bytes[T][row], static_cast<const char*>(from) + row * stride, r.shapes.row_bytes[T]);
  }
}

template <int T>
void store(void* to, int64_t stride) {
  const Registers& r = registers();
  for (int row = 0; row < r.shapes.rows[T]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, r.bytes[T][row], r.shapes.row_bytes[T]);
  }
}

// Inputs and results smaller than the smallest normal number count as zero.
inline float flush(float value) { return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value; }

constexpr int COLUMNS = ROW_BYTES / 4;

// Columns are the innermost loop, so that the compiler vectorises it.
template <int C, int A, int B>
void add_products_of_pairs() {
  Registers& r = registers();
  const int num_pairs = r.shapes.row_bytes[A] / 4;
  for (int row = 0; row < r.shapes.rows[C]; ++row) {
    float sums[2][COLUMNS] = {}, totals[COLUMNS];
    for (int pair = 0; pair < num_pairs; ++pair) {
      bfloat16 inputs[2], columns[2 * COLUMNS];
      std::memcpy(inputs, &r.bytes[A][row][4 * pair], sizeof(inputs));
      std::memcpy(columns, r.bytes[B][pair], sizeof(columns));
      for (int i = 0; i < 2; ++i) {
        const float input = flush(to_float(inputs[i]));
        for (int column = 0; column < COLUMNS; ++column) {
          sums[i][column] = flush(std::fma(input, flush(to_float(columns[2 * column + i])), sums[i][column]));
        }
      }
    }
    std::memcpy(totals, r.bytes[C][row], sizeof(totals));
    for (int column = 0; column < COLUMNS; ++column) {
      totals[column] = flush(flush(totals[column]) + flush(sums[0][column] + sums[1][column]));
    }
    std::memcpy(r.bytes[C][row], totals, r.shapes.row_bytes[C]);
  }
}

// Sums wrap around, as those of the instruction do.
template <int C, int A, int B>
void add_products_of_fours() {
  Registers& r = registers();
  const int num_groups = r.shapes.row_bytes[A] / 4;
  for (int row = 0; row < r.shapes.rows[C]; ++row) {
    uint32_t totals[COLUMNS];
    std::memcpy(totals, r.bytes[C][row], sizeof(totals));
    for (int group = 0; group < num_groups; ++group) {
      for (int i = 0; i < 4; ++i) {
        const int32_t input = r.bytes[A][row][4 * group + i];
        for (int column = 0; column < COLUMNS; ++column) {
          totals[column] += static_cast<uint32_t>(input * static_cast<int8_t>(r.bytes[B][group][4 * column + i]));
        }
      }
    }
    std::memcpy(r.bytes[C][row], totals, r.shapes.row_bytes[C]);
  }
}

}  // namespace tiles
