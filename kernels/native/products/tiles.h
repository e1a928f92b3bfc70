// Tile registers (Intel AMX): eight registers of up to 16 rows of 64 bytes, and products of whole tiles. With
// PENSTOCK_EMULATED_TILES plain C++ computes the same bits (tiles_emulated.h).
//
// Tile shapes belong to the thread, and other libraries set them, too, so configure before each piece of work.
#pragma once
#include <cstdint>

#if defined(PENSTOCK_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define PENSTOCK_TILES
#endif

namespace tiles {

constexpr int ROWS = 16, ROW_BYTES = 64, NUM = 8;

// Whether this library was compiled for a processor with tile registers.
#ifdef PENSTOCK_TILES
constexpr bool EXIST = true;
#else
constexpr bool EXIST = false;
#endif

// Whether this process may use them, after it has requested them from the kernel (tiles.cpp).
extern bool are_enabled;

// Operand of ldtilecfg.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_row_bytes);
  }
};

}  // namespace tiles

#ifdef PENSTOCK_EMULATED_TILES
#include "products/tiles_emulated.h"
#else

#define PENSTOCK_INLINE inline __attribute__((always_inline))

namespace tiles {

// Not the compiler's intrinsics: those of gcc 12 declare only 8 bytes of the shapes as read, and no memory for loads.
PENSTOCK_INLINE void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

template <int T>
PENSTOCK_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// Rows are stride bytes apart.
template <int T>
PENSTOCK_INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
PENSTOCK_INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// C += A B of pairs of bfloat16. For each element of C, the products of the first elements of all pairs are summed from
// zero, fused and in order, and likewise those of the second elements; then the sum of both is added. Denormals count
// as zero.
template <int C, int A, int B>
PENSTOCK_INLINE void add_products_of_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C += A B of groups of four bytes, unsigned in A and signed in B, exactly.
template <int C, int A, int B>
PENSTOCK_INLINE void add_products_of_fours() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace tiles

#endif
