// What a Llama-like decoder is made of, and one step's work, as kernels/decoder lays them out for ctypes.
#pragma once
#include "adapters.h"
#include "linear.h"

// Pointers are to elements of the model's dtype, unless said.
struct DecoderLayer {
  const void *input_norm, *mlp_norm;  // [hidden size]
  const void *query_norm, *key_norm;  // [D], of each head; null without
  Linear qkv, output, gate_up, down;
  void *keys, *values;  // the layer's cache, see paged_cache.h
  float scale;
  int64_t window;  // positions a token sees; 0: all before it
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, mlp_size, block_size;
  float norm_eps, head_norm_eps;
  const void *embeddings, *final_norm;
  Linear lm_head;
};

// In the order of a layer: see DecoderLayer.
enum Product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS_PER_LAYER };

// T packed tokens of B requests; those of a request are the last query_lens[b] of its seq_lens[b].
struct DecoderStep {
  int64_t num_tokens, num_requests, num_logit_rows;
  const int64_t *token_ids, *positions, *slots;  // [T]; a slot below 0 is stored nowhere
  const void* inputs_embeds;                     // [T, hidden size] in place of the embeddings; null for those
  const void *cos, *sin;                         // [every position, D]
  const int64_t* block_table;                    // [B, table_stride]
  int64_t table_stride;
  const int64_t *query_lens, *seq_lens;  // [B]
  const int64_t* logit_rows;             // [R] ascending
  float* logits;                         // [R, V], rounded to the dtype
  const int64_t* adapter_slots;          // [T], below 0 for none; null where no token has an adapter
  const AdaptedProduct* adapted;         // [layers, PRODUCTS_PER_LAYER, num_adapter_slots]
  int64_t num_adapter_slots;
};
