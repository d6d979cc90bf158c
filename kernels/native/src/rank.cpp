// The best tokens of rows by edited log-probabilities, and log-probabilities, ranks and most likely tokens by the
// model's own distribution. Knows rows of logits, no seats and no beams.

#include <limits>

#include "logit_edits.h"
#include "team.h"

namespace quire {

// The best of each row; results are [num_rows, num_best].
struct Ranking {
  const void* logits;  // [.., size]
  int64_t stride, size, num_rows, num_best;
  const int32_t* logit_rows;  // [num_rows]
  const Edits* edits;         // or null
  int64_t* token_ids;
  float* logprobs;
  bool* valid;  // [num_rows]: all logits are finite, and no edited log-probability is infinity
  int32_t half;
};

// Log-probabilities of rows by the model's own distribution.
struct Logprobs {
  const void* logits;  // [.., size]
  int64_t stride, size, num_rows, num_tokens, num_top;
  const int32_t* logit_rows;  // [num_rows]
  const int64_t* token_ids;   // [num_rows, num_tokens]
  float* logprobs;            // [num_rows, num_tokens]
  int32_t* ranks;             // [num_rows, num_tokens]
  int32_t* top_token_ids;     // [num_rows, num_top]
  float* top_logprobs;        // [num_rows, num_top]
  int32_t half;
};

namespace {

template <class S>
LogitRow& load_row(const void* logits, int64_t stride, int64_t row, int64_t size) {
  thread_local LogitRow loaded;  // as large as the largest vocabulary
  loaded.load(static_cast<const S*>(logits) + row * stride, size);
  return loaded;
}

template <class S>
void rank_row(const Ranking& ranking, const EditedRows& edits, int64_t i) {
  LogitRow& row = load_row<S>(ranking.logits, ranking.stride, ranking.logit_rows[i], ranking.size);
  bool is_valid = row.is_finite;
  if (is_valid) {
    row.subtract(row.log_sum());
    edits.apply(i, row);
    is_valid = row.find_maxima();
  }
  ranking.valid[i] = is_valid;
  int64_t* token_ids = ranking.token_ids + i * ranking.num_best;
  float* logprobs = ranking.logprobs + i * ranking.num_best;
  std::fill(token_ids, token_ids + ranking.num_best, 0);
  std::fill(logprobs, logprobs + ranking.num_best, MINUS_INFINITY);
  if (!is_valid) return;
  for (const TokenValue& best : row.best_tokens(ranking.num_best)) {
    *token_ids++ = best.token_id;
    *logprobs++ = best.value;
  }
}

template <class S>
void describe_row(const Logprobs& call, int64_t i) {
  LogitRow& row = load_row<S>(call.logits, call.stride, call.logit_rows[i], call.size);
  const int64_t first = i * call.num_tokens, first_top = i * call.num_top;
  if (!row.is_finite) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill(call.logprobs + first, call.logprobs + first + call.num_tokens, nan);
    std::fill(call.ranks + first, call.ranks + first + call.num_tokens, 1);
    std::fill(call.top_token_ids + first_top, call.top_token_ids + first_top + call.num_top, 0);
    std::fill(call.top_logprobs + first_top, call.top_logprobs + first_top + call.num_top, nan);
    return;
  }
  const float log_sum = row.log_sum(), max = row.max();
  for (int64_t t = 0; t < call.num_tokens; ++t) {
    const float value = row.values()[call.token_ids[first + t]];
    call.logprobs[first + t] = (value - max) - log_sum;
    call.ranks[first + t] = row.rank_of(value);
  }
  int64_t place = first_top;
  for (const TokenValue& best : row.best_tokens(call.num_top)) {
    call.top_token_ids[place] = static_cast<int32_t>(best.token_id);
    call.top_logprobs[place++] = (best.value - max) - log_sum;
  }
}

}  // namespace

}  // namespace quire

extern "C" {

void quire_rank_tokens(const quire::Ranking* ranking, int num_threads) {
  const quire::EditedRows edits(ranking->edits, ranking->num_rows);
  quire::share(num_threads, ranking->num_rows, [&](int64_t i, int) {
    quire::with_storage(ranking->half, [&](auto zero) { quire::rank_row<decltype(zero)>(*ranking, edits, i); });
  });
}

void quire_token_logprobs(const quire::Logprobs* call, int num_threads) {
  quire::share(num_threads, call->num_rows, [&](int64_t i, int) {
    quire::with_storage(call->half, [&](auto zero) { quire::describe_row<decltype(zero)>(*call, i); });
  });
}
}
