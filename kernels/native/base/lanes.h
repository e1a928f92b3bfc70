// Vectors of sixteen outputs. Operands are read in groups of 4 bytes: one float, a pair of bfloat16, or four bytes, as
// the processor's instructions for products of pairs and of fours require. So all layouts (weights, keys, values) are
// the same for every dtype: for each group of inputs, the groups of 16 outputs are adjacent, 64 bytes.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/scalar.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

constexpr int LANES = 16;
constexpr int GROUP_BYTES = 4;
constexpr int VECTOR_BYTES = LANES * GROUP_BYTES;

template <typename T>
constexpr int GROUP = GROUP_BYTES / sizeof(T);

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

// Number of sums that fit into registers (rows of inputs times vectors of outputs), and size of a register.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4, PART_BYTES = 64;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3, TILE_VECTORS = 2, PART_BYTES = 32;
#else
constexpr int TILE_ROWS = 3, TILE_VECTORS = 2, PART_BYTES = 16;
#endif

// Registers per vector. The compiler keeps vectors larger than a register in memory, so loops over products use parts.
constexpr int PARTS = VECTOR_BYTES / PART_BYTES;

typedef float FloatPart __attribute__((vector_size(PART_BYTES)));
typedef int32_t IntPart __attribute__((vector_size(PART_BYTES)));
typedef uint32_t WordPart __attribute__((vector_size(PART_BYTES)));
typedef uint16_t HalfPart __attribute__((vector_size(PART_BYTES)));
typedef uint8_t BytePart __attribute__((vector_size(PART_BYTES)));

template <typename Sum>
using PartOf = std::conditional_t<std::is_same_v<Sum, Floats>, FloatPart, IntPart>;

constexpr int PREFETCHED_GROUPS = 16;
// Localities of __builtin_prefetch. Lines for the L2 cache need none of the few buffers of the L1 cache while they
// arrive.
constexpr int INTO_L1 = 3, INTO_L2 = 2;

// Calls body(0) .. body(N - 1) with constants, so that arrays indexed by them stay in registers.
template <typename Body, int... I>
inline __attribute__((always_inline)) void for_constants(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>{}), ...);
}

template <int N, typename Body>
inline __attribute__((always_inline)) void for_constants(const Body& body) {
  for_constants(std::make_integer_sequence<int, N>{}, body);
}

inline Floats splat(float value) { return value - Floats{}; }

inline Words load_words(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

// Copy each word's lower half to both halves, and its lowest byte to all four; the bits above must be zero.
inline WordPart in_both_halves(WordPart words) { return words | words << 16; }

inline WordPart in_all_bytes(WordPart words) {
#ifdef __AVX512BW__
  return (WordPart)_mm512_shuffle_epi8((__m512i)words, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
#else
  return in_both_halves(words | words << 8);
#endif
}

// Returns sum plus the products of a row's group with the groups of a part of 16 outputs.
inline FloatPart add_products(FloatPart sum, const float* group, WordPart columns) {
  return sum + *group * (FloatPart)columns;
}

inline FloatPart add_products(FloatPart sum, const bfloat16* group, WordPart columns) {
#if defined(__AVX512BF16__)
  int32_t both;
  std::memcpy(&both, group, sizeof(both));
  return (FloatPart)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)columns);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  uint32_t both;
  std::memcpy(&both, group, sizeof(both));
  return (FloatPart)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32(vdupq_n_u32(both)),
                                vreinterpretq_bf16_u32((uint32x4_t)columns));
#else
  sum += to_float(group[0]) * (FloatPart)(columns << 16);
  return sum + to_float(group[1]) * (FloatPart)(columns & 0xffff0000u);
#endif
}

// Exact products of an unsigned row and signed outputs.
inline IntPart add_products(IntPart sum, const uint8_t* group, WordPart columns) {
#if defined(__AVX512VNNI__)
  int32_t four;
  std::memcpy(&four, group, sizeof(four));
  return (IntPart)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), (__m512i)columns);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // Multiply even and odd bytes as pairs of 16 bits, because this processor's product of bytes saturates.
  uint32_t four;
  std::memcpy(&four, group, sizeof(four));
  const __m256i bytes = (__m256i)columns, even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
  sum += (IntPart)_mm256_madd_epi16(even, _mm256_set1_epi32(four & 0x00ff00ff));
  return sum + (IntPart)_mm256_madd_epi16(_mm256_srai_epi16(bytes, 8), _mm256_set1_epi32(four >> 8 & 0x00ff00ff));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  uint32_t four;
  std::memcpy(&four, group, sizeof(four));
  return (IntPart)vusdotq_s32((int32x4_t)sum, vreinterpretq_u8_u32(vdupq_n_u32(four)), (int8x16_t)columns);
#else
  for (int i = 0; i < GROUP_BYTES; ++i) sum += group[i] * ((IntPart)(columns << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

// Exact products of a signed row and unsigned outputs.
inline IntPart add_products(IntPart sum, const int8_t* group, WordPart columns) {
  int32_t four;
  std::memcpy(&four, group, sizeof(four));
#if defined(__AVX512VNNI__)
  return (IntPart)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)columns, _mm512_set1_epi32(four));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (IntPart)vusdotq_s32((int32x4_t)sum, (uint8x16_t)columns, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__AVX2__)
  // Multiply even and odd bytes as pairs of 16 bits, because this processor's product of bytes saturates.
  const auto pair = [&](int i) { return (group[i] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(group[i + 2]) << 16); };
  const int32_t low = pair(0), high = pair(1);
  const WordPart even = columns & 0x00ff00ffu, odd = columns >> 8 & 0x00ff00ffu;
#if defined(__AVX512BW__)
  sum += (IntPart)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(low));
  return sum + (IntPart)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(high));
#else
  sum += (IntPart)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(low));
  return sum + (IntPart)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(high));
#endif
#else
  for (int i = 0; i < GROUP_BYTES; ++i) sum += group[i] * (IntPart)(columns >> 8 * i & 0xffu);
  return sum;
#endif
}

// Sums of M rows and V vectors of outputs. They stay in registers where M, V and all indexes are constants.
template <typename Sum, int M, int V>
struct Sums {
  PartOf<Sum> parts[M * V * PARTS];

  inline __attribute__((always_inline)) void set(int m, int v, Sum values) {
    for_constants<PARTS>([&](auto p) __attribute__((always_inline)) {
      std::memcpy(&parts[(m * V + v) * PARTS + p], reinterpret_cast<const char*>(&values) + p * PART_BYTES, PART_BYTES);
    });
  }

  inline __attribute__((always_inline)) Sum get(int m, int v) const {
    Sum values;
    for_constants<PARTS>([&](auto p) __attribute__((always_inline)) {
      std::memcpy(reinterpret_cast<char*>(&values) + p * PART_BYTES, &parts[(m * V + v) * PARTS + p], PART_BYTES);
    });
    return values;
  }

  // Sets all rows to initial(v) in vector v.
  template <typename Initial>
  inline __attribute__((always_inline)) void set_rows(const Initial& initial) {
    for_constants<V>([&](auto v) __attribute__((always_inline)) {
      const Sum values = initial(v);
      for_constants<M>([&](auto m) __attribute__((always_inline)) { set(m, v, values); });
    });
  }
};

inline WordPart load_part(const void* from, int part) {
  WordPart words;
  std::memcpy(&words, static_cast<const char*>(from) + part * PART_BYTES, sizeof(words));
  return words;
}

// Addresses of memory that is read soon, one for each vector; those of successive groups are `stride` bytes apart.
template <int V>
struct Ahead {
  const char* starts[V];
  int64_t stride;
};

// Adds the products of the groups of M rows with a group of V vectors.
template <int M, int V, typename Sum, typename T>
inline __attribute__((always_inline)) void add_group(Sums<Sum, M, V>& sums, const T* rows, int64_t row_stride,
                                                     const WordPart (&words)[V * PARTS]) {
  for_constants<M>([&](auto m) __attribute__((always_inline)) {
    for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) {
      auto& sum = sums.parts[m * V * PARTS + p];
      sum = add_products(sum, rows + m * row_stride, words[p]);
    });
  });
}

// Adds the products of num_groups groups of row m with the vectors at columns[v], which are group_stride bytes apart,
// to sums (m, v). Each group prefetches its addresses of `ahead`.
template <int M, int V, typename Sum, typename T>
inline __attribute__((always_inline)) void accumulate(Sums<Sum, M, V>& sums, const T* rows, int64_t row_stride,
                                                      const char* const (&columns)[V], int64_t group_stride,
                                                      int64_t num_groups, const Ahead<V>& ahead) {
  for (int64_t group = 0; group < num_groups; ++group) {
    WordPart words[V * PARTS];
    for_constants<V>([&](auto v) __attribute__((always_inline)) {
      for_constants<PARTS>([&](auto p) __attribute__((always_inline)) {
        words[v * PARTS + p] = load_part(columns[v] + group * group_stride, p);
      });
      __builtin_prefetch(ahead.starts[v] + group * ahead.stride, 0, INTO_L2);
    });
    add_group<M, V>(sums, rows + group * GROUP<T>, row_stride, words);
  }
}

// Writes the first num of 16 floats, rounded to T.
template <typename T>
inline void store(T* out, Floats values, int64_t num) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 2) {
    const __mmask16 mask = num >= LANES ? 0xffff : static_cast<__mmask16>((1 << num) - 1);
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh((__m512)values));
    return;
  }
#endif
  if (num >= LANES) {
    float floats[LANES];
    std::memcpy(floats, &values, sizeof(floats));
#pragma omp simd
    for (int i = 0; i < LANES; ++i) out[i] = from_float<T>(floats[i]);
  } else {
    for (int64_t i = 0; i < num; ++i) out[i] = from_float<T>(values[i]);
  }
}

// Writes 32 floats, rounded to bfloat16.
inline void store_two(bfloat16* out, const void* from) {
  Floats values[2];
  std::memcpy(values, from, sizeof(values));
#ifdef __AVX512BF16__
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]));
#else
  for (int v = 0; v < 2; ++v) store(out + v * LANES, values[v], LANES);
#endif
}

// Factors of the elements of a vector of T.
template <typename T>
struct Factors {
  Floats parts[GROUP<T>];

  // All elements of an output's group have its factor, of 16.
  static Factors of_outputs(const bfloat16* factors) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
    Halves halves;
    std::memcpy(&halves, factors, sizeof(halves));
    const Floats all = (Floats)(__builtin_convertvector(halves, Words) << 16);
    if constexpr (GROUP<T> == 1) {
      return {all};
    } else {
#if defined(__clang__)
      return {__builtin_shufflevector(all, all, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
              __builtin_shufflevector(all, all, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)};
#else
      return {__builtin_shuffle(all, Ints{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7}),
              __builtin_shuffle(all, Ints{8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15})};
#endif
    }
  }

  // The elements of each output's group have these factors.
  static Factors in_groups(const bfloat16* factors) {
    if constexpr (GROUP<T> == 1) {
      return {splat(to_float(*factors))};
    } else {
      typedef uint64_t Pairs __attribute__((vector_size(VECTOR_BYTES)));
      const float pair[] = {to_float(factors[0]), to_float(factors[1])};
      uint64_t bits;
      std::memcpy(&bits, pair, sizeof(bits));
      const Floats all = (Floats)(bits - Pairs{});
      return {all, all};
    }
  }
};

// Returns 16 bytes as floats.
inline Floats floats_of(const int8_t* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  float floats[LANES];
#pragma omp simd
  for (int i = 0; i < LANES; ++i) floats[i] = from[i];
  return (Floats)load_words(floats);
#endif
}

// Writes a vector of products of bytes and their factors, rounded to T.
inline void widen(const int8_t* from, const Factors<float>& factors, float* to) {
  const Floats products = floats_of(from) * factors.parts[0];
  std::memcpy(to, &products, sizeof(products));
}

inline void widen(const int8_t* from, const Factors<bfloat16>& factors, bfloat16* to) {
  const Floats products[] = {floats_of(from) * factors.parts[0], floats_of(from + LANES) * factors.parts[1]};
  store_two(to, products);
}

// Writes the first num of 16 floats as floats, rounded to T.
template <typename T>
inline void store_rounded(float* out, Floats values, int64_t num) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 2) {
    const __mmask16 mask = num >= LANES ? 0xffff : static_cast<__mmask16>((1 << num) - 1);
    const __m512i halves = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)values));
    _mm512_mask_storeu_epi32(out, mask, _mm512_slli_epi32(halves, 16));
    return;
  }
#endif
  T rounded[LANES];
  store(rounded, values, LANES);
  for (int64_t i = 0; i < (num < LANES ? num : LANES); ++i) out[i] = to_float(rounded[i]);
}

template <typename T>
inline void store_rounded(T* out, Floats values, int64_t num) {
  store(out, values, num);
}

// Calls body.template run<M>(first row) for tiles of rows, as many rows per tile as possible.
template <int M, typename Body>
void for_row_tiles(int64_t num_rows, const Body& body, int64_t start = 0) {
  for (; start + M <= num_rows; start += M) body.template run<M>(start);
  if constexpr (M > 1) {
    if (start < num_rows) for_row_tiles<M - 1>(num_rows, body, start);
  }
}
