// Attention of one query token per request over the paged cache, read where it lies: nothing is gathered.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "scalar.h"

namespace {

struct Shape {
  int64_t num_heads, num_kv_heads, block_size, table_stride, query_stride;
  float scale;
  int64_t window;  // positions a token sees; 0: all before it
};

// One request and one key/value head: the group's query heads share what is read. D is a constant, so loops unroll.
template <typename T, int D>
void attend(const T* query, const T* key_cache, const T* value_cache, const int64_t* table, int64_t seq_len,
            const Shape& shape, int64_t kv_head, T* out, float* scores) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t first = shape.window > 0 ? std::max<int64_t>(0, seq_len - shape.window) : 0;
  const int64_t len = seq_len - first;
  const int64_t token_size = shape.num_kv_heads * D;
  float q[16][D];
  for (int64_t start = 0; start < group; start += 16) {
    const int64_t num = std::min<int64_t>(16, group - start);
    for (int64_t g = 0; g < num; ++g) {
      const T* in = query + (kv_head * group + start + g) * D;
#pragma omp simd
      for (int i = 0; i < D; ++i) q[g][i] = to_float(in[i]) * shape.scale;
    }
    float highest[16];
    std::fill(highest, highest + num, -INFINITY);
    for (int64_t s = 0; s < len; ++s) {
      const int64_t position = first + s;
      const T* key = key_cache + (table[position / shape.block_size] * shape.block_size + position % shape.block_size) * token_size +
                     kv_head * D;
      float k[D];
#pragma omp simd
      for (int i = 0; i < D; ++i) k[i] = to_float(key[i]);
      for (int64_t g = 0; g < num; ++g) {
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int i = 0; i < D; ++i) dot += q[g][i] * k[i];
        scores[g * len + s] = dot;
        highest[g] = std::max(highest[g], dot);
      }
    }
    float total[16], sum[16][D];
    for (int64_t g = 0; g < num; ++g) {
      float* row = scores + g * len;
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
      const T* value = value_cache + (table[position / shape.block_size] * shape.block_size + position % shape.block_size) * token_size +
                       kv_head * D;
      float v[D];
#pragma omp simd
      for (int i = 0; i < D; ++i) v[i] = to_float(value[i]);
      for (int64_t g = 0; g < num; ++g) {
        const float weight = scores[g * len + s];
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
void decode(const T* query, const T* key_cache, const T* value_cache, const int64_t* tables, const int64_t* seq_lens,
            int64_t num_rows, const Shape& shape, T* out) {
  for_each(num_rows * shape.num_kv_heads, [&](int64_t item) {
    static thread_local std::vector<float> scores;
    const int64_t row = item / shape.num_kv_heads, kv_head = item % shape.num_kv_heads;
    const size_t wanted = 16 * seq_lens[row];
    if (scores.size() < wanted) scores.resize(wanted);
    attend<T, D>(query + row * shape.query_stride, key_cache, value_cache, tables + row * shape.table_stride,
                 seq_lens[row], shape, kv_head, out + row * shape.num_heads * D, scores.data());
  });
}

template <typename T>
int decode_any(const T* query, const T* key_cache, const T* value_cache, const int64_t* tables,
               const int64_t* seq_lens, int64_t num_rows, int64_t head_dim, const Shape& shape, T* out) {
  switch (head_dim) {
    case 16: decode<T, 16>(query, key_cache, value_cache, tables, seq_lens, num_rows, shape, out); return 0;
    case 32: decode<T, 32>(query, key_cache, value_cache, tables, seq_lens, num_rows, shape, out); return 0;
    case 64: decode<T, 64>(query, key_cache, value_cache, tables, seq_lens, num_rows, shape, out); return 0;
    case 96: decode<T, 96>(query, key_cache, value_cache, tables, seq_lens, num_rows, shape, out); return 0;
    case 128: decode<T, 128>(query, key_cache, value_cache, tables, seq_lens, num_rows, shape, out); return 0;
    case 256: decode<T, 256>(query, key_cache, value_cache, tables, seq_lens, num_rows, shape, out); return 0;
    default: return 1;
  }
}

}  // namespace

#define PENSTOCK_ATTENTION(T, suffix)                                                                               \
  extern "C" int decode_##suffix(const T* query, int64_t query_stride, const T* key_cache, const T* value_cache,   \
                                 const int64_t* tables, int64_t table_stride, const int64_t* seq_lens,             \
                                 int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,      \
                                 int64_t block_size, float scale, int64_t window, T* out) {                       \
    Shape shape{num_heads, num_kv_heads, block_size, table_stride, query_stride, scale, window};                  \
    return decode_any<T>(query, key_cache, value_cache, tables, seq_lens, num_rows, head_dim, shape, out);         \
  }

PENSTOCK_ATTENTION(float, float32)
PENSTOCK_ATTENTION(bfloat16, bfloat16)
