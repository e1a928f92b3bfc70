// Attention over a paged cache on vector registers.
#pragma once
#include "queries.h"

template <typename T>
struct VectorAttention {
  const Queries<T>& queries;

  template <int M>
  void run(int64_t first_row) const {
    const CacheShape& shape = queries.cache->shape;
    T rows[M * MAX_HEAD_DIM];
    queries.copy(first_row, M, rows);
    const KeyRange range = KeyRange::covering(queries, first_row, M);
    ScoreSpace<T>& space = ScoreSpace<T>::reserve(M * range.stride);
    const int64_t num_vectors = range.num_blocks * shape.vectors_per_block();
    int64_t vector = 0;
    for (; vector + TILE_VECTORS <= num_vectors; vector += TILE_VECTORS) {
      score<M, TILE_VECTORS>(rows, range, vector, space.scores.data());
    }
    for (; vector < num_vectors; ++vector) score<M, 1>(rows, range, vector, space.scores.data());
    float totals[M];
    for (int m = 0; m < M; ++m) {
      const int64_t offset = m * range.stride;
      totals[m] = queries.softmax_row(first_row + m, space.scores.data() + offset, space.weights.data() + offset,
                                     range.start, range.width);
    }
    int64_t d = 0;
    for (; d + TILE_VECTORS * LANES <= shape.head_dim; d += TILE_VECTORS * LANES) {
      sum_values<M, TILE_VECTORS>(first_row, space.weights.data(), range, totals, d);
    }
    for (; d < shape.head_dim; d += LANES) sum_values<M, 1>(first_row, space.weights.data(), range, totals, d);
  }

 private:
  // Computes scores of V times 16 keys, fewer in a partial vector of a block; scores of the next block overwrite the
  // rest.
  template <int M, int V>
  void score(const T* rows, const KeyRange& range, int64_t vector, float* scores) const {
    const CacheShape& shape = queries.cache->shape;
    const int64_t vectors = shape.vectors_per_block();
    Floats sums[M][V] = {};
    const char* columns[V];
    for (int v = 0; v < V; ++v) {
      const T* head = queries.key_block(range.first_block + (vector + v) / vectors);
      columns[v] = reinterpret_cast<const char*>(head + (vector + v) % vectors * LANES * shape.head_dim);
    }
    accumulate<M, V>(sums, rows, shape.head_dim, columns, VECTOR_BYTES, shape.head_dim / GROUP<T>);
    for (int v = 0; v < V; ++v) {
      const int64_t block = range.first_block + (vector + v) / vectors;
      const int64_t index = block * shape.block_size + (vector + v) % vectors * LANES - range.start;
      for (int m = 0; m < M; ++m) std::memcpy(scores + m * range.stride + index, &sums[m][v], sizeof(Floats));
    }
  }

  // Computes V times 16 dimensions of the result, from d on.
  template <int M, int V>
  void sum_values(int64_t first_row, const T* weights, const KeyRange& range, const float* totals, int64_t d) const {
    const CacheShape& shape = queries.cache->shape;
    Floats sums[M][V] = {};
    for (int64_t block = range.first_block; block * shape.block_size < range.end; ++block) {
      const int64_t position = block * shape.block_size;
      const int64_t num = std::min(shape.block_size, range.end - position);
      const char* head = reinterpret_cast<const char*>(queries.value_block(block));
      const char* columns[V];
      for (int v = 0; v < V; ++v) columns[v] = head + (d + v * LANES) * GROUP_BYTES;
      accumulate<M, V>(sums, weights + position - range.start, range.stride, columns, shape.head_dim * GROUP_BYTES,
                       (num + GROUP<T> - 1) / GROUP<T>);
    }
    for (int m = 0; m < M; ++m) {
      T* to = queries.out_row(first_row + m) + d;
      for (int v = 0; v < V; ++v) store(to + v * LANES, sums[m][v] / splat(totals[m]), LANES);
    }
  }
};
