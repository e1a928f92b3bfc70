// A paged cache of keys and values in the layout of weights (lanes.h): the scores of a query with 16 keys, and the
// weighted sum of 16 dimensions of the values, are products of a row with vectors.
//
// Keys: per block and head, for each 16 tokens of the block, the groups of their dimensions; groups of 16 tokens are
// adjacent. Values: per block and head, the groups of its tokens; all dimensions of a group are adjacent. A block has
// whole groups and is padded to whole vectors. Elements without a stored token never contribute to a result.
//
// A cache in bytes has the same order of elements, of which a head's scales follow: one for each 32 dimensions of a
// token. For keys, those of 16 tokens and the same dimensions are adjacent; for values, those of a group of tokens.
#pragma once
#include <algorithm>
#include <cmath>

#include "base/lanes.h"

constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t SCALED_DIMS = 32;
constexpr float BYTE_LARGEST = 127.0f;

struct CacheShape {
  int64_t num_kv_heads, head_dim, block_size;
  bool is_in_bytes;

  int64_t vectors_per_block() const { return (block_size + LANES - 1) / LANES; }
  int64_t scales_per_token() const { return (head_dim + SCALED_DIMS - 1) / SCALED_DIMS; }
  // Number of elements of one head's keys, or values, in a block.
  int64_t head_size() const { return vectors_per_block() * LANES * head_dim; }
  // size: of an element of a cache that is not in bytes.
  int64_t element_bytes(int64_t size) const { return is_in_bytes ? 1 : size; }
  int64_t head_bytes(int64_t size) const {
    const int64_t num_scales = is_in_bytes ? vectors_per_block() * LANES * scales_per_token() : 0;
    return head_size() * element_bytes(size) + num_scales * static_cast<int64_t>(sizeof(bfloat16));
  }
};

// Rounds a head to bytes, as kernels/kv_cache describes.
template <typename T>
void quantize_head(const T* head, int64_t dim, int8_t* bytes, bfloat16* scales) {
  for (int64_t start = 0; start < dim; start += SCALED_DIMS) {
    const int64_t num = std::min(SCALED_DIMS, dim - start);
    float values[SCALED_DIMS], largest = 0, poison = 0;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (int64_t i = 0; i < num; ++i) {
      values[i] = to_float(head[start + i]);
      largest = std::max(largest, std::fabs(values[i]));
      poison += values[i] * 0.0f;  // NaN if the value is NaN or infinite
    }
    const bfloat16 scale = from_float<bfloat16>(largest / BYTE_LARGEST + poison);
    *scales++ = scale;
    const float divisor = to_float(scale) > 0 ? to_float(scale) : INFINITY;
#pragma omp simd
    for (int64_t i = 0; i < num; ++i) {
      const float step = poison == 0 ? std::floor(values[i] / divisor + 0.5f) : 0;
      bytes[start + i] = static_cast<int8_t>(std::max(-BYTE_LARGEST, std::min(BYTE_LARGEST, step)));
    }
  }
}

template <typename T>
struct LayerCache {
  char *keys, *values;
  CacheShape shape;
  int64_t block_bytes;  // distance of two blocks; those of other layers may be between them

  // A head's keys, or values, in a block.
  char* head_data(char* cache, int64_t block, int64_t kv_head) const {
    return cache + block * block_bytes + kv_head * shape.head_bytes(sizeof(T));
  }

  // Stores one token's key and value, [KVH, D] each. is_last: it is the last token of its request in this step.
  void store(int64_t slot, const T* key, const T* value, bool is_last) const {
    const int64_t dim = shape.head_dim, block = slot / shape.block_size, offset = slot % shape.block_size;
    // Its neighbour in the group is read with it, with a weight of zero, so a leftover of an earlier request there
    // must not be infinite or NaN.
    const bool clears_next = is_last && GROUP<T> > 1 && offset % GROUP<T> == 0;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head, key += dim, value += dim) {
      char *of_keys = head_data(keys, block, head), *of_values = head_data(values, block, head);
      if (shape.is_in_bytes) {
        store_bytes(of_keys, of_values, offset, key, value, clears_next);
      } else {
        put_key(reinterpret_cast<T*>(of_keys), offset, key);
        put_value(reinterpret_cast<T*>(of_values), offset, value, clears_next);
      }
    }
  }

  // Returns num dimensions, from d on, of the keys of 16 tokens of a block: in the cache, or as numbers in the buffer.
  const char* keys_at(const char* head, int64_t vector, int64_t d, int64_t num, T* buffer) const {
    const int64_t first = (vector * shape.head_dim + d) * LANES;
    if (!shape.is_in_bytes) return head + first * sizeof(T);
    const int8_t* from = reinterpret_cast<const int8_t*>(head) + first;
    const bfloat16* scales = scales_of(head) + (vector * shape.scales_per_token() + d / SCALED_DIMS) * LANES;
    for (int64_t start = 0; start < num; start += SCALED_DIMS, scales += LANES) {
      const Factors<T> factors = Factors<T>::of_outputs(scales);
      const int64_t end = std::min(start + SCALED_DIMS, num);
      for (int64_t i = start * LANES; i < end * LANES; i += LANES * GROUP<T>) widen(from + i, factors, buffer + i);
    }
    return reinterpret_cast<const char*>(buffer);
  }

  // Writes V times 16 dimensions, from d on, of the values of a group of tokens as numbers; for a cache in bytes.
  template <int V>
  void widen_values(const char* head, int64_t token, int64_t d, char* out) const {
    constexpr int SIZE = LANES * GROUP<T>;
    const int64_t group = token / GROUP<T>;
    const int8_t* from = reinterpret_cast<const int8_t*>(head) + (group * shape.head_dim + d) * GROUP<T>;
    const bfloat16* scales = scales_of(head) + group * shape.scales_per_token() * GROUP<T>;
    for (int v = 0; v < V; ++v, d += LANES) {
      const Factors<T> factors = Factors<T>::in_groups(scales + d / SCALED_DIMS * GROUP<T>);
      widen(from + v * SIZE, factors, reinterpret_cast<T*>(out) + v * SIZE);
    }
  }

 private:
  template <typename Head>
  auto scales_of(Head* head) const {
    using Scale = std::conditional_t<std::is_const_v<Head>, const bfloat16, bfloat16>;
    return reinterpret_cast<Scale*>(head + shape.head_size());
  }

  template <typename E>
  void put_key(E* head, int64_t offset, const E* key) const {
    E* to = head + offset / LANES * LANES * shape.head_dim + offset % LANES * GROUP<T>;
    for (int64_t d = 0; d < shape.head_dim; d += GROUP<T>) {
      std::memcpy(to + d * LANES, key + d, GROUP<T> * sizeof(E));
    }
  }

  template <typename E>
  void put_value(E* head, int64_t offset, const E* value, bool clears_next) const {
    E* to = head + offset / GROUP<T> * GROUP<T> * shape.head_dim + offset % GROUP<T>;
    for (int64_t d = 0; d < shape.head_dim; ++d) to[d * GROUP<T>] = value[d];
    if (!clears_next) return;
    for (int64_t d = 0; d < shape.head_dim; ++d) to[d * GROUP<T> + 1] = E{0};
  }

  void store_bytes(char* of_keys, char* of_values, int64_t offset, const T* key, const T* value,
                   bool clears_next) const {
    const int64_t num = shape.scales_per_token(), lane = offset % LANES, place = offset % GROUP<T>;
    int8_t bytes[MAX_HEAD_DIM];
    bfloat16 scales[MAX_HEAD_DIM / SCALED_DIMS];
    quantize_head(key, shape.head_dim, bytes, scales);
    put_key(reinterpret_cast<int8_t*>(of_keys), offset, bytes);
    bfloat16* to = scales_of(of_keys) + offset / LANES * num * LANES;
    for (int64_t i = 0; i < num; ++i) to[i * LANES + lane] = scales[i];
    quantize_head(value, shape.head_dim, bytes, scales);
    put_value(reinterpret_cast<int8_t*>(of_values), offset, bytes, false);
    to = scales_of(of_values) + offset / GROUP<T> * num * GROUP<T>;
    for (int64_t i = 0; i < num; ++i) {
      to[i * GROUP<T> + place] = scales[i];
      if (clears_next) to[i * GROUP<T> + place + 1] = bfloat16{0};
    }
  }
};
