// A whole decoder in one call. Between two operations all threads meet; within one they take pieces (parallel.h).
#include "decoder.h"

#include <vector>

#include "gates.h"
#include "layer_switches.h"
#include "spans.h"
#include "tile_attention.h"
#include "vector_attention.h"
#include "workspace.h"

namespace {

constexpr int64_t TOKENS_PER_PIECE = 8, LOGITS_PER_PIECE = 16384;
// Rows (tokens by heads of a group) of a prompt that one thread attends for: several tiles, so that what was read of the
// cache is read from near again.
constexpr int64_t ROWS_PER_PIECE = 48;

// One step of a model of dtype T.
template <typename T>
class Run {
 public:
  Run(const Decoder& decoder, const DecoderStep& step)
      : d_(decoder),
        s_(step),
        qkv_size_((decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim),
        found_size_(decoder.num_heads * decoder.head_dim),
        space_(workspace_bytes()) {
    const int64_t tokens = step.num_tokens;
    residual_ = space_.template take<T>(tokens * d_.hidden_size);
    normed_ = space_.template take<T>(tokens * d_.hidden_size);
    added_ = space_.template take<T>(tokens * d_.hidden_size);
    made_ = space_.template take<T>(tokens * d_.hidden_size);
    qkv_ = space_.template take<T>(tokens * qkv_size_);
    rows_ = space_.template take<T>(tokens * widest(&DecoderLayer::qkv, &Linear::num_outputs));
    found_ = space_.template take<T>(tokens * widest(&DecoderLayer::output, &Linear::num_inputs));
    gates_ = space_.template take<T>(tokens * found_size_);
    gate_up_ = space_.template take<T>(tokens * 2 * d_.mlp_size);
    gated_ = space_.template take<T>(tokens * d_.mlp_size);
    spans_ = cut_spans(step, std::max<int64_t>(1, ROWS_PER_PIECE / (d_.num_heads / d_.num_kv_heads)));
  }

  void all() {
    num_rows_ = s_.num_tokens;
    slots_ = s_.adapter_slots;
    embed();
    for (int64_t i = 0; i < d_.num_layers; ++i) {
      const DecoderLayer& layer = d_.layers[i];
      add_and_norm(i == 0 ? nullptr : added_, layer.output.num_inputs > 0 ? layer.input_norm : layer.mlp_norm);
      const int64_t found_size = layer.output.num_inputs;
      if (found_size > 0) find(i, found_size);
      if (i == d_.num_layers - 1) keep_logit_rows(found_size);
      if (found_size == 0) {
        feed_alone(i);
        continue;
      }
      multiply<T, T>(found_, found_size, layer.output, added_, d_.hidden_size, num_rows_);
      adapt(i, OUTPUT, found_, found_size, added_, d_.hidden_size);
      layer.is_parallel ? feed_beside(i) : feed_behind(i);
    }
    add_and_norm(added_, d_.final_norm);
    d_.lm_head.num_inputs > 0 ? make_logits() : tell_rows();
  }

 private:
  size_t workspace_bytes() const {
    const int64_t rows = widest(&DecoderLayer::qkv, &Linear::num_outputs),
                  found = widest(&DecoderLayer::output, &Linear::num_inputs);
    const int64_t per_token = 4 * d_.hidden_size + qkv_size_ + rows + found + found_size_ + 3 * d_.mlp_size;
    return s_.num_tokens * per_token * sizeof(T) + 11 * VECTOR_BYTES;
  }

  int64_t widest(Linear DecoderLayer::*linear, int64_t Linear::*side) const {
    int64_t most = 0;
    for (int64_t i = 0; i < d_.num_layers; ++i) most = std::max(most, d_.layers[i].*linear.*side);
    return most;
  }

  // Adds to the outputs of a layer's product what the adapters of the tokens make of its inputs.
  void adapt(int64_t layer, Product product, const T* inputs, int64_t input_size, T* out, int64_t out_size) {
    if (!slots_) return;
    const AdaptedProduct* products = s_.adapted + (layer * PRODUCTS_PER_LAYER + product) * s_.num_adapter_slots;
    add_adapters(inputs, input_size, products, slots_, out, out_size, num_rows_);
  }

  void make_logits() {
    multiply<T, float>(normed_, d_.hidden_size, d_.lm_head, s_.logits, d_.lm_head.num_outputs, num_rows_);
    for_ranges(num_rows_ * d_.lm_head.num_outputs, LOGITS_PER_PIECE, [&](int64_t start, int64_t end) {
      change_logits<T>(s_.logits + start, end - start, d_.logit_scale, d_.logit_softcap);
    });
  }

  void tell_rows() {
    for_rows([&](int64_t t) {
      const T* row = normed_ + t * d_.hidden_size;
      for (int64_t i = 0; i < d_.hidden_size; ++i) s_.logits[t * d_.hidden_size + i] = to_float(row[i]);
    });
  }

  void embed() {
    const T* from = static_cast<const T*>(s_.inputs_embeds ? s_.inputs_embeds : d_.embeddings);
    const float own = s_.inputs_embeds ? 1.0f : d_.token_scale;
    for (int64_t t = 0; t < s_.num_tokens; ++t) {
      const int64_t row = s_.inputs_embeds ? t : s_.token_ids[t];
      T* to = residual_ + t * d_.hidden_size;
      std::memcpy(to, from + row * d_.hidden_size, d_.hidden_size * sizeof(T));
      for (const float scale : {own, d_.stream_scale}) {
        if (scale != 1.0f) scale_row(to, scale, d_.hidden_size);
      }
    }
  }

  // From normed_ to found_, by attention or what is in its place.
  void find(int64_t i, int64_t found_size) {
    const DecoderLayer& layer = d_.layers[i];
    const int64_t width = layer.qkv.num_outputs, rest = 2 * d_.num_kv_heads * d_.head_dim;
    T* rows = layer.mixer || layer.gate ? rows_ : qkv_;
    multiply<T, T>(normed_, d_.hidden_size, layer.qkv, rows, width, num_rows_);
    adapt(i, QKV, normed_, d_.hidden_size, rows, width);
    if (layer.mixer) {
      const MixerStep step{s_.num_tokens, s_.num_requests, s_.query_lens, s_.state_reads, s_.state_writes};
      return mix(*layer.mixer, step, rows, width, found_, found_size);
    }
    if (layer.gate) {
      for_rows([&](int64_t t) {
        split_gates(static_cast<Gate>(layer.gate), rows + t * width, qkv_ + t * qkv_size_, gates_ + t * found_size_,
                    d_.num_heads, d_.head_dim, rest);
      });
    }
    place(layer);
    attend(layer);
    if (!layer.gate) return;
    for_rows([&](int64_t t) { open_gates(gates_ + t * found_size_, found_ + t * found_size_, found_size_); });
  }

  // What attention added goes to the stream, and the feed-forward part starts from there.
  void feed_behind(int64_t i) {
    const DecoderLayer& layer = d_.layers[i];
    finish(added_, layer.attention_norm, layer.residual_scale);
    if (layer.down.num_inputs == 0 && !layer.experts) return;
    add_and_norm(added_, layer.mlp_norm);
    feed_alone(i);
  }

  void feed_alone(int64_t i) {
    feed_forward(i, added_);
    finish(added_, d_.layers[i].mlp_out_norm, d_.layers[i].residual_scale);
  }

  // Both parts start from the layer's input, and go to the stream together.
  void feed_beside(int64_t i) {
    const DecoderLayer& layer = d_.layers[i];
    finish(added_, layer.attention_norm, 1.0f);
    if (layer.mlp_norm.kind != NO_NORM) add_and_norm(nullptr, layer.mlp_norm);
    feed_forward(i, made_);
    finish(made_, layer.mlp_out_norm, 1.0f);
    for_rows([&](int64_t t) { add_row(made_ + t * d_.hidden_size, added_ + t * d_.hidden_size, d_.hidden_size); });
    finish(added_, Norm{}, layer.residual_scale);
  }

  // From normed_ to out.
  void feed_forward(int64_t i, T* out) {
    const DecoderLayer& layer = d_.layers[i];
    const bool is_dense = layer.down.num_inputs > 0;
    if (is_dense) feed_all(i, out);
    if (layer.experts) mix_experts(*layer.experts, normed_, d_.hidden_size, out, is_dense, num_rows_);
  }

  // By weights that all tokens go through.
  void feed_all(int64_t i, T* out) {
    const DecoderLayer& layer = d_.layers[i];
    const int64_t size = layer.down.num_inputs, width = layer.gate_up.num_outputs;
    multiply<T, T>(normed_, d_.hidden_size, layer.gate_up, gate_up_, width, num_rows_);
    adapt(i, GATE_UP, normed_, d_.hidden_size, gate_up_, width);
    for_rows([&](int64_t t) {
      activate_row(layer.activation, layer.is_gated, gate_up_ + t * width, gated_ + t * size, size);
    });
    multiply<T, T>(gated_, size, layer.down, out, d_.hidden_size, num_rows_);
    adapt(i, DOWN, gated_, size, out, d_.hidden_size);
  }

  // Runs body(row) for each row that matters.
  template <typename Body>
  void for_rows(const Body& body) {
    for_ranges(num_rows_, TOKENS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t t = start; t < end; ++t) body(t);
    });
  }

  void add_and_norm(const T* added, const Norm& norm) {
    const int64_t size = d_.hidden_size;
    for_rows([&](int64_t t) {
      T* stream = residual_ + t * size;
      if (added) add_row(added + t * size, stream, size);
      apply_norm(norm, stream, normed_ + t * size, size);
      if (d_.norms_stream) std::memcpy(stream, normed_ + t * size, size * sizeof(T));
    });
  }

  // What is to be added is normalised, and scaled, where it lies.
  void finish(T* rows, const Norm& norm, float scale) {
    if (norm.kind == NO_NORM && scale == 1.0f) return;
    for_rows([&](int64_t t) {
      T* row = rows + t * d_.hidden_size;
      if (norm.kind != NO_NORM) apply_norm(norm, row, row, d_.hidden_size);
      if (scale != 1.0f) scale_row(row, scale, d_.hidden_size);
    });
  }

  // Normalises and rotates queries and keys where they lie, and stores keys and values.
  void place(const DecoderLayer& layer) {
    const LayerCache<T> cache = cache_of(layer);
    const int64_t dim = d_.head_dim, first_key = d_.num_heads, first_value = d_.num_heads + d_.num_kv_heads;
    const int64_t* slots = s_.slots + layer.group * s_.num_tokens;
    for_ranges(s_.num_tokens, TOKENS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t t = start; t < end; ++t) {
        T* heads = qkv_ + t * qkv_size_;
        if (!layer.norms_follow) norm_heads(layer, heads);
        if (layer.angles >= 0) rotate(s_.angles[layer.angles], layer.is_interleaved, s_.positions[t], heads);
        if (layer.norms_follow) norm_heads(layer, heads);
        const int64_t slot = slots[t];
        if (slot < 0) continue;
        const bool is_last = t + 1 == s_.num_tokens || slots[t + 1] != slot + 1;
        cache.put(slot, heads + first_key * dim, heads + first_value * dim, is_last);
      }
    });
  }

  void norm_heads(const DecoderLayer& layer, T* heads) const {
    if (layer.query_norm.kind == NO_NORM) return;
    const int64_t dim = d_.head_dim;
    for (const bool is_key : {false, true}) {
      const Norm& norm = is_key ? layer.key_norm : layer.query_norm;
      const int64_t num = is_key ? d_.num_kv_heads : d_.num_heads;
      T* first = heads + (is_key ? d_.num_heads * dim : 0);
      if (layer.norms_rows) {
        apply_norm(norm, first, first, num * dim);
      } else {
        for (int64_t head = 0; head < num; ++head) apply_norm(norm, first + head * dim, first + head * dim, dim, head * dim);
      }
    }
  }

  void rotate(const Angles& angles, bool is_interleaved, int64_t position, T* heads) const {
    const float *cos = angles.cos + position * angles.dim, *sin = angles.sin + position * angles.dim;
    for (int64_t head = 0; head < d_.num_heads + d_.num_kv_heads; ++head) {
      T* at = heads + head * d_.head_dim;
      is_interleaved ? rotate_neighbours(at, cos, sin, angles.dim) : rotate_row(at, cos, sin, at, angles.dim);
    }
  }

  void attend(const DecoderLayer& layer) {
    const LayerCache<T> cache = cache_of(layer);
    const int64_t group = d_.num_heads / d_.num_kv_heads;
    const int64_t* table = s_.block_table + layer.group * s_.num_requests * s_.table_stride;
    for_each(spans_.size() * d_.num_kv_heads, [&](int64_t item) {
      const Span& span = spans_[item / d_.num_kv_heads];
      const int64_t kv_head = item % d_.num_kv_heads, offset = kv_head * group * d_.head_dim;
      const Queries<T> queries{qkv_ + span.first_token * qkv_size_ + offset,
                               qkv_size_,
                               group,
                               span.first_position,
                               layer.window,
                               layer.ahead,
                               layer.scale,
                               layer.softcap,
                               layer.sinks ? layer.sinks + kv_head * group : nullptr,
                               table + span.request * s_.table_stride,
                               kv_head,
                               &cache,
                               found_ + span.first_token * found_size_ + offset,
                               found_size_,
                               s_.visible_ends ? s_.visible_ends + span.first_token : nullptr};
      attend_rows(queries, span.num_tokens * group);
    });
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

  // From here on only tokens whose logits are wanted matter; they come earlier, never later, than they were.
  void keep_logit_rows(int64_t found_size) {
    for (int64_t i = 0; i < s_.num_logit_rows; ++i) {
      const int64_t row = s_.logit_rows[i];
      std::memmove(residual_ + i * d_.hidden_size, residual_ + row * d_.hidden_size, d_.hidden_size * sizeof(T));
      std::memmove(normed_ + i * d_.hidden_size, normed_ + row * d_.hidden_size, d_.hidden_size * sizeof(T));
      std::memmove(found_ + i * found_size, found_ + row * found_size, found_size * sizeof(T));
    }
    num_rows_ = s_.num_logit_rows;
    if (!slots_) return;
    for (int64_t i = 0; i < num_rows_; ++i) kept_slots_.push_back(slots_[s_.logit_rows[i]]);
    slots_ = kept_slots_.data();
  }

  LayerCache<T> cache_of(const DecoderLayer& layer) const {
    return {static_cast<T*>(layer.keys), static_cast<T*>(layer.values), {d_.num_kv_heads, d_.head_dim, d_.block_size}};
  }

  const Decoder& d_;
  const DecoderStep& s_;
  const int64_t qkv_size_, found_size_;
  Workspace space_;
  T *residual_, *normed_, *added_, *made_, *qkv_, *rows_, *found_, *gates_, *gate_up_, *gated_;
  std::vector<Span> spans_;
  int64_t num_rows_ = 0;
  const int64_t* slots_ = nullptr;  // of adapters, of the rows that matter
  std::vector<int64_t> kept_slots_;
};

}  // namespace

#define PENSTOCK_DECODER(T, suffix)                                                              \
  extern "C" void run_decoder_##suffix(const Decoder* decoder, const DecoderStep* step) {        \
    Run<T>(*decoder, *step).all();                                                               \
  }

PENSTOCK_DECODER(float, float32)
PENSTOCK_DECODER(bfloat16, bfloat16)
