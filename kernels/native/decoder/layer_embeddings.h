// Per-layer embeddings of a token, in addition to the stream. They are computed once per step: the sum of a row of a
// second table and of a projection of the token's embedding. A layer's last part gates its share of them.
#pragma once
#include "decoder/layer_switches.h"
#include "products/linear.h"

struct LayerEmbeddings {
  const void* table;  // [V, layers, size]
  Linear projection;  // from the embedding to [layers, size]
  Norm norm;          // [size], of each layer's part of the projection
  int64_t size;
  float table_scale, projection_scale, sum_scale;
};

struct EmbeddingPart {
  Linear gate, output;
  Norm norm;  // of the output, before it is added to the stream
  Activation activation;
};

// Turns row, the projection of one token for all layers, into the per-layer embeddings.
template <typename T>
void join_layer_embeddings(const LayerEmbeddings& embeddings, const T* table_row, T* row, int64_t num_layers) {
  for (int64_t layer = 0; layer < num_layers; ++layer, row += embeddings.size, table_row += embeddings.size) {
    scale_row(row, embeddings.projection_scale, embeddings.size);
    apply_norm(embeddings.norm, row, row, embeddings.size);
#pragma omp simd
    for (int64_t i = 0; i < embeddings.size; ++i) {
      const T from_table = from_float<T>(to_float(table_row[i]) * embeddings.table_scale);
      const T sum = from_float<T>(to_float(row[i]) + to_float(from_table));
      row[i] = from_float<T>(to_float(sum) * embeddings.sum_scale);
    }
  }
}

// gate = activation(gate) * embedding.
template <typename T>
void gate_layer_embedding(const EmbeddingPart& part, const T* embedding, T* gate, int64_t size) {
  activate_row(part.activation, false, gate, gate, size);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) gate[i] = from_float<T>(to_float(gate[i]) * to_float(embedding[i]));
}
