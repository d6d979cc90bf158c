// The kernels that a pass is made of, as an operation calls them. Strides are in elements unless it says bytes.
#pragma once

#include <cstdint>

#include "attention_plan.h"
#include "cache.h"

extern "C" {
void quire_product(const void* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const void* weights,
                   const float* scales, const void* bias, void* out, int64_t out_stride, int64_t num_outputs, int half,
                   int num_threads);
void quire_choose(const void* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const void* weights,
                  const float* scales, const void* bias, int64_t num_outputs, int64_t* tokens, bool* finite, int half,
                  int num_threads);
void quire_add_norm(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, const void* weight,
                    const void* bias, float eps, int rule, void* out, int64_t out_stride, int64_t num_rows,
                    int64_t size, int half, int num_threads);
void quire_activate(int kind, const void* x, int64_t stride, int gated, void* out, int64_t out_stride,
                    int64_t num_rows, int64_t size, int half, int num_threads);
void quire_rotate_and_write(const quire::Cache* cache, void* qkv, int64_t stride, const float* rotary, int rotary_dim,
                            const int64_t* positions, const int64_t* slots, int64_t num_tokens, const void* query_norm,
                            const void* key_norm, float eps, int num_threads);
void quire_attend(quire::Plan* plan, const quire::Cache* cache, const void* query, int64_t query_stride, void* out,
                  int64_t out_stride, float scale);
void quire_gather_rows(const void* x, int64_t x_stride, const int64_t* rows, int64_t num_rows, int64_t row_bytes,
                       void* out, int64_t out_stride);
void quire_greedy(const void* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t* tokens, bool* finite,
                  int half, int num_threads);
}
