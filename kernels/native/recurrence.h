// One head's state over the tokens of a request: values [D] kept under keys [K], a matrix [K, D].
#pragma once
#include "lanes.h"

constexpr int PART_LANES = PART_BYTES / sizeof(float);
constexpr int64_t MAX_KEY_DIM = 512;

inline FloatPart load_part(const float* from) {
  FloatPart part;
  std::memcpy(&part, from, sizeof(part));
  return part;
}

// What a token does to the state. The state is first multiplied by decay.
struct Change {
  const float *key, *query;  // [K]
  float decay;
  // Of the delta rule: what the state has under the key already is taken off the value, and the rest comes in with this
  // strength. Of a scan the value comes in as it is.
  float strength;
  bool takes_off;
};

// V parts of the columns from column on. Each column is by itself: its bits do not depend on V.
template <int V>
void change_columns(const Change& change, const float* from, float* to, int64_t key_dim, int64_t dim, int64_t column,
                    const float* value, float* out) {
  FloatPart added[V], found[V];
  for (int v = 0; v < V; ++v) {
    added[v] = load_part(value + column + v * PART_LANES);
    found[v] = FloatPart{};
  }
  if (change.takes_off) {
    FloatPart held[V] = {};
    for (int64_t i = 0; from && i < key_dim; ++i) {
      for (int v = 0; v < V; ++v) held[v] += change.key[i] * load_part(from + i * dim + column + v * PART_LANES);
    }
    for (int v = 0; v < V; ++v) added[v] = (added[v] - change.decay * held[v]) * change.strength;
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int v = 0; v < V; ++v) {
      const int64_t place = i * dim + column + v * PART_LANES;
      FloatPart state = change.key[i] * added[v];
      if (from) state += change.decay * load_part(from + place);
      std::memcpy(to + place, &state, sizeof(state));
      found[v] += change.query[i] * state;
    }
  }
  for (int v = 0; v < V; ++v) std::memcpy(out + column + v * PART_LANES, &found[v], sizeof(found[v]));
}

// From the state `from`, null for none yet, to the state `to`, which may be the same; out [D] is what the query finds.
inline void change_state(const Change& change, const float* from, float* to, int64_t key_dim, int64_t dim,
                         const float* value, float* out) {
  int64_t column = 0;
  for (; column + 4 * PART_LANES <= dim; column += 4 * PART_LANES) {
    change_columns<4>(change, from, to, key_dim, dim, column, value, out);
  }
  for (; column < dim; column += PART_LANES) change_columns<1>(change, from, to, key_dim, dim, column, value, out);
}
