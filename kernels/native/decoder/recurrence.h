// The recurrent state of one head: a matrix [K, D] that stores values [D] under keys [K].
#pragma once
#include "base/lanes.h"

constexpr int PART_LANES = PART_BYTES / sizeof(float);
constexpr int64_t MAX_KEY_DIM = 512;

inline FloatPart load_part(const float* from) {
  FloatPart part;
  std::memcpy(&part, from, sizeof(part));
  return part;
}

// Update of the state by one token. The state is first multiplied by decay.
struct Change {
  const float *key, *query;  // [K]
  float decay;
  // Delta rule: the value that the state stores under the key is subtracted from the new value, and the difference is
  // added with this strength. Scan: the value is added unchanged.
  float strength;
  bool subtracts_stored;
};

// Updates V parts of the columns, from column on. Columns are independent, so their bits do not depend on V.
template <int V>
void change_columns(const Change& change, const float* from, float* to, int64_t key_dim, int64_t dim, int64_t column,
                    const float* value, float* out) {
  FloatPart update[V], out_parts[V];
  for (int v = 0; v < V; ++v) {
    update[v] = load_part(value + column + v * PART_LANES);
    out_parts[v] = FloatPart{};
  }
  if (change.subtracts_stored) {
    FloatPart stored[V] = {};
    for (int64_t i = 0; from && i < key_dim; ++i) {
      for (int v = 0; v < V; ++v) stored[v] += change.key[i] * load_part(from + i * dim + column + v * PART_LANES);
    }
    for (int v = 0; v < V; ++v) update[v] = (update[v] - change.decay * stored[v]) * change.strength;
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int v = 0; v < V; ++v) {
      const int64_t place = i * dim + column + v * PART_LANES;
      FloatPart state = change.key[i] * update[v];
      if (from) state += change.decay * load_part(from + place);
      std::memcpy(to + place, &state, sizeof(state));
      out_parts[v] += change.query[i] * state;
    }
  }
  for (int v = 0; v < V; ++v) std::memcpy(out + column + v * PART_LANES, &out_parts[v], sizeof(out_parts[v]));
}

// Computes the state `to` from the state `from` (null for a new request; may be equal), and the output [D] of the
// query.
inline void change_state(const Change& change, const float* from, float* to, int64_t key_dim, int64_t dim,
                         const float* value, float* out) {
  int64_t column = 0;
  for (; column + 4 * PART_LANES <= dim; column += 4 * PART_LANES) {
    change_columns<4>(change, from, to, key_dim, dim, column, value, out);
  }
  for (; column < dim; column += PART_LANES) change_columns<1>(change, from, to, key_dim, dim, column, value, out);
}
