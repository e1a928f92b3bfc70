// A whole decoder in one call. Between two operations all threads meet; within one they take pieces (parallel.h).
#include "decoder.h"

#include "layer_heads.h"
#include "workspace.h"

namespace {

constexpr int64_t LOGITS_PER_PIECE = 16384;

// One step of a model of dtype T.
template <typename T>
class Run {
 public:
  Run(const Decoder& decoder, const DecoderStep& step)
      : d_(decoder),
        s_(step),
        live_(step),
        embedded_size_(decoder.layer_embeddings ? decoder.num_layers * decoder.layer_embeddings->size : 0),
        first_reader_(first_reader(decoder)),
        space_(workspace_bytes()) {
    const int64_t tokens = step.num_tokens;
    for (T** rows : {&residual_, &normed_, &added_, &made_}) *rows = space_.template take<T>(tokens * d_.hidden_size);
    heads_ = space_.template take<T>(tokens * most_heads());
    rows_ = space_.template take<T>(tokens * widest(&DecoderLayer::qkv, &Linear::num_outputs));
    found_ = space_.template take<T>(tokens * widest(&DecoderLayer::output, &Linear::num_inputs));
    gates_ = space_.template take<T>(tokens * widest(&DecoderLayer::output, &Linear::num_inputs));
    gate_up_ = space_.template take<T>(tokens * 2 * d_.mlp_size);
    gated_ = space_.template take<T>(tokens * d_.mlp_size);
    embedded_ = space_.template take<T>(tokens * embedded_size_);
    opened_ = space_.template take<T>(tokens * embedded_size_ / d_.num_layers);
  }

  void all() {
    embed();
    const float* scale = nullptr;
    for (int64_t i = 0; i < d_.num_layers; ++i) {
      const DecoderLayer& layer = d_.layers[i];
      const int64_t found_size = layer.output.num_inputs;
      add_and_norm(i == 0 ? nullptr : added_, found_size > 0 ? layer.input_norm : layer.mlp_norm, scale);
      if (i == first_reader_) keep_logit_rows(0);
      if (found_size > 0) find(i, found_size);
      if (i == d_.num_layers - 1 && i < first_reader_) keep_logit_rows(found_size);
      if (found_size == 0) {
        feed_alone(i);
      } else {
        multiply<T, T>(found_, found_size, layer.output, added_, d_.hidden_size, live_.num);
        adapt(i, OUTPUT, found_, found_size, added_, d_.hidden_size);
        layer.is_parallel ? feed_beside(i) : feed_behind(i);
      }
      if (layer.embedding_part) add_embedding(i);
      scale = layer.out_scale;
    }
    add_and_norm(added_, d_.final_norm, scale);
    d_.lm_head.num_inputs > 0 ? make_logits() : tell_rows();
  }

 private:
  size_t workspace_bytes() const {
    const int64_t rows = widest(&DecoderLayer::qkv, &Linear::num_outputs),
                  found = widest(&DecoderLayer::output, &Linear::num_inputs);
    const int64_t per_token = 4 * d_.hidden_size + most_heads() + rows + 2 * found + 3 * d_.mlp_size +
                              embedded_size_ + embedded_size_ / d_.num_layers;
    return s_.num_tokens * per_token * sizeof(T) + 12 * VECTOR_BYTES;
  }

  int64_t widest(Linear DecoderLayer::*linear, int64_t Linear::*side) const {
    int64_t most = 0;
    for (int64_t i = 0; i < d_.num_layers; ++i) most = std::max(most, d_.layers[i].*linear.*side);
    return most;
  }

  int64_t most_heads() const {
    int64_t most = 0;
    for (int64_t i = 0; i < d_.num_layers; ++i) most = std::max(most, d_.layers[i].heads_size());
    return most;
  }

  // The layer from which on all only read keys and values of layers before: there tokens matter for their logits alone.
  static int64_t first_reader(const Decoder& decoder) {
    int64_t first = decoder.num_layers;
    while (first > 0 && decoder.layers[first - 1].output.num_inputs > 0 && !decoder.layers[first - 1].mixer &&
           !decoder.layers[first - 1].stores) {
      --first;
    }
    return first;
  }

  // Adds to the outputs of a layer's product what the adapters of the tokens make of its inputs.
  void adapt(int64_t layer, Product product, const T* inputs, int64_t input_size, T* out, int64_t out_size) {
    if (!live_.adapter_slots) return;
    const AdaptedProduct* products = s_.adapted + (layer * PRODUCTS_PER_LAYER + product) * s_.num_adapter_slots;
    add_adapters(inputs, input_size, products, live_.adapter_slots, out, out_size, live_.num);
  }

  void make_logits() {
    multiply<T, float>(normed_, d_.hidden_size, d_.lm_head, s_.logits, d_.lm_head.num_outputs, live_.num);
    for_ranges(live_.num * d_.lm_head.num_outputs, LOGITS_PER_PIECE, [&](int64_t start, int64_t end) {
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
    if (d_.layer_embeddings) embed_layers(*d_.layer_embeddings);
  }

  void embed_layers(const LayerEmbeddings& of) {
    const T* table = static_cast<const T*>(of.table);
    multiply<T, T>(residual_, d_.hidden_size, of.projection, embedded_, embedded_size_, live_.num);
    for_rows([&](int64_t t) {
      join_layer_embeddings(of, table + s_.token_ids[t] * embedded_size_, embedded_ + t * embedded_size_, d_.num_layers);
    });
  }

  // From normed_ to found_, by attention or what is in its place.
  void find(int64_t i, int64_t found_size) {
    const DecoderLayer& layer = d_.layers[i];
    const int64_t width = layer.qkv.num_outputs;
    T* rows = layer.mixer || LayerHeads<T>::are_split(layer) ? rows_ : heads_;
    multiply<T, T>(normed_, d_.hidden_size, layer.qkv, rows, width, live_.num);
    adapt(i, QKV, normed_, d_.hidden_size, rows, width);
    if (layer.mixer) {
      const MixerStep step{s_.num_tokens, s_.num_requests, s_.query_lens, s_.state_reads, s_.state_writes};
      return mix(*layer.mixer, step, rows, width, found_, found_size);
    }
    const LayerHeads<T> heads(layer, s_, live_, d_.block_size, heads_);
    if (rows == rows_) heads.split(rows_, gates_);
    heads.place();
    heads.attend(found_);
    if (layer.gate == AttentionGate::NONE) return;
    for_rows([&](int64_t t) { open_gates(gates_ + t * found_size, found_ + t * found_size, found_size); });
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
    if (layer.mlp_norm.kind != NormKind::NONE) add_and_norm(nullptr, layer.mlp_norm);
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
    if (layer.experts) mix_experts(*layer.experts, normed_, residual_, d_.hidden_size, out, is_dense, live_.num);
  }

  // What the feed-forward part added goes to the stream, and the layer's own embedding is let in from there.
  void add_embedding(int64_t i) {
    const EmbeddingPart& part = *d_.layers[i].embedding_part;
    const int64_t size = part.gate.num_outputs, hidden = d_.hidden_size;
    for_rows([&](int64_t t) { add_row(added_ + t * hidden, residual_ + t * hidden, hidden); });
    multiply<T, T>(residual_, hidden, part.gate, opened_, size, live_.num);
    for_rows([&](int64_t t) {
      open_layer_embedding(part, embedded_ + t * embedded_size_ + i * size, opened_ + t * size, size);
    });
    multiply<T, T>(opened_, size, part.output, added_, hidden, live_.num);
    finish(added_, part.norm, 1.0f);
  }

  // By weights that all tokens go through.
  void feed_all(int64_t i, T* out) {
    const DecoderLayer& layer = d_.layers[i];
    const int64_t size = layer.down.num_inputs, width = layer.gate_up.num_outputs;
    multiply<T, T>(normed_, d_.hidden_size, layer.gate_up, gate_up_, width, live_.num);
    adapt(i, GATE_UP, normed_, d_.hidden_size, gate_up_, width);
    for_rows([&](int64_t t) {
      activate_row(layer.activation, layer.is_gated, gate_up_ + t * width, gated_ + t * size, size);
    });
    multiply<T, T>(gated_, size, layer.down, out, d_.hidden_size, live_.num);
    adapt(i, DOWN, gated_, size, out, d_.hidden_size);
  }

  // Runs body(row) for each row that matters.
  template <typename Body>
  void for_rows(const Body& body) {
    for_ranges(live_.num, TOKENS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t t = start; t < end; ++t) body(t);
    });
  }

  // scale: of the sum, and null for none.
  void add_and_norm(const T* added, const Norm& norm, const float* scale = nullptr) {
    const int64_t size = d_.hidden_size;
    for_rows([&](int64_t t) {
      T* stream = residual_ + t * size;
      if (added) add_row(added + t * size, stream, size);
      if (scale) scale_row(stream, *scale, size);
      apply_norm(norm, stream, normed_ + t * size, size);
      if (d_.norms_stream) std::memcpy(stream, normed_ + t * size, size * sizeof(T));
    });
  }

  // What is to be added is normalised, and scaled, where it lies.
  void finish(T* rows, const Norm& norm, float scale) {
    if (norm.kind == NormKind::NONE && scale == 1.0f) return;
    for_rows([&](int64_t t) {
      T* row = rows + t * d_.hidden_size;
      if (norm.kind != NormKind::NONE) apply_norm(norm, row, row, d_.hidden_size);
      if (scale != 1.0f) scale_row(row, scale, d_.hidden_size);
    });
  }

  // From here on only tokens whose logits are wanted matter; they come earlier, never later, than they were.
  void keep_logit_rows(int64_t found_size) {
    const auto move = [](T* rows, int64_t to, int64_t from, int64_t size) {
      std::memmove(rows + to * size, rows + from * size, size * sizeof(T));
    };
    for (int64_t i = 0; i < s_.num_logit_rows; ++i) {
      const int64_t row = s_.logit_rows[i];
      move(residual_, i, row, d_.hidden_size);
      move(normed_, i, row, d_.hidden_size);
      move(found_, i, row, found_size);
      move(embedded_, i, row, embedded_size_);
    }
    live_.keep_logit_rows();
  }

  const Decoder& d_;
  const DecoderStep& s_;
  LiveTokens live_;
  const int64_t embedded_size_, first_reader_;
  Workspace space_;
  T *residual_, *normed_, *added_, *made_, *heads_, *rows_, *found_, *gates_, *gate_up_, *gated_, *embedded_, *opened_;
};

// Steps that have nothing to do with each other: where there are enough of them, each thread takes whole ones, and none
// waits for another between two operations.
template <typename T>
void run_all(const Decoder& decoder, const DecoderStep* steps, int64_t num_steps) {
  if (num_steps < num_threads()) {
    for (int64_t i = 0; i < num_steps; ++i) Run<T>(decoder, steps[i]).all();
  } else {
    for_each(num_steps, [&](int64_t i) { Run<T>(decoder, steps[i]).all(); }, true);
  }
}

}  // namespace

#define PENSTOCK_DECODER(T, suffix)                                                                         \
  extern "C" void run_decoder_##suffix(const Decoder* decoder, const DecoderStep* steps, int64_t num_steps) { \
    run_all<T>(*decoder, steps, num_steps);                                                                 \
  }

PENSTOCK_DECODER(float, float32)
PENSTOCK_DECODER(bfloat16, bfloat16)
