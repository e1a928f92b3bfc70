// Runs a whole decoder in one call. Threads share the work of each operation and synchronize after it (parallel.h).
#include "decoder/decoder.h"

#include "base/workspace.h"
#include "decoder/layer_heads.h"
#include "weights/blocks.h"

namespace {

constexpr int64_t LOGITS_PER_PIECE = 16384;

// Runs one step of a model of dtype T.
template <typename T>
class StepRun {
 public:
  StepRun(const Decoder& decoder, const DecoderStep& step)
      : decoder_(decoder),
        step_(step),
        live_(step),
        layer_embeds_size_(decoder.layer_embeddings ? decoder.num_layers * decoder.layer_embeddings->size : 0),
        first_kv_reader_(first_kv_reader(decoder)),
        space_(workspace_bytes()) {
    const int64_t tokens = step.num_tokens;
    for (T** rows : {&residual_, &normed_, &branch_out_, &parallel_mlp_out_}) {
      *rows = space_.template allocate<T>(tokens * decoder_.hidden_size);
    }
    heads_ = space_.template allocate<T>(tokens * max_heads_size());
    qkv_ = space_.template allocate<T>(tokens * max_width(&DecoderLayer::qkv, &Linear::num_outputs));
    attn_out_ = space_.template allocate<T>(tokens * max_width(&DecoderLayer::output, &Linear::num_inputs));
    gates_ = space_.template allocate<T>(tokens * max_width(&DecoderLayer::output, &Linear::num_inputs));
    gate_up_ = space_.template allocate<T>(tokens * 2 * decoder_.mlp_size);
    gated_ = space_.template allocate<T>(tokens * decoder_.mlp_size);
    layer_embeds_ = space_.template allocate<T>(tokens * layer_embeds_size_);
    embed_gate_ = space_.template allocate<T>(tokens * layer_embeds_size_ / decoder_.num_layers);
  }

  void run() {
    embed();
    const float* scale = nullptr;
    for (int64_t i = 0; i < decoder_.num_layers; ++i) {
      const DecoderLayer& layer = decoder_.layers[i];
      const int64_t attn_size = layer.output.num_inputs;
      add_and_norm(i == 0 ? nullptr : branch_out_, attn_size > 0 ? layer.input_norm : layer.mlp_norm, scale);
      if (i == first_kv_reader_) keep_logit_rows(0);
      if (attn_size > 0) attend_or_mix(i, attn_size);
      if (i == decoder_.num_layers - 1 && i < first_kv_reader_) keep_logit_rows(attn_size);
      if (attn_size == 0) {
        mlp_alone(i);
      } else {
        multiply<T, T>(attn_out_, attn_size, layer.output, branch_out_, decoder_.hidden_size, live_.num);
        apply_adapters(i, OUTPUT, attn_out_, attn_size, branch_out_, decoder_.hidden_size);
        layer.is_parallel ? mlp_in_parallel(i) : mlp_after_attention(i);
      }
      if (layer.embedding_part) add_layer_embedding(i);
      scale = layer.out_scale;
    }
    add_and_norm(branch_out_, decoder_.final_norm, scale);
    decoder_.lm_head.num_inputs > 0 ? compute_logits() : copy_hidden_states();
  }

 private:
  size_t workspace_bytes() const {
    const int64_t qkv = max_width(&DecoderLayer::qkv, &Linear::num_outputs),
                  attn_out = max_width(&DecoderLayer::output, &Linear::num_inputs);
    const int64_t per_token = 4 * decoder_.hidden_size + max_heads_size() + qkv + 2 * attn_out + 3 * decoder_.mlp_size +
                              layer_embeds_size_ + layer_embeds_size_ / decoder_.num_layers;
    return step_.num_tokens * per_token * sizeof(T) + 12 * VECTOR_BYTES;
  }

  int64_t max_width(Linear DecoderLayer::*linear, int64_t Linear::*side) const {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder_.num_layers; ++i) widest = std::max(widest, decoder_.layers[i].*linear.*side);
    return widest;
  }

  int64_t max_heads_size() const {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder_.num_layers; ++i) widest = std::max(widest, decoder_.layers[i].heads_size());
    return widest;
  }

  // First of the last layers that only read keys and values of earlier layers. From there on, only the tokens that need
  // logits are computed.
  static int64_t first_kv_reader(const Decoder& decoder) {
    int64_t first = decoder.num_layers;
    while (first > 0 && decoder.layers[first - 1].output.num_inputs > 0 && !decoder.layers[first - 1].mixer &&
           !decoder.layers[first - 1].stores) {
      --first;
    }
    return first;
  }

  // Adds the updates of the tokens' adapters to the output of a product.
  void apply_adapters(int64_t layer, Product product, const T* inputs, int64_t input_size, T* out, int64_t out_size) {
    if (!live_.adapter_slots) return;
    const AdaptedProduct* products = step_.adapted + (layer * PRODUCTS_PER_LAYER + product) * step_.num_adapter_slots;
    add_adapters(inputs, input_size, products, live_.adapter_slots, out, out_size, live_.num);
  }

  void compute_logits() {
    const int64_t vocab_size = decoder_.lm_head.num_outputs;
    multiply<T, float>(normed_, decoder_.hidden_size, decoder_.lm_head, step_.logits, vocab_size, live_.num);
    for_ranges(live_.num * vocab_size, LOGITS_PER_PIECE, [&](int64_t start, int64_t end) {
      scale_and_cap_logits<T>(step_.logits + start, end - start, decoder_.logit_scale, decoder_.logit_softcap);
    });
  }

  // Without a head, the result is the normalised hidden states.
  void copy_hidden_states() {
    for_rows([&](int64_t t) {
      const T* row = normed_ + t * decoder_.hidden_size;
      for (int64_t i = 0; i < decoder_.hidden_size; ++i) step_.logits[t * decoder_.hidden_size + i] = to_float(row[i]);
    });
  }

  void embed() {
    const bool unpacks = !step_.inputs_embeds && decoder_.embeds_by_head;
    const T* source = static_cast<const T*>(step_.inputs_embeds ? step_.inputs_embeds : decoder_.embeddings);
    const float token_scale = step_.inputs_embeds ? 1.0f : decoder_.token_scale;
    for (int64_t t = 0; t < step_.num_tokens; ++t) {
      const int64_t row = step_.inputs_embeds ? t : step_.token_ids[t];
      T* target = residual_ + t * decoder_.hidden_size;
      if (unpacks) {
        unpack_block_row(decoder_.lm_head, row, target);
      } else {
        std::memcpy(target, source + row * decoder_.hidden_size, decoder_.hidden_size * sizeof(T));
      }
      for (const float scale : {token_scale, decoder_.stream_scale}) {
        if (scale != 1.0f) scale_row(target, scale, decoder_.hidden_size);
      }
    }
    if (decoder_.layer_embeddings) embed_layers(*decoder_.layer_embeddings);
  }

  void embed_layers(const LayerEmbeddings& embeddings) {
    const T* table = static_cast<const T*>(embeddings.table);
    const int64_t width = layer_embeds_size_;
    multiply<T, T>(residual_, decoder_.hidden_size, embeddings.projection, layer_embeds_, width, live_.num);
    for_rows([&](int64_t t) {
      const T* row = table + step_.token_ids[t] * width;
      join_layer_embeddings(embeddings, row, layer_embeds_ + t * width, decoder_.num_layers);
    });
  }

  // Computes attn_out_ from normed_, by attention or by a recurrent mixer.
  void attend_or_mix(int64_t i, int64_t attn_size) {
    const DecoderLayer& layer = decoder_.layers[i];
    const int64_t width = layer.qkv.num_outputs;
    T* rows = layer.mixer || LayerHeads<T>::needs_split(layer) ? qkv_ : heads_;
    multiply<T, T>(normed_, decoder_.hidden_size, layer.qkv, rows, width, live_.num);
    apply_adapters(i, QKV, normed_, decoder_.hidden_size, rows, width);
    if (layer.mixer) {
      const MixerStep step{step_.num_tokens, step_.num_requests, step_.query_lens, step_.state_reads,
                           step_.state_writes};
      return mix(*layer.mixer, step, rows, width, attn_out_, attn_size);
    }
    const LayerHeads<T> heads(decoder_, layer, step_, live_, heads_);
    if (rows == qkv_) heads.split(qkv_, gates_);
    heads.norm_rotate_and_store();
    heads.attend(attn_out_);
    if (layer.gate == AttentionGate::NONE) return;
    for_rows([&](int64_t t) { apply_gates(gates_ + t * attn_size, attn_out_ + t * attn_size, attn_size); });
  }

  // Sequential residual: adds the attention output to the stream, then runs the MLP on the normalised stream.
  void mlp_after_attention(int64_t i) {
    const DecoderLayer& layer = decoder_.layers[i];
    norm_and_scale(branch_out_, layer.attention_norm, layer.residual_scale);
    if (layer.down.num_inputs == 0 && !layer.experts) return;
    add_and_norm(branch_out_, layer.mlp_norm);
    mlp_alone(i);
  }

  void mlp_alone(int64_t i) {
    mlp(i, branch_out_);
    norm_and_scale(branch_out_, decoder_.layers[i].mlp_out_norm, decoder_.layers[i].residual_scale);
  }

  // Parallel residual: attention and MLP both read the layer's input, and their sum is added to the stream.
  void mlp_in_parallel(int64_t i) {
    const DecoderLayer& layer = decoder_.layers[i];
    norm_and_scale(branch_out_, layer.attention_norm, 1.0f);
    if (layer.mlp_norm.kind != NormKind::NONE) add_and_norm(nullptr, layer.mlp_norm);
    mlp(i, parallel_mlp_out_);
    norm_and_scale(parallel_mlp_out_, layer.mlp_out_norm, 1.0f);
    const int64_t size = decoder_.hidden_size;
    for_rows([&](int64_t t) { add_row(parallel_mlp_out_ + t * size, branch_out_ + t * size, size); });
    norm_and_scale(branch_out_, Norm{}, layer.residual_scale);
  }

  // Computes out from normed_, by the dense MLP, the experts, or both.
  void mlp(int64_t i, T* out) {
    const DecoderLayer& layer = decoder_.layers[i];
    const bool is_dense = layer.down.num_inputs > 0;
    if (is_dense) dense_mlp(i, out);
    if (layer.experts) mix_experts(*layer.experts, normed_, residual_, decoder_.hidden_size, out, is_dense, live_.num);
  }

  // Adds the MLP output to the stream, then computes the gated per-layer embedding from the stream (Gemma 4).
  void add_layer_embedding(int64_t i) {
    const EmbeddingPart& part = *decoder_.layers[i].embedding_part;
    const int64_t size = part.gate.num_outputs, hidden = decoder_.hidden_size;
    for_rows([&](int64_t t) { add_row(branch_out_ + t * hidden, residual_ + t * hidden, hidden); });
    multiply<T, T>(residual_, hidden, part.gate, embed_gate_, size, live_.num);
    for_rows([&](int64_t t) {
      gate_layer_embedding(part, layer_embeds_ + t * layer_embeds_size_ + i * size, embed_gate_ + t * size, size);
    });
    multiply<T, T>(embed_gate_, size, part.output, branch_out_, hidden, live_.num);
    norm_and_scale(branch_out_, part.norm, 1.0f);
  }

  // The dense MLP, which all tokens use.
  void dense_mlp(int64_t i, T* out) {
    const DecoderLayer& layer = decoder_.layers[i];
    const int64_t size = layer.down.num_inputs, width = layer.gate_up.num_outputs;
    multiply<T, T>(normed_, decoder_.hidden_size, layer.gate_up, gate_up_, width, live_.num);
    apply_adapters(i, GATE_UP, normed_, decoder_.hidden_size, gate_up_, width);
    for_rows([&](int64_t t) {
      activate_row(layer.activation, layer.is_gated, gate_up_ + t * width, gated_ + t * size, size);
    });
    multiply<T, T>(gated_, size, layer.down, out, decoder_.hidden_size, live_.num);
    apply_adapters(i, DOWN, gated_, size, out, decoder_.hidden_size);
  }

  // Runs body(row) for each live token.
  template <typename Body>
  void for_rows(const Body& body) {
    for_ranges(live_.num, TOKENS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t t = start; t < end; ++t) body(t);
    });
  }

  // Adds a branch to the residual stream, scales the sum (null: no scale), and normalises it into normed_.
  void add_and_norm(const T* added, const Norm& norm, const float* scale = nullptr) {
    const int64_t size = decoder_.hidden_size;
    for_rows([&](int64_t t) {
      T* stream = residual_ + t * size;
      if (added) add_row(added + t * size, stream, size);
      if (scale) scale_row(stream, *scale, size);
      apply_norm(norm, stream, normed_ + t * size, size);
      if (decoder_.norms_stream) std::memcpy(stream, normed_ + t * size, size * sizeof(T));
    });
  }

  // Normalises and scales the output of a branch in place, before it is added to the stream.
  void norm_and_scale(T* rows, const Norm& norm, float scale) {
    if (norm.kind == NormKind::NONE && scale == 1.0f) return;
    for_rows([&](int64_t t) {
      T* row = rows + t * decoder_.hidden_size;
      if (norm.kind != NormKind::NONE) apply_norm(norm, row, row, decoder_.hidden_size);
      if (scale != 1.0f) scale_row(row, scale, decoder_.hidden_size);
    });
  }

  // Compacts all buffers to the tokens that need logits. Rows only move towards the front, so they can move in place.
  void keep_logit_rows(int64_t attn_size) {
    const auto move = [](T* rows, int64_t target, int64_t source, int64_t size) {
      std::memmove(rows + target * size, rows + source * size, size * sizeof(T));
    };
    for (int64_t i = 0; i < step_.num_logit_rows; ++i) {
      const int64_t row = step_.logit_rows[i];
      move(residual_, i, row, decoder_.hidden_size);
      move(normed_, i, row, decoder_.hidden_size);
      move(attn_out_, i, row, attn_size);
      move(layer_embeds_, i, row, layer_embeds_size_);
    }
    live_.keep_logit_rows();
  }

  const Decoder& decoder_;
  const DecoderStep& step_;
  LiveTokens live_;
  const int64_t layer_embeds_size_, first_kv_reader_;
  Workspace space_;
  // branch_out_: output of the attention or MLP branch, before it is added to the residual stream.
  T *residual_, *normed_, *branch_out_, *parallel_mlp_out_, *heads_, *qkv_, *attn_out_, *gates_, *gate_up_, *gated_;
  // layer_embeds_: [tokens, num_layers, size], the per-layer embeddings; embed_gate_: [tokens, size], their gates.
  T *layer_embeds_, *embed_gate_;
};

// Runs independent steps. With at least as many steps as threads, each thread runs whole steps, so that threads do not
// synchronize between operations.
template <typename T>
void run_all(const Decoder& decoder, const DecoderStep* steps, int64_t num_steps) {
  if (num_steps < num_threads()) {
    for (int64_t i = 0; i < num_steps; ++i) StepRun<T>(decoder, steps[i]).run();
  } else {
    for_each(num_steps, [&](int64_t i) { StepRun<T>(decoder, steps[i]).run(); }, true);
  }
}

}  // namespace

#define PENSTOCK_DECODER(T, suffix)                                                                         \
  extern "C" void run_decoder_##suffix(const Decoder* decoder, const DecoderStep* steps, int64_t num_steps) { \
    run_all<T>(*decoder, steps, num_steps);                                                                 \
  }

PENSTOCK_DECODER(float, float32)
PENSTOCK_DECODER(bfloat16, bfloat16)
