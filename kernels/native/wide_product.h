// Products of bfloat16 as fused products of floats. Rows and weights are widened, which is exact, and the products of
// inputs are added separately and in order. For processors without an instruction for pairs of bfloat16, or with a slow
// one.
#pragma once
#include "results.h"

#if defined(__AVX512BF16__)
#include <cpuid.h>
#endif

namespace wide {

// Up to FEW_ROWS rows are multiplied with all vectors of a piece at once, in the order of memory; up to MAX_ROWS rows
// with half of them. More rows are cut into blocks of at least FEW_ROWS rows.
constexpr int FEW_ROWS = TILE_ROWS, MAX_ROWS = 2 * TILE_ROWS, HALF = TILE_VECTORS / 2;
constexpr int64_t WIDTH = TILE_VECTORS * LANES;
// Blocks per read of a panel; their rows stay in the L2 cache.
constexpr int64_t MAX_BLOCKS = 8, MIN_BLOCKS = 2;
constexpr int CHUNK = 16;  // inputs
// If a panel is read several times, each read prefetches a part of the next panel.
constexpr bool PREFETCHES_NEXT = WIDTH == PANEL;
constexpr int INTO_L2 = 2;  // locality of __builtin_prefetch

#if defined(__AVX512BF16__)
// Not __builtin_cpu_is: it needs the compiler's runtime library, where zig's never detects a processor.
inline bool is_intel_after_cooper_lake() {
  constexpr unsigned GENU = 0x756e6547;  // of GenuineIntel
  constexpr unsigned FAMILY_AND_MODEL = 0x0fff0ff0, COOPER_LAKE = 0x00050650;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != GENU) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (eax & FAMILY_AND_MODEL) != COOPER_LAKE;
}
#endif

// Depends on the processor only, so that a row's bits do not depend on other rows. Intel's instruction for pairs has
// half the rate of its products of floats, except on Cooper Lake; AMD's does not.
inline bool is_better() {
#if defined(__AVX512BF16__)
  static const bool are_pairs_slow = is_intel_after_cooper_lake();
  return are_pairs_slow;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return false;
#else
  return true;
#endif
}

// Division of rows into blocks of at most MAX_ROWS rows, of nearly equal size. A block of M rows is widened to
// [chunk of inputs][M][CHUNK].
struct Blocks {
  int64_t num, size, num_larger;

  explicit Blocks(int64_t num_rows)
      : num((num_rows + MAX_ROWS - 1) / MAX_ROWS), size(num_rows / num), num_larger(num_rows % num) {}

  int64_t start_of(int64_t block) const { return block * size + std::min(block, num_larger); }
  int64_t rows_of(int64_t block) const { return size + (block < num_larger ? 1 : 0); }
};

struct Rows {
  const float* values;
  int64_t stride;  // floats per row
  Blocks blocks;

  const float* block_rows(int64_t block) const { return values + blocks.start_of(block) * stride; }
};

inline Rows widen(const bfloat16* rows, int64_t row_stride, int64_t num_rows, int64_t num_inputs) {
  static thread_local std::vector<float> space;
  const int64_t stride = (num_inputs + CHUNK - 1) / CHUNK * CHUNK;
  if (static_cast<int64_t>(space.size()) < num_rows * stride) space.resize(num_rows * stride);
  const Rows result{space.data(), stride, Blocks(num_rows)};
  float* const values = space.data();
  for_ranges(result.blocks.num, 1, [&](int64_t block, int64_t) {
    const int64_t start = result.blocks.start_of(block), size = result.blocks.rows_of(block);
    for (int64_t m = 0; m < size; ++m) {
      const bfloat16* from = rows + (start + m) * row_stride;
      float* to = values + start * stride + m * CHUNK;
      for (int64_t first = 0; first < num_inputs; first += CHUNK, to += size * CHUNK) {
        const int64_t num = std::min<int64_t>(CHUNK, num_inputs - first);
#pragma omp simd
        for (int64_t i = 0; i < num; ++i) to[i] = to_float(from[first + i]);
      }
    }
  });
  return result;
}

// Sums of M rows and V vectors of outputs.
template <int M, int V>
struct Sums {
  FloatPart parts[M * V * PARTS];

  inline __attribute__((always_inline)) void put(int m, int v, Floats values) {
    for_constants<PARTS>([&](auto p) __attribute__((always_inline)) {
      std::memcpy(&parts[(m * V + v) * PARTS + p], reinterpret_cast<const char*>(&values) + p * PART_BYTES, PART_BYTES);
    });
  }

  inline __attribute__((always_inline)) Floats get(int m, int v) const {
    Floats values;
    for_constants<PARTS>([&](auto p) __attribute__((always_inline)) {
      std::memcpy(reinterpret_cast<char*>(&values) + p * PART_BYTES, &parts[(m * V + v) * PARTS + p], PART_BYTES);
    });
    return values;
  }

  // The inputs of successive rows are CHUNK apart.
  inline __attribute__((always_inline)) void add(const float* inputs, const FloatPart (&weights)[V * PARTS]) {
    for_constants<M>([&](auto m) __attribute__((always_inline)) {
      const float input = inputs[m * CHUNK];
      FloatPart* const sums = parts + m * V * PARTS;
      for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) { sums[p] += input * weights[p]; });
    });
  }

  // Adds the products of a block's rows with a panel. Each pair of inputs prefetches LINES lines at ahead.
  template <int LINES>
  inline __attribute__((always_inline)) void add_all(const float* rows, const char* columns, int64_t num_pairs,
                                                     const char* ahead) {
    for (int64_t pair = 0; pair < num_pairs; rows += M * CHUNK) {
      const float* inputs = rows;
      for (const int64_t end = std::min<int64_t>(num_pairs, pair + CHUNK / 2); pair < end; ++pair, inputs += 2) {
        const char* const soon = columns + PREFETCHED_GROUPS * PANEL_ROW_BYTES;
        for (int v = 0; v < V; ++v) __builtin_prefetch(soon + v * VECTOR_BYTES);
        for (int line = 0; line < LINES; ++line, ahead += VECTOR_BYTES) __builtin_prefetch(ahead, 0, INTO_L2);
        FloatPart first[V * PARTS], second[V * PARTS];
        for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) {
          const WordPart words = load_part(columns, p);
          first[p] = (FloatPart)(words << 16);
          second[p] = (FloatPart)(words & 0xffff0000u);
        });
        add(inputs, first);
        add(inputs + 1, second);
        columns += PANEL_ROW_BYTES;
      }
    }
  }
};

// Writes starts plus the products of a block's rows with V vectors of a panel to sums, [M][V] vectors. A separate
// function for each size, independent of the type of the results.
template <int M, int V, int LINES>
__attribute__((noinline)) void sum_block(const float* rows, const char* columns, int64_t num_pairs, const char* ahead,
                                         const Floats* starts, Floats* sums) {
  Sums<M, V> result;
  for_constants<M * V>([&](auto i) __attribute__((always_inline)) { result.put(i / V, i % V, starts[i % V]); });
  result.template add_all<LINES>(rows, columns, num_pairs, ahead);
  for_constants<M * V>([&](auto i) __attribute__((always_inline)) { sums[i] = result.get(i / V, i % V); });
}

// Calls sum_block for num_rows rows, from MIN_M to M.
template <int M, int MIN_M, int V, int LINES>
void sum_any(int64_t num_rows, const float* rows, const char* columns, int64_t num_pairs, const char* ahead,
             const Floats* starts, Floats* sums) {
  if (num_rows == M) return sum_block<M, V, LINES>(rows, columns, num_pairs, ahead, starts, sums);
  if constexpr (M > MIN_M) sum_any<M - 1, MIN_M, V, LINES>(num_rows, rows, columns, num_pairs, ahead, starts, sums);
}

// Outputs of a panel from first on, for blocks of rows.
template <typename Out>
struct Piece {
  const char* columns;
  int64_t num_pairs;
  Results<bfloat16, bfloat16, Out> results;

  Piece(const Linear& weight, const Results<bfloat16, bfloat16, Out>& all, int64_t first)
      : columns(static_cast<const char*>(weight.packed) + first / PANEL * weight.num_inputs / 2 * PANEL_ROW_BYTES +
                first % PANEL * GROUP_BYTES),
        num_pairs(weight.num_inputs / 2),
        results(all.at(0, first)) {}

  template <int M, int MIN_M, int V, int LINES>
  void run(int64_t num_rows, const float* rows, int64_t first_row, const char* ahead) const {
    Floats starts[V], sums[M * V];
    for (int v = 0; v < V; ++v) starts[v] = results.initial_sum(v);
    sum_any<M, MIN_M, V, LINES>(num_rows, rows, columns, num_pairs, ahead, starts, sums);
    for (int64_t m = 0; m < num_rows; ++m) {
      for (int v = 0; v < V && v * LANES < results.num_outputs; ++v) results.write(sums[m * V + v], first_row + m, v);
    }
  }
};

// Computes pieces of WIDTH outputs, or of fewer if they are narrow.
template <typename Out>
struct Work {
  const Linear& weight;
  const Rows& rows;
  const Results<bfloat16, bfloat16, Out>& results;

  void run_few_rows(int64_t first, bool is_narrow) const {
    const Piece<Out> piece(weight, results, first);
    if (is_narrow) return piece.template run<FEW_ROWS, 1, 1, 0>(rows.blocks.size, rows.values, 0, nullptr);
    piece.template run<FEW_ROWS, 1, TILE_VECTORS, 0>(rows.blocks.size, rows.values, 0, nullptr);
  }

  // Computes the blocks from start to end, and prefetches parts of another panel.
  void run_many_rows(int64_t first, int64_t num_outputs, int64_t next, int64_t start, int64_t end) const {
    const char* ahead = Piece<Out>(weight, results, next < weight.num_outputs ? next : first).columns;
    const int64_t part = weight.num_inputs / 2 * VECTOR_BYTES;
    constexpr int LINES = PREFETCHES_NEXT ? 1 : 0;
    for (int64_t half = 0, pass = 0; half * HALF * LANES < num_outputs; ++half) {
      const Piece<Out> piece(weight, results, first + half * HALF * LANES);
      for (int64_t block = start; block < end; ++block, ++pass) {
        const int64_t row = rows.blocks.start_of(block), num = rows.blocks.rows_of(block);
        const float* const inputs = rows.block_rows(block);
        if (end - start == 1) {
          piece.template run<MAX_ROWS, FEW_ROWS, HALF, 2 * LINES>(num, inputs, row, ahead + pass * 2 * part);
        } else {
          piece.template run<MAX_ROWS, FEW_ROWS, HALF, LINES>(num, inputs, row, ahead + pass % PANEL_VECTORS * part);
        }
      }
    }
  }
};

template <typename Out>
void multiply(const bfloat16* inputs, int64_t input_stride, const Linear& weight,
              const Results<bfloat16, bfloat16, Out>& results, int64_t num_rows) {
  if (num_rows == 0) return;
  const Rows rows = widen(inputs, input_stride, num_rows, weight.num_inputs);
  const Work<Out> work{weight, rows, results};
  const int64_t num_blocks = rows.blocks.num, num_outputs = weight.num_outputs;
  const int64_t min_items = num_threads() == 1 ? 1 : 8 * num_threads(), num_pieces = (num_outputs + WIDTH - 1) / WIDTH;
  int64_t max_blocks = MAX_BLOCKS;
  const auto num_cuts = [&] { return (num_blocks + max_blocks - 1) / max_blocks; };
  while (max_blocks > MIN_BLOCKS && num_pieces * num_cuts() < min_items) max_blocks /= 2;
  const int64_t cuts = num_cuts(), num_wide = cuts == 1 ? num_pieces / num_threads() * num_threads() : num_pieces;
  const bool is_few = num_rows <= FEW_ROWS;
  const int64_t width = is_few ? LANES : HALF * LANES;
  const int64_t num_narrow = std::max<int64_t>(0, (num_outputs - num_wide * WIDTH + width - 1) / width);
  for_each(num_wide * cuts + num_narrow, [&](int64_t item) {
    const bool is_narrow = item >= num_wide * cuts;
    const int64_t first = is_narrow ? num_wide * WIDTH + (item - num_wide * cuts) * width : item / cuts * WIDTH;
    if (is_few) return work.run_few_rows(first, is_narrow);
    const int64_t cut = is_narrow ? 0 : item % cuts, next = first + (num_threads() + cuts - 1) / cuts * WIDTH;
    work.run_many_rows(first, std::min(is_narrow ? width : WIDTH, num_outputs - first), next, cut * num_blocks / cuts,
              (cut + 1) * num_blocks / cuts);
  });
}

}  // namespace wide
