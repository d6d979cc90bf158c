// A pass through a model as one call: the kernels of all layers, in order, with recorded operands that are the same in
// every pass. Knows which kernel computes an operation, no model.

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "team.h"

namespace quire {

// Operands that change with every pass.
struct Pass {
  int64_t num_tokens, num_wanted;
  const int64_t *token_ids, *positions, *slots;  // [num_tokens]
  const int64_t* wanted;                         // [num_wanted], or null if all are
};

// out[i] = x[rows[i]]; rows of `num_outputs` bytes
static void gather_rows(const Operation& op, const int64_t* rows, int64_t num_rows) {
  char *x = static_cast<char*>(op.x), *out = static_cast<char*>(op.out);
  for (int64_t i = 0; i < num_rows; ++i)
    std::memcpy(out + i * op.out_stride, x + rows[i] * op.x_stride, op.num_outputs);
}

// The same for a table's rows op.begin and after; one that the table does not have is zero.
static void embed_rows(const Operation& op, const int64_t* rows, int64_t num_rows) {
  char *table = static_cast<char*>(op.x), *out = static_cast<char*>(op.out);
  for (int64_t i = 0; i < num_rows; ++i) {
    uint64_t row = static_cast<uint64_t>(rows[i] - op.begin);
    if (row < static_cast<uint64_t>(op.num_inputs))
      std::memcpy(out + i * op.out_stride, table + row * op.x_stride, op.num_outputs);
    else
      std::memset(out + i * op.out_stride, 0, op.num_outputs);
  }
}

// Rows of `num_outputs` bytes.
static void copy_rows(const Operation& op, int64_t num_rows) {
  const char* x = static_cast<const char*>(op.x);
  for (int64_t i = 0; i < num_rows; ++i)
    std::memcpy(static_cast<char*>(op.out) + i * op.out_stride, x + i * op.x_stride, op.num_outputs);
}

static void run(const Operation& op, const Pass& pass, int num_threads) {
  int64_t rows = op.of_wanted ? pass.num_wanted : pass.num_tokens;
  switch (op.kind) {
    case PRODUCT: return run_product(op, rows, num_threads);
    case NORM: return run_norm(op, rows, num_threads);
    case ACTIVATE: return run_activation(op, rows, num_threads);
    case ROTATE: return run_rotation(op, pass.positions, pass.slots, rows, num_threads);
    case ATTEND: return run_attention(op);
    case GATHER: return gather_rows(op, pass.wanted, pass.num_wanted);
    case EMBED: return embed_rows(op, pass.token_ids, pass.num_tokens);
    case GREEDY: return run_greedy(op, rows, num_threads);
    case CHOOSE: return run_choice(op, rows, num_threads);
    case SUM: return run_sum(op, rows, num_threads);
    case JOIN: return run_join(op, rows, num_threads);
    case COPY: return copy_rows(op, rows);
  }
}

}  // namespace quire

// Uses at most so many threads, even if the attention plan was made for more.
extern "C" void quire_run(const quire::Operation* operations, int64_t count, const quire::Pass* pass, int num_threads) {
  quire::ThreadLimit limit(num_threads);
  for (int64_t i = 0; i < count; ++i) quire::run(operations[i], *pass, num_threads);
}
