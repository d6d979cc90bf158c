// Edits of rows of logits, in the order of `logit_edits.apply_edits`: masks, allowed ids, suppressed ids, bias,
// penalties.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "logit_row.h"

namespace quire {

// Elements of the rows, by rising row.
struct Pairs {
  const int64_t* rows;
  const int64_t* token_ids;
  int64_t count;
};

// Mirrors `LogitEdits`; a kind without elements is off.
struct Edits {
  const int64_t* masked_rows;  // [num_masked]
  const int32_t* mask_words;   // [num_masked, words_per_mask], a bit for each token that can be chosen
  int64_t num_masked, words_per_mask;
  Pairs allowed, suppressed, biased;
  const float* biases;  // beside `biased`
  // [num_penalised]; penalties [num_penalised, 3]: repetition, presence, frequency
  const int32_t *penalised_rows, *seats, *lengths, *num_prompt;
  const float* penalties;
  int64_t num_penalised;
  const int32_t* token_table;  // [num_seats, width]
  int64_t table_stride;
};

// Edits by row, for any number of threads.
class EditedRows {
 public:
  EditedRows(const Edits* edits, int64_t num_rows) : edits_(edits) {
    if (!edits) return;
    allowed_ = starts_of(edits->allowed, num_rows);
    suppressed_ = starts_of(edits->suppressed, num_rows);
    biased_ = starts_of(edits->biased, num_rows);
    masked_.assign(num_rows, -1);
    for (int64_t m = 0; m < edits->num_masked; ++m) masked_[edits->masked_rows[m]] = m;
    penalised_.assign(num_rows, -1);
    for (int64_t e = 0; e < edits->num_penalised; ++e) penalised_[edits->penalised_rows[e]] = e;
  }

  bool has(int64_t row) const {
    return edits_ && (masked_[row] >= 0 || size_of(allowed_, row) || size_of(suppressed_, row) ||
                      size_of(biased_, row) || penalised_[row] >= 0);
  }

  // Leaves the maxima of the row as they were.
  void apply(int64_t row, LogitRow& logits) const {
    if (!edits_) return;
    thread_local std::vector<float> kept;
    float* values = logits.values();
    if (masked_[row] >= 0) mask(masked_[row], logits);
    if (size_of(allowed_, row)) {
      const int64_t* ids = edits_->allowed.token_ids + allowed_[row];
      const int64_t count = size_of(allowed_, row);
      kept.resize(count);
      for (int64_t i = 0; i < count; ++i) kept[i] = values[ids[i]];
      std::fill(values, values + logits.size(), MINUS_INFINITY);
      for (int64_t i = 0; i < count; ++i) values[ids[i]] = kept[i];
    }
    for (int64_t i = 0; i < size_of(suppressed_, row); ++i)
      values[edits_->suppressed.token_ids[suppressed_[row] + i]] = MINUS_INFINITY;
    for (int64_t i = 0; i < size_of(biased_, row); ++i)
      values[edits_->biased.token_ids[biased_[row] + i]] += edits_->biases[biased_[row] + i];
    if (penalised_[row] >= 0) penalise(penalised_[row], logits);
  }

 private:
  typedef std::vector<int64_t> Starts;  // [num_rows + 1], or empty if the kind is off

  static Starts starts_of(const Pairs& pairs, int64_t num_rows) {
    if (!pairs.count) return {};
    Starts starts(num_rows + 1, 0);
    for (int64_t i = 0; i < pairs.count; ++i) ++starts[pairs.rows[i] + 1];
    for (int64_t row = 0; row < num_rows; ++row) starts[row + 1] += starts[row];
    return starts;
  }

  static int64_t size_of(const Starts& starts, int64_t row) {
    return starts.empty() ? 0 : starts[row + 1] - starts[row];
  }

  // Most words have no bit, or all.
  void mask(int64_t m, LogitRow& logits) const {
    const int32_t* words = edits_->mask_words + m * edits_->words_per_mask;
    float* values = logits.values();
    for (int64_t first = 0; first < logits.size(); first += 32) {
      const uint32_t word = static_cast<uint32_t>(words[first / 32]);
      if (word == 0xffffffffu) continue;
      const int64_t count = std::min<int64_t>(32, logits.size() - first);
      for (int64_t i = 0; i < count; ++i)
        if (!(word >> i & 1)) values[first + i] = MINUS_INFINITY;
    }
  }

  // Penalises each token of the history once: when its count is taken.
  void penalise(int64_t e, LogitRow& logits) const {
    constexpr int32_t OCCURS = 1 << 30;            // beside the number of occurrences in the output
    thread_local std::vector<int32_t> counts;      // [vocabulary], zeros between calls
    if (static_cast<int64_t>(counts.size()) < logits.size()) counts.resize(logits.size(), 0);
    const int32_t* history = edits_->token_table + edits_->seats[e] * edits_->table_stride;
    const int64_t length = edits_->lengths[e];
    const float repetition = edits_->penalties[e * 3], presence = edits_->penalties[e * 3 + 1],
                frequency = edits_->penalties[e * 3 + 2];
    for (int64_t i = 0; i < length; ++i)
      counts[history[i]] = (counts[history[i]] | OCCURS) + (i >= edits_->num_prompt[e]);
    for (int64_t i = 0; i < length; ++i) {
      int32_t& count = counts[history[i]];
      if (!count) continue;
      const float occurrences = static_cast<float>(count & (OCCURS - 1));
      count = 0;
      float value = logits.values()[history[i]];
      // Each product is rounded before the difference, as the reference does: volatile keeps compilers from fusing them.
      volatile float repeated = value < 0.0f ? value * repetition : value / repetition;
      volatile float frequent = frequency * occurrences;
      value = repeated - frequent;
      logits.values()[history[i]] = value - (occurrences > 0.0f ? presence : 0.0f);
    }
  }

  const Edits* edits_;
  Starts allowed_, suppressed_, biased_;
  std::vector<int64_t> masked_, penalised_;  // the index of each row's mask or penalties, or -1
};

}  // namespace quire
