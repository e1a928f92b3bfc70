// The processor's instructions that products use.
#include "products/linear.h"
#include "products/tiles.h"

// Returns the name of the best instructions, which are used if shapes allow.
extern "C" const char* instructions() {
#ifdef PENSTOCK_EMULATED_TILES
  return "emulated amx";
#endif
  if (tiles::are_enabled) return "amx";
#if defined(__AVX512BF16__)
  if (!uses_wide_products()) return "avx512_bf16";
  return "avx512";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return "neon_bf16";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "generic";
#endif
}
