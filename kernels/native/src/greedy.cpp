// The greatest logit of each row and whether all are finite, each logit read once. Knows rows, no vocabulary.

#include <vector>

#include "choice.h"
#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace quire {

namespace {

constexpr int64_t SPAN = 1024;             // scanned for its maximum, and again for its place if it leads
constexpr int64_t MIN_PARALLEL = 1 << 13;  // elements

template <class S>
Best best_of(const S* x, int64_t begin, int64_t end) {
  float greatest = -std::numeric_limits<float>::infinity();
  int64_t found = begin;
  bool is_finite = true;
  for (int64_t start = begin; start < end; start += SPAN) {
    int64_t stop = start + SPAN < end ? start + SPAN : end, i = start;
    vfloat most = all(greatest), zeros = {};  // x * 0 is NaN where x is not finite
    for (; i + LANES <= stop; i += LANES) {
      vfloat v = load_floats(x + i);
      most = greater(v, most);
      zeros += v * 0.0f;
    }
    float here = max_of(most), zero = sum_of(zeros);
    for (; i < stop; ++i) {
      float v = to_float(x[i]);
      here = v > here ? v : here;
      zero += v * 0.0f;
    }
    is_finite &= zero == zero;
    if (here > greatest) {
      greatest = here;
      for (found = start; found + 1 < stop && to_float(x[found]) != here;) ++found;
    }
  }
  return {greatest, found, is_finite};
}

template <class S>
void greedy(const Operation& op, int64_t num_rows, int num_threads) {
  const S* logits = static_cast<const S*>(op.x);
  int64_t size = op.num_inputs;
  int64_t num_parts = num_rows < num_threads ? num_threads : 1, part = (size + num_parts - 1) / num_parts;
  std::vector<Best> best(num_rows * num_parts);
  share(num_rows * size > MIN_PARALLEL ? num_threads : 1, num_rows * num_parts, [&](int64_t i, int) {
    int64_t begin = i % num_parts * part, end = begin + part < size ? begin + part : size;
    best[i] = best_of(logits + i / num_parts * op.x_stride, begin, end);
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    Best whole = best[row * num_parts];
    for (int64_t i = 1; i < num_parts; ++i) add_best(whole, best[row * num_parts + i]);
    set_choice(whole, op, row);
  }
}

}  // namespace

// x: logits [num_rows, num_inputs]; out: tokens [num_rows]
void run_greedy(const Operation& op, int64_t num_rows, int num_threads) {
  with_storage(op.half, [&](auto zero) { greedy<decltype(zero)>(op, num_rows, num_threads); });
}

}  // namespace quire

// The width of the vectors of this build, for logs.
extern "C" int quire_lanes() { return quire::LANES; }
