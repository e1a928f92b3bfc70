// Layers of a decoder and the input of a step. Matches the ctypes structs of kernels/decoder.
#pragma once
#include "decoder/adapters.h"
#include "decoder/experts.h"
#include "decoder/gates.h"
#include "decoder/layer_embeddings.h"
#include "decoder/layer_switches.h"
#include "decoder/mixers.h"
#include "products/linear.h"

// Cosines and sines of every position, [P, dim]; both halves of a row are equal.
struct Angles {
  const float *cos, *sin;
  int64_t dim;
};

// Pointers without a documented type point to elements of the model's dtype.
struct DecoderLayer {
  Norm input_norm, attention_norm, mlp_norm, mlp_out_norm;  // attention_norm, mlp_out_norm: of branch outputs
  Norm query_norm, key_norm, value_norm;                    // weights [H, D], [KVH, D] and [KVH, D]
  Linear qkv, output, gate_up, down;  // num_inputs is 0 for projections that the layer lacks
  void *keys, *values;  // the layer's cache, see paged_cache.h
  int64_t block_bytes;  // distance of two blocks in it
  const float* sinks;   // [H] logits without a value; null for none
  float scale;
  float softcap;         // 0 for none
  float residual_scale;  // factor on the outputs of both branches
  int64_t window;        // number of positions that a token sees, including its own; 0 for all before it
  int64_t ahead;         // number of later positions within visible_ends; negative for all
  int64_t angles;        // index into the step's angles; negative for no rotation
  int64_t is_interleaved, norms_rows, norms_follow, is_parallel;
  Activation activation;
  int64_t is_gated;
  AttentionGate gate;  // position of the gates in a row of the projection
  const Mixer* mixer;  // replaces attention; null for attention
  int64_t group;  // selects slots and block table of a step
  const Experts* experts;  // in addition to gate_up and down, or alone; null for none
  int64_t num_heads, num_kv_heads, head_dim;
  // stores: the layer stores keys and values; else qkv only computes queries, and the cache belongs to an earlier
  // layer. values_are_keys: qkv computes queries and keys, and values are the keys before norm and rotation.
  int64_t stores, values_are_keys;
  const EmbeddingPart* embedding_part;  // after the MLP; null for none
  const float* out_scale;               // factor on the stream after the layer; null for none

  int64_t group_size() const { return num_heads / num_kv_heads; }
  // Elements of a token's heads, [queries, keys, values].
  int64_t heads_size() const { return (num_heads + (stores ? 2 * num_kv_heads : 0)) * head_dim; }
  int64_t attn_size() const { return num_heads * head_dim; }
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers, hidden_size, mlp_size, block_size;
  int64_t caches_bytes;  // keys and values are in bytes, see paged_cache.h
  int64_t norms_stream;  // outputs of input_norm, mlp_norm and final_norm replace the stream
  int64_t embeds_by_head;  // the rows of lm_head, which is in blocks, are the embeddings
  float token_scale, stream_scale, logit_scale;
  float logit_softcap;  // 0 for none
  const void* embeddings;
  Norm final_norm;
  Linear lm_head;  // num_inputs is 0 to return normalised hidden states instead of logits
  const LayerEmbeddings* layer_embeddings;  // input of the embedding parts of layers; null for none
};

// Products of a layer that adapters apply to.
enum Product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS_PER_LAYER };

// T packed tokens of B requests: the last query_lens[b] of the seq_lens[b] tokens of each request.
struct DecoderStep {
  int64_t num_tokens, num_requests, num_logit_rows;
  const int64_t *token_ids, *positions;          // [T]
  const int64_t* slots;                          // [groups, T]; a token with a negative slot is not stored
  const void* inputs_embeds;                     // [T, hidden size], replaces the embeddings; null to use those
  const Angles* angles;                          // one per rotary embedding that layers refer to
  const int64_t* block_table;                    // [groups, B, table_stride]
  int64_t table_stride;
  const int64_t *query_lens, *seq_lens;  // [B]
  const int64_t* logit_rows;             // [R] ascending
  float* logits;                         // [R, V], rounded to the dtype; [R, hidden size] without a head
  const int64_t* adapter_slots;          // [T], negative for none; null if no token has an adapter
  const AdaptedProduct* adapted;         // [layers, PRODUCTS_PER_LAYER, num_adapter_slots]
  int64_t num_adapter_slots;
  const int64_t* visible_ends;  // [T], end of the positions that each token sees; null if it is the next one
  const int64_t *state_reads, *state_writes;  // [B] slots, see MixerStep; null if no layer keeps a state
};
