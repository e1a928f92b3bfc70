// Input and output of one piece of attention, for all kinds of registers.
#pragma once
#include <algorithm>
#include <vector>

#include "attention/paged_cache.h"
#include "attention/softmax.h"

// Queries of one key/value head: consecutive tokens of a request, with all heads of the group. Rows are tokens times
// heads.
template <typename T>
struct Queries {
  const T* queries;  // of the first token and the first head of the group
  int64_t token_stride, group;
  int64_t first_position;  // of the first token
  int64_t window, ahead;   // see DecoderLayer
  float scale, softcap;  // softcap is 0 for none
  const float* sinks;    // of the heads of the group, or null
  const int64_t* blocks;
  int64_t kv_head;
  const LayerCache<T>* cache;
  T* out;
  int64_t out_stride;
  const int64_t* ends;  // end of the positions that each token sees; null if it is the next one

  int64_t position_at(int64_t row) const { return first_position + row / group; }
  int64_t first_visible(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t visible_end(int64_t row) const {
    const int64_t next = position_at(row) + 1, end = ends ? ends[row / group] : next;
    return ahead < 0 ? end : std::min(end, next + ahead);
  }
  T* out_row(int64_t row) const { return out + row / group * out_stride + row % group * cache->shape.head_dim; }

  // Turns a row's scores, which begin at position start of its request, into weights; see softmax.h.
  float softmax_row(int64_t row, float* scores, T* weights, int64_t start, int64_t width) const {
    const int64_t position = position_at(row), begin = first_visible(position) - start, end = visible_end(row) - start;
    if (softcap > 0) cap_scores(scores, begin, end, scale, softcap);
    const float sink = sinks ? sinks[row % group] : -INFINITY;
    return softmax_weights(scores, weights, begin, end, width, softcap > 0 ? 1.0f : scale, sink);
  }

  // Copies num rows, [num, D].
  void copy(int64_t first_row, int64_t num, T* to) const {
    const int64_t dim = cache->shape.head_dim;
    for (int64_t row = first_row; row < first_row + num; ++row, to += dim) {
      std::memcpy(to, queries + row / group * token_stride + row % group * dim, dim * sizeof(T));
    }
  }

  const char* key_block(int64_t block) const { return cache->head_data(cache->keys, blocks[block], kv_head); }
  const char* value_block(int64_t block) const { return cache->head_data(cache->values, blocks[block], kv_head); }
};

// Positions that a tile of rows sees, and the layout of their scores: a row of scores begins at position start, has
// width relevant positions, and follows the previous row after stride elements. The lane of a position does not depend
// on the block size. A row has padding for vectors that extend beyond the last position.
struct KeyRange {
  int64_t first_block, num_blocks, start, end, width, stride;

  template <typename T>
  static KeyRange covering(const Queries<T>& queries, int64_t first_row, int64_t num_rows) {
    const CacheShape& shape = queries.cache->shape;
    // Ends never decrease from token to token.
    const int64_t last = queries.visible_end(first_row + num_rows - 1) - 1;
    const int64_t first_block = queries.first_visible(queries.position_at(first_row)) / shape.block_size;
    const int64_t start = first_block * shape.block_size / LANES * LANES;
    const int64_t width = (last - start) / LANES * LANES + LANES;
    // Not a power of two, because rows would map to the same few cache sets.
    const int64_t stride = (width + shape.vectors_per_block() * LANES) / 64 * 64 + 64 + LANES;
    return {first_block, last / shape.block_size + 1 - first_block, start, last + 1, width, stride};
  }
};

// Memory for scores and weights of the calling thread, reused from piece to piece.
template <typename T>
struct ScoreSpace {
  std::vector<float> scores;
  std::vector<T> weights;

  static ScoreSpace& reserve(int64_t num) {
    static thread_local ScoreSpace space;
    if (static_cast<int64_t>(space.scores.size()) < num) space.scores.resize(num), space.weights.resize(num);
    return space;
  }
};
