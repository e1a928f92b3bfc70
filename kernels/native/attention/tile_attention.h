// Attention over a paged cache on tile registers, for up to 16 rows at a time. The keys of 16 tokens are stored as a
// tile, as are 16 dimensions of the values of 16 tokens if they are in one block. For bfloat16 only.
#pragma once
#include "attention/queries.h"
#include "products/tiles.h"

// Tokens per summation step, independent of the block size because sums are rounded between steps.
constexpr int64_t TOKENS_PER_TILE = 16;
constexpr int64_t PAIRS_PER_TILE = TOKENS_PER_TILE / 2;
// Dimensions per pass over the values, with a tile of sums for each 16.
constexpr int64_t DIMS_PER_PASS = 4 * LANES;
constexpr int64_t PASS_BYTES = DIMS_PER_PASS * GROUP_BYTES;
constexpr int64_t DIMS_PER_STEP = tiles::ROW_BYTES / sizeof(bfloat16);
// Prefetched lines of each next tile of keys or values; 64 requests of 200 tokens take 4 % less time with them.
constexpr int64_t PREFETCHED_LINES = 4;

// Depends on the model's shape only, as for products. All block sizes give the same bits.
inline bool suits_tiles(const CacheShape& shape) { return tiles::are_enabled && shape.head_dim % DIMS_PER_STEP == 0; }

class TileAttention {
 public:
  explicit TileAttention(const Queries<bfloat16>& queries) : queries_(queries), dim_(queries.cache->shape.head_dim) {}

  void run(int64_t first_row, int64_t num_rows) {
    num_rows_ = num_rows;
    queries_.copy(first_row, num_rows, rows_);
    range_ = KeyRange::covering(queries_, first_row, num_rows);
    ScoreSpace<bfloat16>& space = ScoreSpace<bfloat16>::reserve(num_rows * range_.stride);
    configure();
    score(space.scores.data());
    float totals[tiles::ROWS];
    for (int64_t m = 0; m < num_rows; ++m) {
      const int64_t offset = m * range_.stride;
      totals[m] = queries_.softmax_row(first_row + m, space.scores.data() + offset, space.weights.data() + offset,
                                       range_.start, range_.width);
    }
    for (int64_t d = 0; d < dim_; d += DIMS_PER_PASS) {
      if (dim_ - d >= DIMS_PER_PASS) {
        sum_values<4>(first_row, space.weights.data(), totals, d);
      } else {
        sum_values<2>(first_row, space.weights.data(), totals, d);
      }
    }
  }

 private:
  // Tiles 0 to 3: sums. 4: queries. 5: weights. 6: keys. 7: values.
  void configure() const {
    const int rows = static_cast<int>(num_rows_);
    tiles::Shapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, rows, tiles::ROW_BYTES);
    shapes.set(5, rows, TOKENS_PER_TILE * sizeof(bfloat16));
    shapes.set(6, tiles::ROWS, tiles::ROW_BYTES);
    shapes.set(7, PAIRS_PER_TILE, tiles::ROW_BYTES);
    tiles::configure(shapes);
  }

  void score(float* scores) const {
    const int64_t num_vectors = range_.num_blocks * queries_.cache->shape.vectors_per_block();
    int64_t vector = 0;
    for (; vector + 4 <= num_vectors; vector += 4) score_vectors<4>(vector, num_vectors, scores);
    for (; vector < num_vectors; ++vector) score_vectors<1>(vector, num_vectors, scores);
  }

  // Computes scores of V times 16 keys, fewer in a partial vector of a block; scores of the next block overwrite the
  // rest.
  template <int V>
  void score_vectors(int64_t vector, int64_t num_vectors, float* scores) const {
    alignas(64) bfloat16 buffer[DIMS_PER_STEP * LANES];
    for (int v = 0; v < V; ++v) {
      if (vector + v + V < num_vectors) prefetch(keys_at(vector + v + V, 0, nullptr));
    }
    tiles::zero<0>();
    if constexpr (V == 4) tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
    for (int64_t d = 0; d < dim_; d += DIMS_PER_STEP) {
      tiles::load<4>(rows_ + d, dim_ * sizeof(bfloat16));
      tiles::load<6>(keys_at(vector, d, buffer), VECTOR_BYTES), tiles::add_products_of_pairs<0, 4, 6>();
      if constexpr (V == 4) {
        tiles::load<6>(keys_at(vector + 1, d, buffer), VECTOR_BYTES), tiles::add_products_of_pairs<1, 4, 6>();
        tiles::load<6>(keys_at(vector + 2, d, buffer), VECTOR_BYTES), tiles::add_products_of_pairs<2, 4, 6>();
        tiles::load<6>(keys_at(vector + 3, d, buffer), VECTOR_BYTES), tiles::add_products_of_pairs<3, 4, 6>();
      }
    }
    const int64_t stride = range_.stride * sizeof(float);
    tiles::store<0>(scores + index_of(vector), stride);
    if constexpr (V == 4) {
      tiles::store<1>(scores + index_of(vector + 1), stride);
      tiles::store<2>(scores + index_of(vector + 2), stride);
      tiles::store<3>(scores + index_of(vector + 3), stride);
    }
  }

  // Returns the dimensions of a step, from d on, of the keys of a vector; without a buffer, their place in the cache.
  const char* keys_at(int64_t vector, int64_t d, bfloat16* buffer) const {
    const LayerCache<bfloat16>& cache = *queries_.cache;
    const int64_t vectors = cache.shape.vectors_per_block();
    const char* head = queries_.key_block(range_.first_block + vector / vectors);
    if (!buffer) return head + vector % vectors * LANES * dim_ * cache.shape.element_bytes(sizeof(bfloat16));
    return cache.keys_at(head, vector % vectors, d, DIMS_PER_STEP, buffer);
  }

  // Returns the index of a vector's first score in its row.
  int64_t index_of(int64_t vector) const {
    const CacheShape& shape = queries_.cache->shape;
    const int64_t vectors = shape.vectors_per_block();
    return (range_.first_block + vector / vectors) * shape.block_size + vector % vectors * LANES - range_.start;
  }

  // Computes V times 16 dimensions of the result, from d on.
  template <int V>
  void sum_values(int64_t first_row, const bfloat16* weights, const float* totals, int64_t d) const {
    tiles::zero<0>(), tiles::zero<1>();
    if constexpr (V == 4) tiles::zero<2>(), tiles::zero<3>();
    alignas(64) char gathered[PAIRS_PER_TILE * PASS_BYTES];
    for (int64_t token = range_.start; token < range_.end; token += TOKENS_PER_TILE) {
      const bool is_whole = are_contiguous(token);
      const char* values = is_whole ? values_at(token, d) : gathered;
      const int64_t stride = is_whole ? dim_ * GROUP_BYTES : PASS_BYTES;
      if (is_whole) {
        if (const int64_t next = token + 4 * TOKENS_PER_TILE; next < range_.end) prefetch(values_at(next, d));
      } else {
        gather<V>(token, d, gathered);
      }
      tiles::load<5>(weights + token - range_.start, range_.stride * sizeof(bfloat16));
      tiles::load<7>(values, stride), tiles::add_products_of_pairs<0, 5, 7>();
      tiles::load<7>(values + VECTOR_BYTES, stride), tiles::add_products_of_pairs<1, 5, 7>();
      if constexpr (V == 4) {
        tiles::load<7>(values + 2 * VECTOR_BYTES, stride), tiles::add_products_of_pairs<2, 5, 7>();
        tiles::load<7>(values + 3 * VECTOR_BYTES, stride), tiles::add_products_of_pairs<3, 5, 7>();
      }
    }
    alignas(64) char sums[tiles::ROWS * PASS_BYTES];
    tiles::store<0>(sums, PASS_BYTES), tiles::store<1>(sums + VECTOR_BYTES, PASS_BYTES);
    if constexpr (V == 4) {
      tiles::store<2>(sums + 2 * VECTOR_BYTES, PASS_BYTES), tiles::store<3>(sums + 3 * VECTOR_BYTES, PASS_BYTES);
    }
    for (int64_t m = 0; m < num_rows_; ++m) {
      bfloat16* to = queries_.out_row(first_row + m) + d;
      for (int v = 0; v < V; ++v) {
        const Floats sum = (Floats)load_words(sums + m * PASS_BYTES + v * VECTOR_BYTES);
        store(to + v * LANES, sum / splat(totals[m]), LANES);
      }
    }
  }

  // Whether the values of 16 tokens are a tile in one block, and all of them have been stored.
  bool are_contiguous(int64_t token) const {
    const int64_t size = queries_.cache->shape.block_size, offset = token % size;
    return !queries_.cache->shape.is_in_bytes && offset + TOKENS_PER_TILE <= size && token + TOKENS_PER_TILE <= range_.end &&
           token >= range_.first_block * size;
  }

  // Copies V times 16 dimensions of each pair of up to 16 tokens, and zeros for tokens out of range, whose values may
  // be infinite or NaN and would not vanish when multiplied by a weight of zero.
  template <int V>
  void gather(int64_t token, int64_t d, char* to) const {
    const CacheShape& shape = queries_.cache->shape;
    for (int64_t pair = 0; pair < PAIRS_PER_TILE; ++pair, to += PASS_BYTES) {
      const int64_t at = token + 2 * pair;
      if (at < range_.first_block * shape.block_size || at >= range_.end) {
        std::memset(to, 0, V * VECTOR_BYTES);
      } else if (shape.is_in_bytes) {
        queries_.cache->template widen_values<V>(queries_.value_block(at / shape.block_size), at % shape.block_size, d, to);
      } else {
        std::memcpy(to, values_at(at, d), V * VECTOR_BYTES);
      }
    }
  }

  const char* values_at(int64_t token, int64_t d) const {
    const int64_t size = queries_.cache->shape.block_size;
    return queries_.value_block(token / size) + token % size * dim_ * sizeof(bfloat16) + d * GROUP_BYTES;
  }

  static void prefetch(const char* from) {
    for (int64_t i = 0; i < PREFETCHED_LINES; ++i) __builtin_prefetch(from + 64 * i);
  }

  const Queries<bfloat16>& queries_;
  const int64_t dim_;
  int64_t num_rows_ = 0;
  KeyRange range_ = {};
  alignas(64) bfloat16 rows_[tiles::ROWS * MAX_HEAD_DIM];
};
