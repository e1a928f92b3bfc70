// Products with a weight on tile registers, directly from its panels: 16 groups of inputs are 16 rows of 256 bytes, so
// a tile of 16 outputs is 16 times 64 bytes with a stride of 256. Inputs are not copied either. Only panels of nibbles
// are unpacked to bytes in a thread-local buffer, one step while the previous step is multiplied.
//
// A step processes 64 bytes of each row of inputs. While it waits for its tiles, rows of the previous block are
// rounded, which would otherwise take a fifth of the time of 128 rows.
#include "products/tile_product.h"

#include "products/tiles.h"
#include "weights/nibbles.h"

namespace {

constexpr int STEP_BYTES = tiles::ROW_BYTES;
constexpr int STEP_PANEL_BYTES = tiles::ROWS * PANEL_ROW_BYTES;
constexpr int STEP_PANEL_LINES = STEP_PANEL_BYTES / 64;
// Maximal rows per block: two tiles.
constexpr int BLOCK_ROWS = 2 * tiles::ROWS;
// Prefetched lines of the panel's next step, for few rows and for many. More lines do not help, because the processor
// prefetches sequential reads itself.
constexpr int PREFETCHED_LINES_FEW_ROWS = 16, PREFETCHED_LINES_MANY_ROWS = 4;
// Maximal prefetched lines of the next panel per step.
constexpr int64_t MAX_LINES_OF_NEXT = 16;
// Bytes of inputs per item, so that they stay in the cache together with a panel.
constexpr int64_t INPUT_BYTES_PER_ITEM = 640 << 10;

PENSTOCK_INLINE void prefetch_lines(const char* from, int64_t num_lines) {
  for (int64_t i = 0; i < num_lines; ++i) __builtin_prefetch(from + 64 * i);
}

template <typename In, int C, int A, int B>
PENSTOCK_INLINE void add_tile_products() {
  if constexpr (sizeof(In) == 1) {
    tiles::add_products_of_fours<C, A, B>();
  } else {
    tiles::add_products_of_pairs<C, A, B>();
  }
}

// Rows of sums of a block, each as wide as a panel, that have not been rounded yet.
template <typename T, typename In, typename Out>
struct PendingRows {
  const char* sums = nullptr;
  int64_t row = 0, num_rows = 0;
  int num_vectors = 0;
  Results<T, In, Out> results = {};

  PENSTOCK_INLINE void round(int64_t num) {
    for (const int64_t end = std::min(row + num, num_rows); row < end; ++row) round_row();
  }

 private:
  __attribute__((noinline)) void round_row() const {
    const char* from = sums + row * PANEL_ROW_BYTES;
    if constexpr (sizeof(In) == 2 && sizeof(Out) == 2) {
      if (results.num_outputs >= num_vectors * LANES) {
        Out* to = results.out + row * results.out_stride;
        for (int v = 0; v < num_vectors; v += 2) store_two(to + v * LANES, from + v * VECTOR_BYTES);
        return;
      }
    }
    for (int v = 0; v < num_vectors && v * LANES < results.num_outputs; ++v) {
      typename Results<T, In, Out>::Sum sum;
      std::memcpy(&sum, from + v * VECTOR_BYTES, sizeof(sum));
      results.write(sum, row, v);
    }
  }
};

// Multiplies rows with a panel, or with two of its four vectors of outputs.
template <typename T, typename In, typename Out>
class TilePiece {
 public:
  // input_stride: bytes between rows. unpacked: buffer for the bytes of a panel of nibbles, else null. next_panel:
  // panel to prefetch; may be null.
  TilePiece(const char* inputs, int64_t input_stride, const char* panel, char* unpacked, int first_vector,
            int num_vectors, int64_t num_steps, const Results<T, In, Out>& results, const char* next_panel)
      : inputs_(inputs),
        input_stride_(input_stride),
        panel_(panel),
        unpacked_(unpacked),
        columns_((unpacked ? unpacked : panel) + first_vector * VECTOR_BYTES),
        first_vector_(first_vector),
        num_vectors_(num_vectors),
        num_steps_(num_steps),
        results_(results),
        next_panel_(next_panel) {
    for (int v = 0; v < num_vectors; ++v) {
      const auto start = results.initial_sum(v);
      std::memcpy(start_ + v * VECTOR_BYTES, &start, sizeof(start));
    }
  }

  void run(int64_t num_rows) {
    if (unpacked_) unpack_step(0);
    rounded_per_step_ = (BLOCK_ROWS + num_steps_ - 1) / num_steps_;
    // The first pass over the panel reads it from memory. Later passes prefetch the next panel, a part of it per step.
    const int64_t num_later_passes = (num_rows + tiles::ROWS - 1) / BLOCK_ROWS * (num_vectors_ / 2) - 1;
    const int64_t lines_of_next =
        next_panel_ && num_later_passes > 0
            ? std::min(MAX_LINES_OF_NEXT, (STEP_PANEL_LINES + num_later_passes - 1) / num_later_passes)
            : 0;
    int64_t row = 0, prefetched = -lines_of_next;
    for (; num_rows - row > tiles::ROWS; row += BLOCK_ROWS) {
      const int num = static_cast<int>(std::min<int64_t>(BLOCK_ROWS, num_rows - row));
      configure_block(num);
      for (int first = 0; first < num_vectors_ && first * LANES < results_.num_outputs;
           first += 2, prefetched += lines_of_next) {
        const bool is_first = row == 0 && first == 0;
        add_block(row, num, first, is_first ? columns_ + STEP_PANEL_BYTES : next_panel_ + prefetched * 64,
                  is_first                        ? (unpacked_ ? 0 : PREFETCHED_LINES_MANY_ROWS)
                  : prefetched < STEP_PANEL_LINES ? lines_of_next
                                                  : 0);
      }
    }
    if (row < num_rows) add_last_rows(row, static_cast<int>(num_rows - row));
    pending_rows_.round(BLOCK_ROWS);
  }

 private:
  // Unpacks a step of the panel while the previous step is multiplied; later passes use the unpacked bytes.
  __attribute__((noinline)) void unpack_step(int64_t step) const {
    if (step == num_steps_) return;
    constexpr int BLOCKS = NIBBLE_INPUTS_MULTIPLE / BLOCK_INPUTS;
    for (int block = 0; block < BLOCKS; ++block) {
      unpack_block(panel_ + (step * BLOCKS + block) * BLOCK_BYTES, first_vector_, num_vectors_,
                   unpacked_ + step * STEP_PANEL_BYTES + block * STEP_PANEL_BYTES / BLOCKS);
    }
  }

  // Tiles 0, 1: sums of the first 16 rows with 32 outputs. 2, 3: sums of the other rows. 4, 5: rows. 6, 7: outputs.
  static void configure_block(int num_rows) {
    tiles::Shapes shapes;
    for (const int tile : {0, 1, 4, 6, 7}) shapes.set(tile, tiles::ROWS, tiles::ROW_BYTES);
    for (const int tile : {2, 3, 5}) shapes.set(tile, num_rows - tiles::ROWS, tiles::ROW_BYTES);
    tiles::configure(shapes);
  }

  // Multiplies 17 to 32 rows with two vectors of outputs; each step prefetches lines at ahead.
  void add_block(int64_t row, int num_rows, int first, const char* ahead, int64_t lines) {
    const char* start = start_ + first * VECTOR_BYTES;
    tiles::load<0>(start, 0), tiles::load<1>(start + VECTOR_BYTES, 0);
    tiles::load<2>(start, 0), tiles::load<3>(start + VECTOR_BYTES, 0);
    const char *rows = inputs_ + row * input_stride_, *columns = columns_ + first * VECTOR_BYTES;
    const bool unpacks = unpacked_ && row == 0 && first == 0;
    for (int64_t step = 0; step < num_steps_; ++step) {
      prefetch_lines(ahead + step * STEP_PANEL_BYTES, lines);
      if (unpacks) unpack_step(step + 1);
      tiles::load<4>(rows, input_stride_);
      tiles::load<6>(columns, PANEL_ROW_BYTES);
      add_tile_products<In, 0, 4, 6>();
      tiles::load<7>(columns + VECTOR_BYTES, PANEL_ROW_BYTES);
      add_tile_products<In, 1, 4, 7>();
      tiles::load<5>(rows + tiles::ROWS * input_stride_, input_stride_);
      add_tile_products<In, 2, 5, 6>();
      add_tile_products<In, 3, 5, 7>();
      pending_rows_.round(rounded_per_step_);
      rows += STEP_BYTES, columns += STEP_PANEL_BYTES;
    }
    char* sums = next_sums(row, num_rows, first, 2);
    char* below = sums + tiles::ROWS * PANEL_ROW_BYTES;
    tiles::store<0>(sums, PANEL_ROW_BYTES), tiles::store<1>(sums + VECTOR_BYTES, PANEL_ROW_BYTES);
    tiles::store<2>(below, PANEL_ROW_BYTES), tiles::store<3>(below + VECTOR_BYTES, PANEL_ROW_BYTES);
  }

  // Multiplies up to 16 rows with all vectors of outputs. Tiles 0 to 3: sums. 4: rows. 5 to 7: outputs.
  void add_last_rows(int64_t row, int num_rows) {
    tiles::Shapes shapes;
    for (int tile = 0; tile < tiles::NUM; ++tile) shapes.set(tile, tile < 5 ? num_rows : tiles::ROWS, tiles::ROW_BYTES);
    tiles::configure(shapes);
    const bool is_whole = num_vectors_ == PANEL_VECTORS;
    tiles::load<0>(start_, 0), tiles::load<1>(start_ + VECTOR_BYTES, 0);
    if (is_whole) tiles::load<2>(start_ + 2 * VECTOR_BYTES, 0), tiles::load<3>(start_ + 3 * VECTOR_BYTES, 0);
    const char *rows = inputs_ + row * input_stride_, *columns = columns_;
    for (int64_t step = 0; step < num_steps_; ++step) {
      if (row == 0) {
        unpacked_ ? unpack_step(step + 1) : prefetch_lines(columns + STEP_PANEL_BYTES, PREFETCHED_LINES_FEW_ROWS);
      }
      tiles::load<4>(rows, input_stride_);
      tiles::load<5>(columns, PANEL_ROW_BYTES);
      add_tile_products<In, 0, 4, 5>();
      tiles::load<6>(columns + VECTOR_BYTES, PANEL_ROW_BYTES);
      add_tile_products<In, 1, 4, 6>();
      if (is_whole) {
        tiles::load<7>(columns + 2 * VECTOR_BYTES, PANEL_ROW_BYTES);
        add_tile_products<In, 2, 4, 7>();
        tiles::load<5>(columns + 3 * VECTOR_BYTES, PANEL_ROW_BYTES);
        add_tile_products<In, 3, 4, 5>();
      }
      pending_rows_.round(rounded_per_step_);
      rows += STEP_BYTES, columns += STEP_PANEL_BYTES;
    }
    char* sums = next_sums(row, num_rows, 0, num_vectors_);
    tiles::store<0>(sums, PANEL_ROW_BYTES), tiles::store<1>(sums + VECTOR_BYTES, PANEL_ROW_BYTES);
    if (is_whole) {
      tiles::store<2>(sums + 2 * VECTOR_BYTES, PANEL_ROW_BYTES);
      tiles::store<3>(sums + 3 * VECTOR_BYTES, PANEL_ROW_BYTES);
    }
  }

  // Returns the buffer for the sums of the current block, after rounding the rest of the previous block.
  char* next_sums(int64_t row, int num_rows, int first, int num_vectors) {
    pending_rows_.round(BLOCK_ROWS);
    is_second_ = !is_second_;
    pending_rows_ = {sums_[is_second_], 0, num_rows, num_vectors, results_.at(row, first * LANES)};
    return sums_[is_second_];
  }

  alignas(64) char sums_[2][BLOCK_ROWS * PANEL_ROW_BYTES];
  alignas(64) char start_[PANEL_VECTORS * VECTOR_BYTES];
  const char* inputs_;
  int64_t input_stride_;
  const char* panel_;
  char* unpacked_;
  const char* columns_;
  int first_vector_, num_vectors_;
  int64_t num_steps_;
  Results<T, In, Out> results_;
  const char* next_panel_;
  PendingRows<T, In, Out> pending_rows_;
  int64_t rounded_per_step_ = 0;
  bool is_second_ = false;
};

// Returns a thread-local buffer for the bytes of a panel of nibbles.
char* unpacked_panel_buffer(int64_t num_inputs) {
  static thread_local std::vector<Words> buffer;
  const int64_t num_words = num_inputs * PANEL / VECTOR_BYTES;
  if (static_cast<int64_t>(buffer.size()) < num_words) buffer.resize(num_words);
  return reinterpret_cast<char*>(buffer.data());
}

}  // namespace

// A piece of work is a panel by as many rows as stay in the cache, or fewer rows to keep all threads busy. With too few
// rows for that, each thread gets the same number of whole panels, and the rest is cut into halves: whole panels are
// read in order, while two halves at a time are not.
template <typename T, typename In, typename Out>
void multiply_by_tiles(const In* inputs, int64_t input_stride, const Linear& weight,
                       const Results<T, In, Out>& results, int64_t num_rows) {
  constexpr int HALF = PANEL_VECTORS / 2;
  const int64_t num_inputs = weight.is_in_nibbles ? padded_inputs(weight.num_inputs) : weight.num_inputs;
  const int64_t row_bytes = num_inputs * sizeof(In), num_steps = row_bytes / STEP_BYTES;
  const int64_t num_panels = (weight.num_outputs + PANEL - 1) / PANEL;
  const int64_t min_items = num_threads() == 1 ? 1 : 8 * num_threads();
  int64_t rows = std::max<int64_t>(2 * BLOCK_ROWS, INPUT_BYTES_PER_ITEM / row_bytes / BLOCK_ROWS * BLOCK_ROWS);
  const auto num_blocks = [&] { return (num_rows + rows - 1) / rows; };
  while (rows > 4 * BLOCK_ROWS && num_panels * num_blocks() < min_items) rows = rows / 2 / BLOCK_ROWS * BLOCK_ROWS;
  const int64_t distance = num_threads();
  const int64_t num_whole = num_blocks() == 1 ? num_panels / num_threads() * num_threads() : num_panels;
  const auto panel_of = [&](int64_t panel) {
    if (weight.is_in_nibbles) return panel_nibbles(weight, panel);
    return static_cast<const char*>(weight.packed) + panel * num_steps * STEP_PANEL_BYTES;
  };
  const auto multiply_piece = [&](int64_t panel, int first_vector, int num_vectors, int64_t row, bool has_next) {
    char* unpacked = weight.is_in_nibbles ? unpacked_panel_buffer(num_inputs) : nullptr;
    TilePiece<T, In, Out> work(reinterpret_cast<const char*>(inputs + row * input_stride), input_stride * sizeof(In),
                               panel_of(panel), unpacked, first_vector, num_vectors, num_steps,
                               results.at(row, panel * PANEL + first_vector * LANES),
                               has_next && !unpacked ? panel_of(panel + distance) : nullptr);
    work.run(std::min(rows, num_rows - row));
  };
  const int64_t num_whole_items = num_whole * num_blocks();
  for_each(num_whole_items + 2 * (num_panels - num_whole), [&](int64_t item) {
    if (item < num_whole_items) {
      const int64_t panel = item % num_whole;
      multiply_piece(panel, 0, PANEL_VECTORS, item / num_whole * rows, panel + distance < num_whole);
    } else {
      const int64_t half = item - num_whole_items;
      const int first_vector = static_cast<int>(half % 2) * HALF;
      const int64_t panel = num_whole + half / 2;
      const bool has_outputs = panel * PANEL + first_vector * LANES < weight.num_outputs;
      if (has_outputs) multiply_piece(panel, first_vector, HALF, 0, false);
    }
  });
}

#ifdef PENSTOCK_TILES
#define PENSTOCK_TILE_PRODUCT(T, In, Out) \
  template void multiply_by_tiles(const In*, int64_t, const Linear&, const Results<T, In, Out>&, int64_t);

PENSTOCK_TILE_PRODUCT(bfloat16, bfloat16, bfloat16)
PENSTOCK_TILE_PRODUCT(bfloat16, bfloat16, float)
PENSTOCK_TILE_PRODUCT(bfloat16, uint8_t, bfloat16)
PENSTOCK_TILE_PRODUCT(bfloat16, uint8_t, float)
PENSTOCK_TILE_PRODUCT(float, uint8_t, float)
#endif
