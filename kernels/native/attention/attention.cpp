// Attention of one query token per row over the paged cache, which is read in place without a gather. A row's bits
// depend neither on the other rows nor on the addresses of its blocks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/parallel.h"
#include "base/scalar.h"

namespace {

// Query heads of one key/value head that are computed together.
constexpr int64_t MAX_GROUP = 16;

struct Shape {
  int64_t num_heads, num_kv_heads, block_size, table_stride, query_stride;
  float scale;
};

// Scores of a group of heads. All rows have the same alignment, because the compiler peels loops by alignment.
struct Scores {
  static constexpr int64_t LANES = 16, BYTES = LANES * sizeof(float);
  float* first;
  int64_t stride;

  static Scores allocate(int64_t num_positions) {
    static thread_local std::vector<float> space;
    const int64_t stride = (num_positions + LANES - 1) / LANES * LANES;
    const size_t size = MAX_GROUP * stride + LANES;
    if (space.size() < size) space.resize(size);
    const uintptr_t address = reinterpret_cast<uintptr_t>(space.data());
    return {reinterpret_cast<float*>((address + BYTES - 1) / BYTES * BYTES), stride};
  }

  float* row(int64_t head) const { return first + head * stride; }
};

// Computes one row and one key/value head. The group's query heads share the reads. D is a constant, so loops unroll.
template <typename T, int D>
void attend(const T* query, const T* key_cache, const T* value_cache, const int64_t* table, int64_t first, int64_t end,
            const Shape& shape, int64_t kv_head, T* out) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t len = end - first;
  const Scores scores = Scores::allocate(len);
  const int64_t token_size = shape.num_kv_heads * D;
  float q[MAX_GROUP][D];
  for (int64_t start = 0; start < group; start += MAX_GROUP) {
    const int64_t num = std::min<int64_t>(MAX_GROUP, group - start);
    for (int64_t g = 0; g < num; ++g) {
      const T* in = query + (kv_head * group + start + g) * D;
#pragma omp simd
      for (int i = 0; i < D; ++i) q[g][i] = to_float(in[i]) * shape.scale;
    }
    float highest[MAX_GROUP];
    std::fill(highest, highest + num, -INFINITY);
    for (int64_t s = 0; s < len; ++s) {
      const int64_t position = first + s;
      const int64_t slot = table[position / shape.block_size] * shape.block_size + position % shape.block_size;
      const T* key = key_cache + slot * token_size + kv_head * D;
      float k[D];
#pragma omp simd
      for (int i = 0; i < D; ++i) k[i] = to_float(key[i]);
      for (int64_t g = 0; g < num; ++g) {
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int i = 0; i < D; ++i) dot += q[g][i] * k[i];
        scores.row(g)[s] = dot;
        highest[g] = std::max(highest[g], dot);
      }
    }
    float total[MAX_GROUP], sum[MAX_GROUP][D];
    for (int64_t g = 0; g < num; ++g) {
      float* row = scores.row(g);
      const float top = highest[g];
      float all = 0;
#pragma omp simd reduction(+ : all)
      for (int64_t s = 0; s < len; ++s) {
        row[s] = fast_exp(row[s] - top);
        all += row[s];
      }
      total[g] = all;
      std::fill(sum[g], sum[g] + D, 0.0f);
    }
    for (int64_t s = 0; s < len; ++s) {
      const int64_t position = first + s;
      const int64_t slot = table[position / shape.block_size] * shape.block_size + position % shape.block_size;
      const T* value = value_cache + slot * token_size + kv_head * D;
      float v[D];
#pragma omp simd
      for (int i = 0; i < D; ++i) v[i] = to_float(value[i]);
      for (int64_t g = 0; g < num; ++g) {
        const float weight = scores.row(g)[s];
#pragma omp simd
        for (int i = 0; i < D; ++i) sum[g][i] += weight * v[i];
      }
    }
    for (int64_t g = 0; g < num; ++g) {
      T* to = out + (kv_head * group + start + g) * D;
      const float factor = 1.0f / total[g];
#pragma omp simd
      for (int i = 0; i < D; ++i) to[i] = from_float<T>(sum[g][i] * factor);
    }
  }
}

template <typename T, int D>
void decode(const T* query, const T* key_cache, const T* value_cache, const int64_t* tables, const int64_t* ranges,
            int64_t num_rows, const Shape& shape, T* out) {
  for_each(num_rows * shape.num_kv_heads, [&](int64_t item) {
    const int64_t row = item / shape.num_kv_heads, kv_head = item % shape.num_kv_heads;
    attend<T, D>(query + row * shape.query_stride, key_cache, value_cache, tables + row * shape.table_stride,
                 ranges[2 * row], ranges[2 * row + 1], shape, kv_head, out + row * shape.num_heads * D);
  });
}

template <typename T>
int decode_any(const T* query, const T* key_cache, const T* value_cache, const int64_t* tables, const int64_t* ranges,
               int64_t num_rows, int64_t head_dim, const Shape& shape, T* out) {
  switch (head_dim) {
    case 16: decode<T, 16>(query, key_cache, value_cache, tables, ranges, num_rows, shape, out); return 0;
    case 32: decode<T, 32>(query, key_cache, value_cache, tables, ranges, num_rows, shape, out); return 0;
    case 64: decode<T, 64>(query, key_cache, value_cache, tables, ranges, num_rows, shape, out); return 0;
    case 96: decode<T, 96>(query, key_cache, value_cache, tables, ranges, num_rows, shape, out); return 0;
    case 128: decode<T, 128>(query, key_cache, value_cache, tables, ranges, num_rows, shape, out); return 0;
    case 256: decode<T, 256>(query, key_cache, value_cache, tables, ranges, num_rows, shape, out); return 0;
    default: return 1;
  }
}

}  // namespace

// ranges has the start and end of the positions that each row sees.
#define PENSTOCK_ATTENTION(T, suffix)                                                                               \
  extern "C" int decode_##suffix(const T* query, int64_t query_stride, const T* key_cache, const T* value_cache,   \
                                 const int64_t* tables, int64_t table_stride, const int64_t* ranges,               \
                                 int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,      \
                                 int64_t block_size, float scale, T* out) {                                       \
    Shape shape{num_heads, num_kv_heads, block_size, table_stride, query_stride, scale};                          \
    return decode_any<T>(query, key_cache, value_cache, tables, ranges, num_rows, head_dim, shape, out);             \
  }

PENSTOCK_ATTENTION(float, float32)
PENSTOCK_ATTENTION(bfloat16, bfloat16)
