// Products with widened rows and weights, which is exact. Bfloat16 becomes float, and the products of inputs are fused
// and added in order; for processors without an instruction for pairs of bfloat16, or with a slow one. Bytes become 16
// bits, of which two products are added at once; for x86 without an instruction for products of four bytes.
#pragma once
#include "products/results.h"
#include "weights/nibbles.h"

#if defined(__AVX512BF16__)
#include <cpuid.h>
#endif

namespace wide {

// Up to FEW_ROWS rows of a form are multiplied with all vectors of a piece at once, in the order of memory; up to
// MAX_ROWS rows with half of them. More rows are cut into blocks of at least FEW_ROWS rows.
constexpr int MAX_ROWS = 2 * TILE_ROWS, HALF = TILE_VECTORS / 2;
// Blocks per read of a panel; their rows stay in the L2 cache.
constexpr int64_t MAX_BLOCKS = 8, MIN_BLOCKS = 2;
constexpr int CHUNK = 16;  // words

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
inline bool is_better_for_pairs() {
#if defined(__AVX512BF16__)
  static const bool are_pairs_slow = is_intel_after_cooper_lake();
  return are_pairs_slow;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return false;
#else
  return true;
#endif
}

// Words of widened inputs. A group of weights (lanes.h) has two vectors of them: `first` and `second`.
template <typename In>
struct Form;

template <>
struct Form<bfloat16> {
  using Word = float;
  using Part = FloatPart;
  // Without registers of 64 bytes, one row less leaves some for inputs.
  static constexpr int FEW_ROWS = PARTS == 1 ? TILE_ROWS : TILE_ROWS - 1;

  static bool is_better() { return is_better_for_pairs(); }

  static void widen(const bfloat16* from, int64_t num_words, float* to) {
#pragma omp simd
    for (int64_t i = 0; i < num_words; ++i) to[i] = to_float(from[i]);
  }

  static Part first(WordPart group) { return (Part)(group << 16); }
  static Part second(WordPart group) { return (Part)(group & 0xffff0000u); }
  static Part add_product(Part sum, float word, Part weights) { return sum + word * weights; }
};

// A word has two of the four inputs of a group: the first and the third, or the second and the fourth.
template <>
struct Form<uint8_t> {
  using Word = int32_t;
  using Part = IntPart;
  static constexpr int FEW_ROWS = TILE_ROWS;
  typedef int16_t Shorts __attribute__((vector_size(PART_BYTES)));

#if defined(__AVX512VNNI__) || (defined(__AVX512F__) && !defined(__AVX512BW__)) || !defined(__AVX2__)
  static constexpr bool is_better() { return false; }
#else
  static constexpr bool is_better() { return true; }
#endif

  static void widen(const uint8_t* from, int64_t num_words, int32_t* to) {
    for (int64_t i = 0; i < num_words; i += 2) {
      uint32_t four;
      std::memcpy(&four, from + 2 * i, sizeof(four));
      to[i] = static_cast<int32_t>(four & 0x00ff00ff), to[i + 1] = static_cast<int32_t>(four >> 8 & 0x00ff00ff);
    }
  }

  static Part first(WordPart group) { return (Part)((Shorts)(group << 8) >> 8); }
  static Part second(WordPart group) { return (Part)((Shorts)group >> 8); }

  static Part add_product(Part sum, int32_t word, Part weights) {
#if defined(__AVX512BW__)
    return sum + (Part)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(word));
#elif defined(__AVX2__)
    return sum + (Part)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(word));
#else
    return sum + word * weights;  // never called
#endif
  }
};

// Division of rows into blocks of at most MAX_ROWS rows, of nearly equal size. A block of M rows is widened to
// [chunk of words][M][CHUNK].
struct Blocks {
  int64_t num, size, num_larger;

  explicit Blocks(int64_t num_rows)
      : num((num_rows + MAX_ROWS - 1) / MAX_ROWS), size(num_rows / num), num_larger(num_rows % num) {}

  int64_t start_of(int64_t block) const { return block * size + std::min(block, num_larger); }
  int64_t rows_of(int64_t block) const { return size + (block < num_larger ? 1 : 0); }
};

template <typename In>
struct Rows {
  using Word = typename Form<In>::Word;
  const Word* values;
  int64_t stride;  // words per row
  Blocks blocks;

  const Word* block_rows(int64_t block) const { return values + blocks.start_of(block) * stride; }
};

template <typename In>
Rows<In> widen(const In* rows, int64_t row_stride, int64_t num_rows, int64_t num_inputs) {
  using Word = typename Form<In>::Word;
  constexpr int64_t WORD_INPUTS = GROUP<In> / 2;
  static thread_local std::vector<Word> space;
  const int64_t num_words = num_inputs / WORD_INPUTS, stride = (num_words + CHUNK - 1) / CHUNK * CHUNK;
  if (static_cast<int64_t>(space.size()) < num_rows * stride) space.resize(num_rows * stride);
  const Rows<In> result{space.data(), stride, Blocks(num_rows)};
  Word* const values = space.data();
  for_ranges(result.blocks.num, 1, [&](int64_t block, int64_t) {
    const int64_t start = result.blocks.start_of(block), size = result.blocks.rows_of(block);
    for (int64_t m = 0; m < size; ++m) {
      const In* from = rows + (start + m) * row_stride;
      Word* to = values + start * stride + m * CHUNK;
      for (int64_t first = 0; first < num_words; first += CHUNK, to += size * CHUNK) {
        Form<In>::widen(from + first * WORD_INPUTS, std::min<int64_t>(CHUNK, num_words - first), to);
      }
    }
  });
  return result;
}

// Makes the compiler load weights again where registers are few: with both vectors of a group in registers, it would
// store sums in memory, whose latency the next sums would wait for.
inline __attribute__((always_inline)) void reload() {
  if constexpr (PART_BYTES < VECTOR_BYTES) asm volatile("" ::: "memory");
}

template <typename In>
using Sum = std::conditional_t<std::is_same_v<typename Form<In>::Part, FloatPart>, Floats, Ints>;

// Sums of a block of M rows and V vectors of outputs.
template <typename In, int M, int V>
struct BlockSums : Sums<Sum<In>, M, V> {
  using Form = wide::Form<In>;
  using Word = typename Form::Word;
  using Part = typename Form::Part;

  // The words of successive rows are CHUNK apart.
  inline __attribute__((always_inline)) void add(const Word* words, const Part (&weights)[V * PARTS]) {
    for_constants<M>([&](auto m) __attribute__((always_inline)) {
      const Word word = words[m * CHUNK];
      Part* const sums = this->parts + m * V * PARTS;
      for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) {
        sums[p] = Form::add_product(sums[p], word, weights[p]);
      });
    });
  }

  // Adds the products of a block's rows with a panel. Each group prefetches LINES lines at ahead.
  template <int LINES>
  inline __attribute__((always_inline)) void add_all(const Word* rows, const char* columns, int64_t num_groups,
                                                     const char* ahead) {
    for (int64_t group = 0; group < num_groups; rows += M * CHUNK) {
      const Word* words = rows;
      for (const int64_t end = std::min<int64_t>(num_groups, group + CHUNK / 2); group < end; ++group, words += 2) {
        const char* const soon = columns + PREFETCHED_GROUPS * PANEL_ROW_BYTES;
        for (int v = 0; v < V; ++v) __builtin_prefetch(soon + v * VECTOR_BYTES);
        for (int line = 0; line < LINES; ++line, ahead += VECTOR_BYTES) __builtin_prefetch(ahead, 0, INTO_L2);
        Part weights[V * PARTS];
        for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) {
          weights[p] = Form::first(load_part(columns, p));
        });
        add(words, weights);
        reload();
        for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) {
          weights[p] = Form::second(load_part(columns, p));
        });
        add(words + 1, weights);
        columns += PANEL_ROW_BYTES;
      }
    }
  }
};

// Writes starts plus the products of a block's rows with V vectors of a panel to sums, [M][V] vectors. A separate
// function for each size, independent of the type of the results.
template <typename In, int M, int V, int LINES>
__attribute__((noinline)) void sum_block(const typename Form<In>::Word* rows, const char* columns, int64_t num_groups,
                                         const char* ahead, const Sum<In>* starts, Sum<In>* sums) {
  BlockSums<In, M, V> result;
  result.set_rows([&](int v) __attribute__((always_inline)) { return starts[v]; });
  result.template add_all<LINES>(rows, columns, num_groups, ahead);
  for_constants<M * V>([&](auto i) __attribute__((always_inline)) { sums[i] = result.get(i / V, i % V); });
}

// Calls sum_block for num_rows rows, from MIN_M to M.
template <typename In, int M, int MIN_M, int V, int LINES>
void sum_any(int64_t num_rows, const typename Form<In>::Word* rows, const char* columns, int64_t num_groups,
             const char* ahead, const Sum<In>* starts, Sum<In>* sums) {
  if (num_rows == M) return sum_block<In, M, V, LINES>(rows, columns, num_groups, ahead, starts, sums);
  if constexpr (M > MIN_M) {
    sum_any<In, M - 1, MIN_M, V, LINES>(num_rows, rows, columns, num_groups, ahead, starts, sums);
  }
}

// Some outputs of a panel, for blocks of rows. The groups of their weights begin at columns.
template <typename T, typename In, typename Out>
struct Piece {
  const char* columns;
  int64_t num_groups;
  Results<T, In, Out> results;

  template <int M, int MIN_M, int V, int LINES>
  void run(int64_t num_rows, const typename Form<In>::Word* rows, int64_t first_row, const char* ahead) const {
    Sum<In> starts[V], sums[M * V];
    for (int v = 0; v < V; ++v) starts[v] = results.initial_sum(v);
    sum_any<In, M, MIN_M, V, LINES>(num_rows, rows, columns, num_groups, ahead, starts, sums);
    for (int64_t m = 0; m < num_rows; ++m) {
      for (int v = 0; v < V && v * LANES < results.num_outputs; ++v) results.write(sums[m * V + v], first_row + m, v);
    }
  }
};

// Unpacks a panel of four-bit weights to bytes, which stay valid until the calling thread unpacks another.
inline const char* unpack_panel(const char* panel, int64_t num_inputs) {
  static thread_local std::vector<char> space;
  if (static_cast<int64_t>(space.size()) < num_inputs * PANEL) space.resize(num_inputs * PANEL);
  char* to = space.data();
  for (int64_t block = 0; block < num_inputs / BLOCK_INPUTS; ++block) {
    unpack_block(panel + block * BLOCK_BYTES, 0, PANEL_VECTORS, to + block * BLOCK_INPUTS * PANEL);
  }
  return space.data();
}

// Computes pieces of a product's outputs.
template <typename T, typename In, typename Out>
struct Work {
  static constexpr int FEW_ROWS = Form<In>::FEW_ROWS;
  const Linear& weight;
  int64_t num_inputs;  // with padding
  const Rows<In>& rows;
  const Results<T, In, Out>& results;

  // Returns the weights of a panel in memory.
  const char* panel_at(int64_t output) const {
    if (weight.is_in_nibbles) return panel_nibbles(weight, output / PANEL);
    return static_cast<const char*>(weight.packed) + output / PANEL * num_inputs / GROUP<In> * PANEL_ROW_BYTES;
  }

  void run_few_rows(int64_t first, bool is_narrow) const {
    const Piece<T, In, Out> piece{panel_at(first) + first % PANEL * GROUP_BYTES, num_inputs / GROUP<In>,
                                  results.at(0, first)};
    if (is_narrow) return piece.template run<FEW_ROWS, 1, 1, 0>(rows.blocks.size, rows.values, 0, nullptr);
    piece.template run<FEW_ROWS, 1, TILE_VECTORS, 0>(rows.blocks.size, rows.values, 0, nullptr);
  }

  // Computes the blocks from start to end. Each pass over the panel prefetches a part of another panel.
  void run_many_rows(int64_t first, int64_t num_outputs, int64_t next, int64_t start, int64_t end) const {
    const char* const panel = weight.is_in_nibbles ? unpack_panel(panel_at(first), num_inputs) : panel_at(first);
    const char* const ahead = panel_at(next < weight.num_outputs ? next : first);
    const int64_t part = num_inputs / GROUP<In> * VECTOR_BYTES;
    for (int64_t half = 0, pass = 0; half * HALF * LANES < num_outputs; ++half) {
      const int64_t output = first + half * HALF * LANES;
      const Piece<T, In, Out> piece{panel + output % PANEL * GROUP_BYTES, num_inputs / GROUP<In>,
                                    results.at(0, output)};
      for (int64_t block = start; block < end; ++block, ++pass) {
        const int64_t row = rows.blocks.start_of(block), num = rows.blocks.rows_of(block);
        const auto* const inputs = rows.block_rows(block);
        if (end - start == 1) {
          piece.template run<MAX_ROWS, FEW_ROWS, HALF, HALF>(num, inputs, row, ahead + pass * HALF * part);
        } else {
          piece.template run<MAX_ROWS, FEW_ROWS, HALF, 1>(num, inputs, row, ahead + pass % PANEL_VECTORS * part);
        }
      }
    }
  }
};

// Weights in four bits must have more than FEW_ROWS rows.
template <typename T, typename In, typename Out>
void multiply(const In* inputs, int64_t input_stride, const Linear& weight, const Results<T, In, Out>& results,
              int64_t num_rows) {
  if (num_rows == 0) return;
  const int64_t num_inputs = weight.is_in_nibbles ? padded_inputs(weight.num_inputs) : weight.num_inputs;
  const Rows<In> rows = widen(inputs, input_stride, num_rows, num_inputs);
  const Work<T, In, Out> work{weight, num_inputs, rows, results};
  const int64_t num_blocks = rows.blocks.num, num_outputs = weight.num_outputs;
  const bool is_few = num_rows <= Form<In>::FEW_ROWS;
  const int64_t wide = is_few ? TILE_VECTORS * LANES : PANEL, narrow = is_few ? LANES : HALF * LANES;
  const int64_t min_items = num_threads() == 1 ? 1 : 8 * num_threads(), num_pieces = (num_outputs + wide - 1) / wide;
  int64_t max_blocks = MAX_BLOCKS;
  const auto num_cuts = [&] { return (num_blocks + max_blocks - 1) / max_blocks; };
  while (max_blocks > MIN_BLOCKS && num_pieces * num_cuts() < min_items) max_blocks /= 2;
  const int64_t distance = (num_threads() + num_cuts() - 1) / num_cuts() * wide;
  const int64_t cuts = num_cuts(), num_wide = cuts == 1 ? num_pieces / num_threads() * num_threads() : num_pieces;
  const int64_t num_narrow = std::max<int64_t>(0, (num_outputs - num_wide * wide + narrow - 1) / narrow);
  for_each(num_wide * cuts + num_narrow, [&](int64_t item) {
    const bool is_narrow = item >= num_wide * cuts;
    const int64_t first = is_narrow ? num_wide * wide + (item - num_wide * cuts) * narrow : item / cuts * wide;
    if (is_few) return work.run_few_rows(first, is_narrow);
    const int64_t cut = is_narrow ? 0 : item % cuts, next = first + distance;
    work.run_many_rows(first, std::min(is_narrow ? narrow : wide, num_outputs - first), next, cut * num_blocks / cuts,
              (cut + 1) * num_blocks / cuts);
  });
}

}  // namespace wide
