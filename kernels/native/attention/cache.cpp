// Writes into the paged cache. Rows are bytes, so any dtype works.
#include <cstdint>
#include <cstring>

extern "C" void store_rows(const char* rows, int64_t stride, char* cache, const int64_t* slots, int64_t num_rows,
                           int64_t row_bytes) {
  for (int64_t i = 0; i < num_rows; ++i) {
    if (slots[i] >= 0) std::memcpy(cache + slots[i] * row_bytes, rows + i * stride, row_bytes);
  }
}
