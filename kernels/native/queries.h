// What one piece of attention is about, whatever registers compute it.
#pragma once
#include <algorithm>
#include <vector>

#include "paged_cache.h"
#include "softmax.h"

constexpr int64_t MAX_HEAD_DIM = 512;

// The queries of one key/value head that one thread works on: those of some successive tokens of a request, all heads
// of the group. Rows are tokens by heads.
template <typename T>
struct Queries {
  const T* queries;  // of the first token's first head of the group
  int64_t token_stride, group;
  int64_t first_position;  // of the first token
  int64_t window, ahead;   // see DecoderLayer
  float scale, softcap;  // the latter 0 without
  const float* sinks;    // of the group's heads, or null
  const int64_t* blocks;
  int64_t kv_head;
  const LayerCache<T>* cache;
  T* out;
  int64_t out_stride;
  const int64_t* ends;  // of each token, where what it sees ends; null: behind itself

  int64_t position_of(int64_t row) const { return first_position + row / group; }
  int64_t first_seen(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t end_of(int64_t row) const {
    const int64_t next = position_of(row) + 1, end = ends ? ends[row / group] : next;
    return ahead < 0 ? end : std::min(end, next + ahead);
  }
  T* out_of(int64_t row) const { return out + row / group * out_stride + row % group * cache->shape.head_dim; }

  // Makes weights of a row's scores, which begin at position start of its request; see softmax.h.
  float soften_row(int64_t row, float* scores, T* weights, int64_t start, int64_t width) const {
    const int64_t position = position_of(row), begin = first_seen(position) - start, end = end_of(row) - start;
    if (softcap > 0) cap_scores(scores, begin, end, scale, softcap);
    const float sink = sinks ? sinks[row % group] : -INFINITY;
    return soften(scores, weights, begin, end, width, softcap > 0 ? 1.0f : scale, sink);
  }

  // Copies some rows, [num, D].
  void copy(int64_t first_row, int64_t num, T* to) const {
    const int64_t dim = cache->shape.head_dim;
    for (int64_t row = first_row; row < first_row + num; ++row, to += dim) {
      std::memcpy(to, queries + row / group * token_stride + row % group * dim, dim * sizeof(T));
    }
  }

  const T* keys_of(int64_t block) const { return cache->head_of(cache->keys, blocks[block], kv_head); }
  const T* values_of(int64_t block) const { return cache->head_of(cache->values, blocks[block], kv_head); }
};

// The positions that some rows see, and where their scores lie: a row of them begins at position start, matters for
// width positions, and lies stride behind the one before. Where a position stands among 16 does not depend on the size
// of blocks. A row has room for vectors that reach beyond the last position.
struct Seen {
  int64_t first_block, num_blocks, start, end, width, stride;

  template <typename T>
  static Seen of(const Queries<T>& queries, int64_t first_row, int64_t num_rows) {
    const CacheShape& shape = queries.cache->shape;
    // No token sees less far than the one before it.
    const int64_t last = queries.end_of(first_row + num_rows - 1) - 1;
    const int64_t first_block = queries.first_seen(queries.position_of(first_row)) / shape.block_size;
    const int64_t start = first_block * shape.block_size / LANES * LANES;
    const int64_t width = (last - start) / LANES * LANES + LANES;
    // Not a power of two, or rows would share the few places that the cache has for them.
    const int64_t stride = (width + shape.vectors_per_block() * LANES) / 64 * 64 + 64 + LANES;
    return {first_block, last / shape.block_size + 1 - first_block, start, last + 1, width, stride};
  }
};

// Memory for scores and weights, kept from piece to piece.
template <typename T>
struct ScoreSpace {
  std::vector<float> scores;
  std::vector<T> weights;

  static ScoreSpace& of(int64_t num) {
    static thread_local ScoreSpace space;
    if (static_cast<int64_t>(space.scores.size()) < num) space.scores.resize(num), space.weights.resize(num);
    return space;
  }
};
