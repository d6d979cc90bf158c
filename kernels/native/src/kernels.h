// The kernels that a pass is made of, and the operation that calls one of them.
#pragma once

#include <cstdint>

namespace quire {

enum OperationKind { PRODUCT, NORM, ACTIVATE, ROTATE, ATTEND, GATHER, EMBED, GREEDY, CHOOSE, SUM, JOIN, COPY };

// Fields that a kind does not need are zero. Strides are in elements, for GATHER, EMBED and COPY in bytes.
struct Operation {
  int32_t kind;
  int32_t of_wanted;  // rows: the wanted ones', else all tokens
  int32_t choice;     // which activation or norm
  int32_t half;       // rows are bfloat16, else float32
  int32_t gated;
  float number;       // epsilon or scale
  void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  int64_t num_inputs, num_outputs;
  // weights, scales, bias; residual, weight, bias; cache, rotary or plan
  void *first, *second, *third;
  void *query_norm, *key_norm;
  int64_t first_stride;
  bool* finite;  // beside `out`: which rows are
  int64_t begin;  // first token id of an embedding's rows
};

// Each computes the rows of one kind of operation.
void run_product(const Operation& op, int64_t num_rows, int num_threads);
void run_norm(const Operation& op, int64_t num_rows, int num_threads);
void run_activation(const Operation& op, int64_t num_rows, int num_threads);
void run_rotation(const Operation& op, const int64_t* positions, const int64_t* slots, int64_t num_tokens,
                  int num_threads);
void run_attention(const Operation& op);
void run_greedy(const Operation& op, int64_t num_rows, int num_threads);
void run_choice(const Operation& op, int64_t num_rows, int num_threads);
void run_sum(const Operation& op, int64_t num_rows, int num_threads);
void run_join(const Operation& op, int64_t num_rows, int num_threads);

}  // namespace quire
