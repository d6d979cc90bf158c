// A pass through a model as one call: the kernels of all layers, in order, with recorded operands that are the same in
// every pass. Knows which kernel takes which of an operation's fields, no model.

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "team.h"

namespace quire {

enum OperationKind { PRODUCT, NORM, ACTIVATE, ROTATE, ATTEND, GATHER, EMBED, GREEDY, CHOOSE };

// Fields that a kind does not need are zero. Strides are in elements, for GATHER and EMBED in bytes.
struct Operation {
  int32_t kind;
  int32_t of_wanted;  // rows: the wanted ones', else all tokens
  int32_t choice;     // which activation or norm
  int32_t half;
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
};

// Operands that change with every pass.
struct Pass {
  int64_t num_tokens, num_wanted;
  const int64_t *token_ids, *positions, *slots;  // [num_tokens]
  const int64_t* wanted;                         // [num_wanted], or null if all are
};

static void run(const Operation& op, const Pass& pass, int num_threads) {
  int64_t rows = op.of_wanted ? pass.num_wanted : pass.num_tokens;
  switch (op.kind) {
    case PRODUCT:
      return quire_product(op.x, op.x_stride, rows, op.num_inputs, op.first,
                           static_cast<const float*>(op.second), op.third, op.out, op.out_stride, op.num_outputs,
                           op.half, num_threads);
    case NORM:
      return quire_add_norm(op.x, op.x_stride, op.first, op.first_stride, op.second, op.third, op.number, op.choice,
                            op.out, op.out_stride, rows, op.num_outputs, op.half, num_threads);
    case ACTIVATE:
      return quire_activate(op.choice, op.x, op.x_stride, op.gated, op.out, op.out_stride, rows, op.num_outputs,
                            op.half, num_threads);
    case ROTATE:
      return quire_rotate_and_write(static_cast<const Cache*>(op.first), op.x, op.x_stride,
                                    static_cast<const float*>(op.second), static_cast<int>(op.num_inputs),
                                    pass.positions, pass.slots, rows, op.query_norm, op.key_norm, op.number,
                                    num_threads);
    case ATTEND:
      return quire_attend(static_cast<Plan*>(op.second), static_cast<const Cache*>(op.first), op.x, op.x_stride,
                          op.out, op.out_stride, op.number);
    case GATHER:
      return quire_gather_rows(op.x, op.x_stride, pass.wanted, pass.num_wanted, op.num_outputs, op.out,
                               op.out_stride);
    case EMBED:
      return quire_gather_rows(op.x, op.x_stride, pass.token_ids, pass.num_tokens, op.num_outputs, op.out,
                               op.out_stride);
    case GREEDY:
      return quire_greedy(op.x, op.x_stride, rows, op.num_inputs, static_cast<int64_t*>(op.out),
                          op.finite, op.half, num_threads);
    case CHOOSE:
      return quire_choose(op.x, op.x_stride, rows, op.num_inputs, op.first,
                          static_cast<const float*>(op.second), op.third, op.num_outputs,
                          static_cast<int64_t*>(op.out), op.finite, op.half, num_threads);
  }
}

}  // namespace quire

extern "C" {

// Rows of `row_bytes` bytes, strides in bytes: out[i] = x[rows[i]]
void quire_gather_rows(const void* x, int64_t x_stride, const int64_t* rows, int64_t num_rows, int64_t row_bytes,
                       void* out, int64_t out_stride) {
  for (int64_t i = 0; i < num_rows; ++i)
    std::memcpy(static_cast<char*>(out) + i * out_stride, static_cast<const char*>(x) + rows[i] * x_stride, row_bytes);
}

// Uses at most so many threads, even if the attention plan was made for more.
void quire_run(const quire::Operation* operations, int64_t count, const quire::Pass* pass, int num_threads) {
  quire::ThreadLimit limit(num_threads);
  for (int64_t i = 0; i < count; ++i) quire::run(operations[i], *pass, num_threads);
}
}
