// Attention over a paged cache on vector registers.
#pragma once
#include "attention/queries.h"

// Dimensions of keys in bytes that are made numbers at a time, in a near cache.
constexpr int64_t WIDENED_DIMS = 2 * SCALED_DIMS;

// Blocks between the values that are read and those that are prefetched. Blocks are far from each other, so the
// processor does not foresee the next one.
constexpr int64_t BLOCKS_AHEAD = TILE_VECTORS;

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
    const int64_t vectors = shape.vectors_per_block(), dim = shape.head_dim;
    const int64_t step = shape.is_in_bytes ? WIDENED_DIMS : dim, element = shape.element_bytes(sizeof(T));
    Sums<Floats, M, V> sums;
    sums.set_rows([](int) { return Floats{}; });
    T buffers[V][WIDENED_DIMS * LANES];
    for (int64_t d = 0; d < dim; d += step) {
      const int64_t num = std::min(step, dim - d);
      const char* columns[V];
      Ahead<V> ahead{{}, LANES * GROUP<T> * element};
      for (int v = 0; v < V; ++v) {
        const char* head = queries.key_block(range.first_block + (vector + v) / vectors);
        columns[v] = queries.cache->keys_at(head, (vector + v) % vectors, d, num, buffers[v]);
        ahead.starts[v] = after_keys(range, vector + V + v) + d * LANES * element;
      }
      accumulate<M, V>(sums, rows + d, dim, columns, VECTOR_BYTES, num / GROUP<T>, ahead);
    }
    for_constants<V>([&](auto v) __attribute__((always_inline)) {
      const int64_t block = range.first_block + (vector + v) / vectors;
      const int64_t index = block * shape.block_size + (vector + v) % vectors * LANES - range.start;
      for_constants<M>([&](auto m) __attribute__((always_inline)) {
        store(scores + m * range.stride + index, sums.get(m, v), LANES);
      });
    });
  }

  // Returns the keys of a vector, or what is read after the last ones: values.
  const char* after_keys(const KeyRange& range, int64_t vector) const {
    const CacheShape& shape = queries.cache->shape;
    const int64_t vectors = shape.vectors_per_block(), num_vectors = range.num_blocks * vectors;
    if (vector >= num_vectors) {
      return queries.value_block(range.first_block + std::min(vector - num_vectors, range.num_blocks - 1));
    }
    const int64_t offset = vector % vectors * LANES * shape.head_dim * shape.element_bytes(sizeof(T));
    return queries.key_block(range.first_block + vector / vectors) + offset;
  }

  // Computes V times 16 dimensions of the result, from d on.
  template <int M, int V>
  void sum_values(int64_t first_row, const T* weights, const KeyRange& range, const float* totals, int64_t d) const {
    const CacheShape& shape = queries.cache->shape;
    const int64_t step = shape.is_in_bytes ? LANES : shape.block_size, element = shape.element_bytes(sizeof(T));
    const int64_t last_block = range.first_block + range.num_blocks - 1;
    Sums<Floats, M, V> sums;
    sums.set_rows([](int) { return Floats{}; });
    char buffer[LANES / GROUP<T> * V * VECTOR_BYTES];
    for (int64_t block = range.first_block; block * shape.block_size < range.end; ++block) {
      const int64_t position = block * shape.block_size;
      const int64_t num = std::min(shape.block_size, range.end - position);
      const char* head = queries.value_block(block);
      const char* next = queries.value_block(std::min(block + BLOCKS_AHEAD, last_block));
      for (int64_t token = 0; token < num; token += step) {
        const int64_t num_groups = (std::min(step, num - token) + GROUP<T> - 1) / GROUP<T>;
        const char* first = head + d * GROUP_BYTES;
        if (shape.is_in_bytes) {
          for (int64_t g = 0; g < num_groups; ++g) {
            queries.cache->template widen_values<V>(head, token + g * GROUP<T>, d, buffer + g * V * VECTOR_BYTES);
          }
          first = buffer;
        }
        const char* columns[V];
        Ahead<V> ahead{{}, shape.head_dim * GROUP<T> * element};
        for (int v = 0; v < V; ++v) {
          columns[v] = first + v * VECTOR_BYTES;
          ahead.starts[v] = next + (token * shape.head_dim + (d + v * LANES) * GROUP<T>) * element;
        }
        const int64_t group_stride = shape.is_in_bytes ? V * VECTOR_BYTES : shape.head_dim * GROUP_BYTES;
        accumulate<M, V>(sums, weights + position + token - range.start, range.stride, columns, group_stride,
                         num_groups, ahead);
      }
    }
    for_constants<M>([&](auto m) __attribute__((always_inline)) {
      T* to = queries.out_row(first_row + m) + d;
      for_constants<V>([&](auto v) __attribute__((always_inline)) {
        store(to + v * LANES, sums.get(m, v) / splat(totals[m]), LANES);
      });
    });
  }
};
