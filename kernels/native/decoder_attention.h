// Attention over a paged cache that is laid out for it: keys and values lie as weights do (lanes.h), so the scores of a
// query with 16 keys, and the weighted sum of 16 dimensions of the values, are products of a row with vectors.
//
// Keys: per block and head, for each 16 tokens of the block, the groups of their dimensions, 16 tokens side by side.
// Values: per block and head, the groups of its tokens, all dimensions side by side. A block has whole groups; if it has no
// whole vectors, it is filled up. What no token was stored in is never part of a result.
#pragma once
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "parallel.h"

struct CacheShape {
  int64_t num_kv_heads, head_dim, block_size;

  int64_t vectors_per_block() const { return (block_size + LANES - 1) / LANES; }
  // Elements of one head's keys, or values, in a block.
  int64_t head_size() const { return vectors_per_block() * LANES * head_dim; }
};

template <typename T>
struct LayerCache {
  T *keys, *values;
  CacheShape shape;

  T* head_of(T* cache, int64_t block, int64_t kv_head) const {
    return cache + (block * shape.num_kv_heads + kv_head) * shape.head_size();
  }

  // Stores one token's key and value, [KVH, D] each. is_last: no further token of its request comes in this step.
  void put(int64_t slot, const T* key, const T* value, bool is_last) const {
    const int64_t dim = shape.head_dim, block = slot / shape.block_size, offset = slot % shape.block_size;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      T* to_key = head_of(keys, block, head) + offset / LANES * LANES * dim + offset % LANES * GROUP<T>;
      for (int64_t d = 0; d < dim; d += GROUP<T>) {
        std::memcpy(to_key + d * LANES, key + head * dim + d, GROUP_BYTES);
      }
      T* to_value = head_of(values, block, head) + offset / GROUP<T> * GROUP<T> * dim + offset % GROUP<T>;
      for (int64_t d = 0; d < dim; ++d) to_value[d * GROUP<T>] = value[head * dim + d];
      // Its neighbour in the group is read with it, at a weight of zero: what a former request left there must not be
      // infinite.
      if (is_last && GROUP<T> > 1 && offset % GROUP<T> == 0) {
        for (int64_t d = 0; d < dim; ++d) to_value[d * GROUP<T> + 1] = T{0};
      }
    }
  }
};

// The queries of one key/value head that one thread works on: those of some successive tokens of a request, all heads
// of the group.
template <typename T>
struct QueryTile {
  const T* queries;  // of the first token's first head of the group
  int64_t token_stride, group;
  int64_t first_position;  // of the first token
  int64_t window;          // positions a token sees; 0: all before it
  float scale;
  const int64_t* blocks;
  int64_t kv_head;
  const LayerCache<T>* cache;
  T* out;
  int64_t out_stride;

  // Rows are tokens by heads.
  template <int M>
  void run(int64_t first_row) const {
    const CacheShape& shape = cache->shape;
    const int64_t vectors = shape.vectors_per_block();
    T rows[M * MAX_HEAD_DIM];
    int64_t positions[M];
    for (int m = 0; m < M; ++m) {
      const int64_t row = first_row + m;
      positions[m] = first_position + row / group;
      std::memcpy(rows + m * shape.head_dim, queries + row / group * token_stride + row % group * shape.head_dim,
                  shape.head_dim * sizeof(T));
    }
    const int64_t first_block = first_seen(positions[0]) / shape.block_size;
    const int64_t num_blocks = positions[M - 1] / shape.block_size + 1 - first_block;
    // Scores lie in the order of positions. Where a position stands among 16 does not depend on the size of blocks.
    const int64_t start = first_block * shape.block_size / LANES * LANES;
    const int64_t width = (positions[M - 1] - start) / LANES * LANES + LANES;
    // A row has room for vectors that reach beyond the last position.
    const Scores at{start, width, width + vectors * LANES};
    static thread_local std::vector<float> scores;
    static thread_local std::vector<T> weights;
    const size_t wanted = M * at.stride;
    if (scores.size() < wanted) scores.resize(wanted), weights.resize(wanted);
    int64_t vector = 0;
    for (; vector + TILE_VECTORS <= num_blocks * vectors; vector += TILE_VECTORS) {
      score<M, TILE_VECTORS>(rows, first_block, vector, at, scores.data());
    }
    for (; vector < num_blocks * vectors; ++vector) score<M, 1>(rows, first_block, vector, at, scores.data());
    float totals[M];
    for (int m = 0; m < M; ++m) {
      totals[m] = soften(scores.data() + m * at.stride, weights.data() + m * at.stride, at, positions[m]);
    }
    int64_t d = 0;
    for (; d + TILE_VECTORS * LANES <= shape.head_dim; d += TILE_VECTORS * LANES) {
      sum_values<M, TILE_VECTORS>(first_row, weights.data(), at, first_block, positions[M - 1], totals, d);
    }
    for (; d < shape.head_dim; d += LANES) {
      sum_values<M, 1>(first_row, weights.data(), at, first_block, positions[M - 1], totals, d);
    }
  }

  static constexpr int MAX_HEAD_DIM = 256;
  static constexpr float LOWEST_EXPONENT = -87.0f;

 private:
  // A row of scores begins at position start, matters for width positions, and lies stride behind the one before.
  struct Scores {
    int64_t start, width, stride;
  };

  int64_t first_seen(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }

  // Of V times 16 keys, or fewer where a block has no whole vectors; the next block's overwrite what is too much.
  template <int M, int V>
  void score(const T* rows, int64_t first_block, int64_t vector, const Scores& at, float* scores) const {
    const CacheShape& shape = cache->shape;
    const int64_t vectors = shape.vectors_per_block();
    Floats sums[M][V] = {};
    const char* columns[V];
    for (int v = 0; v < V; ++v) {
      const T* head = cache->head_of(cache->keys, blocks[first_block + (vector + v) / vectors], kv_head);
      columns[v] = reinterpret_cast<const char*>(head + (vector + v) % vectors * LANES * shape.head_dim);
    }
    accumulate<M, V>(sums, rows, shape.head_dim, columns, VECTOR_BYTES, shape.head_dim / GROUP<T>);
    for (int v = 0; v < V; ++v) {
      const int64_t block = first_block + (vector + v) / vectors;
      const int64_t index = block * shape.block_size + (vector + v) % vectors * LANES - at.start;
      for (int m = 0; m < M; ++m) {
        const Floats scaled = sums[m][v] * splat(scale);
        std::memcpy(scores + m * at.stride + index, &scaled, sizeof(scaled));
      }
    }
  }

  // Scores to weights, relative to the largest, 0 where the token at position does not see; returns their sum.
  float soften(float* scores, T* weights, const Scores& at, int64_t position) const {
    const int64_t begin = first_seen(position) - at.start, end = position + 1 - at.start;
    std::fill(scores, scores + begin, -INFINITY);
    std::fill(scores + end, scores + at.width, -INFINITY);
    float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t i = begin; i < end; ++i) highest = std::max(highest, scores[i]);
    // Lane by lane, so that the order of the sum does not depend on what is masked around it.
    Floats totals = {};
    for (int64_t i = 0; i < at.width; i += LANES) {
      float exponentials[LANES];
#pragma omp simd
      for (int lane = 0; lane < LANES; ++lane) {
        const float shifted = scores[i + lane] - highest;
        exponentials[lane] = shifted < LOWEST_EXPONENT ? 0.0f : fast_exp(shifted);
      }
      Floats vector;
      std::memcpy(&vector, exponentials, sizeof(vector));
      totals += vector;
      store(weights + i, vector, LANES);
    }
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += totals[lane];
    return total;
  }

  // V times 16 dimensions of the result, from d on.
  template <int M, int V>
  void sum_values(int64_t first_row, const T* weights, const Scores& at, int64_t first_block, int64_t last_position,
                  const float* totals, int64_t d) const {
    const CacheShape& shape = cache->shape;
    Floats sums[M][V] = {};
    for (int64_t block = first_block; block * shape.block_size <= last_position; ++block) {
      const int64_t position = block * shape.block_size;
      const int64_t num = std::min(shape.block_size, last_position + 1 - position);
      const char* head = reinterpret_cast<const char*>(cache->head_of(cache->values, blocks[block], kv_head));
      const char* columns[V];
      for (int v = 0; v < V; ++v) columns[v] = head + (d + v * LANES) * GROUP_BYTES;
      accumulate<M, V>(sums, weights + position - at.start, at.stride, columns, shape.head_dim * GROUP_BYTES,
                          (num + GROUP<T> - 1) / GROUP<T>);
    }
    for (int m = 0; m < M; ++m) {
      const int64_t row = first_row + m;
      T* to = out + row / group * out_stride + row % group * shape.head_dim + d;
      for (int v = 0; v < V; ++v) store(to + v * LANES, sums[m][v] / splat(totals[m]), LANES);
    }
  }
};
