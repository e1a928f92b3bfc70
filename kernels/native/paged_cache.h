// A paged cache of keys and values in the layout of weights (lanes.h): the scores of a query with 16 keys, and the
// weighted sum of 16 dimensions of the values, are products of a row with vectors.
//
// Keys: per block and head, for each 16 tokens of the block, the groups of their dimensions; groups of 16 tokens are
// adjacent. Values: per block and head, the groups of its tokens; all dimensions of a group are adjacent. A block has
// whole groups and is padded to whole vectors. Elements without a stored token never contribute to a result.
#pragma once
#include "lanes.h"

struct CacheShape {
  int64_t num_kv_heads, head_dim, block_size;

  int64_t vectors_per_block() const { return (block_size + LANES - 1) / LANES; }
  // Number of elements of one head's keys, or values, in a block.
  int64_t head_size() const { return vectors_per_block() * LANES * head_dim; }
};

template <typename T>
struct LayerCache {
  T *keys, *values;
  CacheShape shape;

  T* head_data(T* cache, int64_t block, int64_t kv_head) const {
    return cache + (block * shape.num_kv_heads + kv_head) * shape.head_size();
  }

  // Stores one token's key and value, [KVH, D] each. is_last: it is the last token of its request in this step.
  void store(int64_t slot, const T* key, const T* value, bool is_last) const {
    const int64_t dim = shape.head_dim, block = slot / shape.block_size, offset = slot % shape.block_size;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      T* to_key = head_data(keys, block, head) + offset / LANES * LANES * dim + offset % LANES * GROUP<T>;
      for (int64_t d = 0; d < dim; d += GROUP<T>) {
        std::memcpy(to_key + d * LANES, key + head * dim + d, GROUP_BYTES);
      }
      T* to_value = head_data(values, block, head) + offset / GROUP<T> * GROUP<T> * dim + offset % GROUP<T>;
      for (int64_t d = 0; d < dim; ++d) to_value[d * GROUP<T>] = value[head * dim + d];
      // Its neighbour in the group is read with it, with a weight of zero, so a leftover of an earlier request there
      // must not be infinite or NaN.
      if (is_last && GROUP<T> > 1 && offset % GROUP<T> == 0) {
        for (int64_t d = 0; d < dim; ++d) to_value[d * GROUP<T> + 1] = T{0};
      }
    }
  }
};
