// The heads of one layer in a step: norm, rotation, storage in the cache, and attention.
#pragma once
#include "attention/tile_attention.h"
#include "attention/vector_attention.h"
#include "decoder/gates.h"
#include "decoder/layer_switches.h"
#include "decoder/live_tokens.h"

constexpr int64_t TOKENS_PER_PIECE = 8;
// Rows (tokens times heads of a group) of a prompt per piece of work: several tiles, so that keys and values are read
// from a near cache again.
constexpr int64_t ROWS_PER_PIECE = 48;

template <typename T>
class LayerHeads {
 public:
  // heads: [tokens, heads_size()] of the layer.
  LayerHeads(const Decoder& decoder, const DecoderLayer& layer, const DecoderStep& step, const LiveTokens& live,
             T* heads)
      : layer_(layer),
        step_(step),
        live_(live),
        cache_{static_cast<char*>(layer.keys),
               static_cast<char*>(layer.values),
               {layer.num_kv_heads, layer.head_dim, decoder.block_size, decoder.caches_bytes != 0},
               layer.block_bytes},
        heads_(heads),
        size_(layer.heads_size()) {}

  // Whether rows of the projection must be split into heads.
  static bool needs_split(const DecoderLayer& layer) {
    return layer.gate != AttentionGate::NONE || layer.values_are_keys;
  }

  // Splits rows of the projection into heads, and into gates [tokens, attn_size()] if there are any.
  void split(const T* rows, T* gates) const {
    const int64_t width = layer_.qkv.num_outputs, dim = layer_.head_dim, keys_size = layer_.num_kv_heads * dim;
    for_tokens([&](int64_t t) {
      const T* row = rows + t * width;
      T* heads = heads_ + t * size_;
      if (layer_.gate != AttentionGate::NONE) {
        split_gates(layer_.gate, row, heads, gates + t * layer_.attn_size(), layer_.num_heads, dim,
                    size_ - layer_.attn_size());
      } else {
        std::memcpy(heads, row, width * sizeof(T));
        std::memcpy(heads + width, row + width - keys_size, keys_size * sizeof(T));
      }
    });
  }

  // Normalises and rotates heads in place, and stores keys and values in the cache.
  void norm_rotate_and_store() const {
    const int64_t dim = layer_.head_dim, first_key = layer_.num_heads, first_value = first_key + layer_.num_kv_heads;
    const int64_t* slots = step_.slots + layer_.group * step_.num_tokens;
    for_tokens([&](int64_t t) {
      T* heads = heads_ + t * size_;
      if (!layer_.norms_follow) normalise(heads);
      if (layer_.angles >= 0) rotate(step_.angles[layer_.angles], live_.positions[t], heads);
      if (layer_.norms_follow) normalise(heads);
      if (!layer_.stores) return;
      normalise(layer_.value_norm, heads + first_value * dim, layer_.num_kv_heads);
      const int64_t slot = slots[t];
      if (slot < 0) return;
      const bool is_last = t + 1 == step_.num_tokens || slots[t + 1] != slot + 1;
      cache_.store(slot, heads + first_key * dim, heads + first_value * dim, is_last);
    });
  }

  void attend(T* out) const {
    const int64_t group = layer_.group_size(), dim = layer_.head_dim, num_kv_heads = layer_.num_kv_heads;
    const int64_t attn_size = layer_.attn_size();
    const int64_t* table = step_.block_table + layer_.group * step_.num_requests * step_.table_stride;
    const std::vector<Span> spans = live_.spans(std::max<int64_t>(1, ROWS_PER_PIECE / group));
    for_each(spans.size() * num_kv_heads, [&](int64_t item) {
      const Span& span = spans[item / num_kv_heads];
      const int64_t kv_head = item % num_kv_heads, offset = kv_head * group * dim;
      const Queries<T> queries{heads_ + span.first_token * size_ + offset,
                               size_,
                               group,
                               span.first_position,
                               layer_.window,
                               layer_.ahead,
                               layer_.scale,
                               layer_.softcap,
                               layer_.sinks ? layer_.sinks + kv_head * group : nullptr,
                               table + span.request * step_.table_stride,
                               kv_head,
                               &cache_,
                               out + span.first_token * attn_size + offset,
                               attn_size,
                               live_.visible_ends ? live_.visible_ends + span.first_token : nullptr};
      attend_rows(queries, span.num_tokens * group);
    });
  }

 private:
  template <typename Body>
  void for_tokens(const Body& body) const {
    for_ranges(live_.num, TOKENS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t t = start; t < end; ++t) body(t);
    });
  }

  void normalise(T* heads) const {
    normalise(layer_.query_norm, heads, layer_.num_heads);
    if (layer_.stores) normalise(layer_.key_norm, heads + layer_.num_heads * layer_.head_dim, layer_.num_kv_heads);
  }

  void normalise(const Norm& norm, T* first, int64_t num) const {
    const int64_t dim = layer_.head_dim;
    if (norm.kind == NormKind::NONE) return;
    if (layer_.norms_rows) return apply_norm(norm, first, first, num * dim);
    for (int64_t head = 0; head < num; ++head) {
      apply_norm(norm, first + head * dim, first + head * dim, dim, head * dim);
    }
  }

  void rotate(const Angles& angles, int64_t position, T* heads) const {
    const float *cos = angles.cos + position * angles.dim, *sin = angles.sin + position * angles.dim;
    const int64_t num = layer_.num_heads + (layer_.stores ? layer_.num_kv_heads : 0);
    for (int64_t head = 0; head < num; ++head) {
      T* at = heads + head * layer_.head_dim;
      layer_.is_interleaved ? rotate_neighbours(at, cos, sin, angles.dim) : rotate_row(at, cos, sin, at, angles.dim);
    }
  }

  static void attend_rows(const Queries<T>& queries, int64_t num_rows) {
    if constexpr (tiles::EXIST && sizeof(T) == sizeof(bfloat16)) {
      if (suits_tiles(queries.cache->shape)) {
        TileAttention attention(queries);
        for (int64_t row = 0; row < num_rows; row += tiles::ROWS) {
          attention.run(row, std::min<int64_t>(tiles::ROWS, num_rows - row));
        }
        return;
      }
    }
    for_row_tiles<TILE_ROWS>(num_rows, VectorAttention<T>{queries});
  }

  const DecoderLayer& layer_;
  const DecoderStep& step_;
  const LiveTokens& live_;
  const LayerCache<T> cache_;
  T* heads_;
  const int64_t size_;
};
