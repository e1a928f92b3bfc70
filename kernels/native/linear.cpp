// The layout of a weight, and products with it alone. See linear.h.
#include "linear.h"

namespace {

template <typename T>
void pack(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {
  for_each((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
    T* to = packed + panel * num_inputs * PANEL;
    for (int64_t group = 0; group < num_inputs / GROUP<T>; ++group) {
      for (int64_t n = 0; n < PANEL; ++n) {
        const int64_t output = panel * PANEL + n;
        for (int g = 0; g < GROUP<T>; ++g) {
          *to++ = output < num_outputs ? weight[output * num_inputs + group * GROUP<T> + g] : T{0};
        }
      }
    }
  });
}

}  // namespace

// packed: ceil(N / 64) panels of K * 64; K is a multiple of the group.
#define PENSTOCK_LINEAR(T, suffix)                                                                                  \
  extern "C" void pack_linear_##suffix(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {       \
    pack<T>(weight, packed, num_outputs, num_inputs);                                                               \
  }                                                                                                                 \
  extern "C" void linear_##suffix(const T* inputs, int64_t stride, const T* packed, const float* bias, T* out,      \
                                  int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {                      \
    multiply<T, T>(inputs, stride, Linear{packed, bias, num_inputs, num_outputs}, out, num_outputs, num_rows);      \
  }

PENSTOCK_LINEAR(float, float32)
PENSTOCK_LINEAR(bfloat16, bfloat16)
