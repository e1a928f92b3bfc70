// Products with a bfloat16 weight that was laid out for the processor's own instruction for pairs of bfloat16.
//
// The weight [N, K] lies in panels of 64 outputs: for each pair of inputs, 64 outputs' pairs side by side, so that one
// pass over a panel reads memory in order. A tile of up to 6 tokens by 64 outputs stays in registers.
#include <cstdint>
#include <cstring>

#include "scalar.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int PANEL = 64;
constexpr int VECTORS = PANEL / 16;
constexpr int PREFETCHED_PAIRS = 16;

template <int M>
void tile(const bfloat16* inputs, int64_t stride, const bfloat16* panel, const float* bias, bfloat16* out,
          int64_t out_stride, int64_t num_pairs, int64_t num_outputs) {
  __m512 sums[M][VECTORS];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < VECTORS; ++v) sums[m][v] = bias ? _mm512_loadu_ps(bias + 16 * v) : _mm512_setzero_ps();
  }
  const char* weights = reinterpret_cast<const char*>(panel);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    __m512bh columns[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      columns[v] = (__m512bh)_mm512_loadu_si512(weights + (pair * VECTORS + v) * 64);
    }
    for (int v = 0; v < VECTORS; ++v) {
      _mm_prefetch(weights + ((pair + PREFETCHED_PAIRS) * VECTORS + v) * 64, _MM_HINT_T0);
    }
    for (int m = 0; m < M; ++m) {
      int32_t both;
      std::memcpy(&both, inputs + m * stride + 2 * pair, sizeof(both));
      __m512bh row = (__m512bh)_mm512_set1_epi32(both);
      for (int v = 0; v < VECTORS; ++v) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], row, columns[v]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < VECTORS && 16 * v < num_outputs; ++v) {
      const int64_t left = num_outputs - 16 * v;
      const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
      _mm256_mask_storeu_epi16(out + m * out_stride + 16 * v, mask, (__m256i)_mm512_cvtneps_pbh(sums[m][v]));
    }
  }
}

void tiles(const bfloat16* inputs, int64_t stride, const bfloat16* panel, const float* bias, bfloat16* out,
           int64_t out_stride, int64_t num_tokens, int64_t num_pairs, int64_t num_outputs) {
  int64_t m = 0;
  for (; m + 6 <= num_tokens; m += 6) {
    tile<6>(inputs + m * stride, stride, panel, bias, out + m * out_stride, out_stride, num_pairs, num_outputs);
  }
  const bfloat16* rest = inputs + m * stride;
  bfloat16* to = out + m * out_stride;
  switch (num_tokens - m) {
    case 5: tile<5>(rest, stride, panel, bias, to, out_stride, num_pairs, num_outputs); break;
    case 4: tile<4>(rest, stride, panel, bias, to, out_stride, num_pairs, num_outputs); break;
    case 3: tile<3>(rest, stride, panel, bias, to, out_stride, num_pairs, num_outputs); break;
    case 2: tile<2>(rest, stride, panel, bias, to, out_stride, num_pairs, num_outputs); break;
    case 1: tile<1>(rest, stride, panel, bias, to, out_stride, num_pairs, num_outputs); break;
    default: break;
  }
}

}  // namespace

extern "C" int has_bfloat16_linear() { return 1; }

// packed: ceil(N / 64) panels of K / 2 * 64 pairs; K is even.
extern "C" void pack_linear(const bfloat16* weight, bfloat16* packed, int64_t num_outputs, int64_t num_inputs) {
  const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < num_panels; ++p) {
    for (int64_t k = 0; k < num_inputs; ++k) {
      for (int64_t n = 0; n < PANEL; ++n) {
        const int64_t output = p * PANEL + n;
        packed[(p * num_inputs + (k & ~1)) * PANEL + 2 * n + (k & 1)] =
            output < num_outputs ? weight[output * num_inputs + k] : bfloat16{0};
      }
    }
  }
}

// bias: floats, as many as the panels have outputs, or null.
extern "C" void linear(const bfloat16* inputs, int64_t stride, const bfloat16* packed, const float* bias,
                       bfloat16* out, int64_t num_tokens, int64_t num_inputs, int64_t num_outputs) {
  const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < num_panels; ++p) {
    const int64_t first = p * PANEL;
    tiles(inputs, stride, packed + first * num_inputs, bias ? bias + first : nullptr, out + first, num_outputs,
          num_tokens, num_inputs / 2, num_outputs - first < PANEL ? num_outputs - first : PANEL);
  }
}

#else

extern "C" int has_bfloat16_linear() { return 0; }
extern "C" void pack_linear(const bfloat16*, bfloat16*, int64_t, int64_t) {}
extern "C" void linear(const bfloat16*, int64_t, const bfloat16*, const float*, bfloat16*, int64_t, int64_t, int64_t) {}

#endif
