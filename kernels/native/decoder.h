// What a decoder is made of, and one step's work, as kernels/decoder lays them out for ctypes.
#pragma once
#include "adapters.h"
#include "experts.h"
#include "gates.h"
#include "layer_embeddings.h"
#include "layer_switches.h"
#include "linear.h"
#include "mixers.h"

// Cosines and sines of every position, [P, dim]; both halves of a row are alike.
struct Angles {
  const float *cos, *sin;
  int64_t dim;
};

// Pointers are to elements of the model's dtype, unless said.
struct DecoderLayer {
  Norm input_norm, attention_norm, mlp_norm, mlp_out_norm;  // the second and the last of what is added to the stream
  Norm query_norm, key_norm, value_norm;                    // weights [H, D], [KVH, D] and [KVH, D]
  Linear qkv, output, gate_up, down;  // without inputs the former two, or the latter, in a layer of one part
  void *keys, *values;  // the layer's cache, see paged_cache.h
  const float* sinks;   // [H] logits that carry no value; null without
  float scale;
  float softcap;         // 0: none
  float residual_scale;  // of what is added to the stream
  int64_t window;        // positions a token sees, itself the last; 0: all before it
  int64_t ahead;         // and behind it, of those that visible_ends lets it see; below 0: all of them
  int64_t angles;        // which of the step's; below 0 heads are not rotated
  int64_t is_interleaved, norms_rows, norms_follow, is_parallel;
  Activation activation;
  int64_t is_gated;
  AttentionGate gate;  // position of the gates in a row of the projection
  const Mixer* mixer;  // in the place of attention; null for that
  int64_t group;  // whose slots and block table of a step
  const Experts* experts;  // beside gate_up and down, or alone; null without
  int64_t num_heads, num_kv_heads, head_dim;
  // How much the projection makes: queries alone, where the cache is that of a layer before, which stores; queries and
  // keys, of which values are made, too; or all three.
  int64_t stores, values_are_keys;
  const EmbeddingPart* embedding_part;  // behind the feed-forward part; null without
  const float* out_scale;               // of the stream behind the layer; null without

  int64_t group_size() const { return num_heads / num_kv_heads; }
  // Of a token's heads, [queries, keys, values].
  int64_t heads_size() const { return (num_heads + (stores ? 2 * num_kv_heads : 0)) * head_dim; }
  int64_t found_size() const { return num_heads * head_dim; }
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers, hidden_size, mlp_size, block_size;
  int64_t norms_stream;  // what the norms before a layer's parts, and the final one, make is the stream from there on
  float token_scale, stream_scale, logit_scale;
  float logit_softcap;  // 0: none
  const void* embeddings;
  Norm final_norm;
  Linear lm_head;  // without inputs: normalised rows are told in the place of logits
  const LayerEmbeddings* layer_embeddings;  // what embedding parts of layers are given; null without
};

// In the order of a layer: see DecoderLayer.
enum Product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS_PER_LAYER };

// T packed tokens of B requests; those of a request are the last query_lens[b] of its seq_lens[b].
struct DecoderStep {
  int64_t num_tokens, num_requests, num_logit_rows;
  const int64_t *token_ids, *positions;          // [T]
  const int64_t* slots;                          // [groups, T]; one below 0 is stored nowhere
  const void* inputs_embeds;                     // [T, hidden size] in place of the embeddings; null for those
  const Angles* angles;                          // as many as layers name
  const int64_t* block_table;                    // [groups, B, table_stride]
  int64_t table_stride;
  const int64_t *query_lens, *seq_lens;  // [B]
  const int64_t* logit_rows;             // [R] ascending
  float* logits;                         // [R, V], rounded to the dtype; [R, hidden size] without a head
  const int64_t* adapter_slots;          // [T], below 0 for none; null where no token has an adapter
  const AdaptedProduct* adapted;         // [layers, PRODUCTS_PER_LAYER, num_adapter_slots]
  int64_t num_adapter_slots;
  const int64_t* visible_ends;  // [T], where what a token sees ends; null where each sees as far as itself
  const int64_t *state_reads, *state_writes;  // [B] slots, see MixerStep; null where no layer keeps a state
};
