// Embeddings that each layer has of its own, beside the stream. A token's are made once: what its id has in a second
// table, and what its embedding is projected to. A layer's last part opens a gate for its share of them.
#pragma once
#include "layer_switches.h"
#include "linear.h"

struct LayerEmbeddings {
  const void* table;  // [V, layers, size]
  Linear projection;  // of the embedding, to [layers, size]
  Norm norm;          // of what each layer is projected to, [size]
  int64_t size;
  float table_scale, projection_scale, sum_scale;
};

struct EmbeddingPart {
  Linear gate, output;
  Norm norm;  // of what is added to the stream
  Activation activation;
};

// row, what one token is projected to for all layers, becomes their embeddings.
template <typename T>
void join_layer_embeddings(const LayerEmbeddings& of, const T* table_row, T* row, int64_t num_layers) {
  for (int64_t layer = 0; layer < num_layers; ++layer, row += of.size, table_row += of.size) {
    scale_row(row, of.projection_scale, of.size);
    apply_norm(of.norm, row, row, of.size);
#pragma omp simd
    for (int64_t i = 0; i < of.size; ++i) {
      const T own = from_float<T>(to_float(table_row[i]) * of.table_scale);
      const T sum = from_float<T>(to_float(row[i]) + to_float(own));
      row[i] = from_float<T>(to_float(sum) * of.sum_scale);
    }
  }
}

// opened, what the gate makes, becomes the activation of it times the layer's embedding.
template <typename T>
void open_layer_embedding(const EmbeddingPart& part, const T* embedding, T* opened, int64_t size) {
  activate_row(part.activation, false, opened, opened, size);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) opened[i] = from_float<T>(to_float(opened[i]) * to_float(embedding[i]));
}
