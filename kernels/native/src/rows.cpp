// Row operations of a decoder layer between its products: norms with the residual addition, gated and plain
// activations. Computed in float32, rounded once. Knows rows and strides, no layers.

#include <cmath>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace quire {

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 14;  // elements, below which a second thread costs more than it saves

enum Activation { RELU = 0, SILU = 1, GELU = 2, GELU_TANH = 3 };

// Vectors of a row; a last partial vector goes through a buffer that is padded with zeros.
template <class S>
struct Row {
  QUIRE_INLINE vfloat at(const S* p, int64_t i, int64_t size) {
    if (i + LANES <= size) return load_floats(p + i);
    S rest[LANES] = {};
    std::memcpy(rest, p + i, (size - i) * sizeof(S));
    return load_floats(rest);
  }
  QUIRE_INLINE void put(S* p, int64_t i, int64_t size, vfloat x) {
    if (i + LANES <= size) return store_floats(p + i, x);
    S rest[LANES];
    store_floats(rest, x);
    std::memcpy(p + i, rest, (size - i) * sizeof(S));
  }
};

// Zeros in the lanes beyond the row.
QUIRE_INLINE vfloat inside(vfloat x, int64_t i, int64_t size) {
  if (i + LANES <= size) return x;
  return lane_numbers() < static_cast<int32_t>(size - i) ? x : vfloat{};
}

// How a row is normalized: bits of `rule`.
enum NormBits { RMS = 1, THEN_ADD = 2 };

template <class S>
void norm_row(const S* x, S* residual, const S* weight, const S* bias, float eps, int rule, S* out, int64_t size) {
  typedef Row<S> R;
  bool rms = rule & RMS;
  const S* added = rule & THEN_ADD ? residual : nullptr;
  if (added) residual = nullptr;
  vfloat sums = {}, squares = {};
  const S* source = residual ? residual : x;
  for (int64_t i = 0; i < size; i += LANES) {
    vfloat v = R::at(x, i, size);
    if (residual) {
      R::put(residual, i, size, v + R::at(residual, i, size));
      v = R::at(residual, i, size);
    }
    sums += v;
    squares += v * v;
  }
  float mean = rms ? 0.0f : sum_of(sums) / size;
  if (!rms) {
    squares = vfloat{};
    for (int64_t i = 0; i < size; i += LANES) {
      vfloat v = inside(R::at(source, i, size) - mean, i, size);
      squares += v * v;
    }
  }
  float factor = 1.0f / std::sqrt(sum_of(squares) / size + eps);
  for (int64_t i = 0; i < size; i += LANES) {
    vfloat v = (R::at(source, i, size) - mean) * factor;
    if (weight) v *= R::at(weight, i, size);
    if (bias) v += R::at(bias, i, size);
    if (added) v += R::at(added, i, size);
    R::put(out, i, size, v);
  }
}

QUIRE_INLINE vfloat sigmoid(vfloat x) { return 1.0f / (1.0f + exp_of(-x)); }

template <int KIND>
QUIRE_INLINE vfloat activated(vfloat x) {
  if (KIND == RELU) return x < 0.0f ? vfloat{} : x;  // NaN stays
  if (KIND == SILU) return x * sigmoid(x);
  // 1 + tanh(z) = 2 sigmoid(2 z)
  if (KIND == GELU_TANH) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
  vfloat y;
  for (int i = 0; i < LANES; ++i) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
  return y;
}

template <class S, int KIND>
void activate_row(const S* x, const S* up, S* out, int64_t size) {
  typedef Row<S> R;
  for (int64_t i = 0; i < size; i += LANES) {
    vfloat y = activated<KIND>(R::at(x, i, size));
    R::put(out, i, size, up ? y * R::at(up, i, size) : y);
  }
}

template <class S, int KIND>
void activate(const Operation& op, int64_t num_rows, int num_threads) {
  int64_t size = op.num_outputs;
  share_rows(num_threads, num_rows, num_rows * size > MIN_PARALLEL, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const S* x = static_cast<const S*>(op.x) + row * op.x_stride;
      activate_row<S, KIND>(x, op.gated ? x + size : nullptr, static_cast<S*>(op.out) + row * op.out_stride, size);
    }
  });
}

template <class S>
void norm(const Operation& op, int64_t num_rows, int num_threads) {
  int64_t size = op.num_outputs;
  S* residuals = static_cast<S*>(op.first);
  const S *weight = static_cast<const S*>(op.second), *bias = static_cast<const S*>(op.third);
  share_rows(num_threads, num_rows, num_rows * size > MIN_PARALLEL, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      norm_row(static_cast<const S*>(op.x) + row * op.x_stride,
               residuals ? residuals + row * op.first_stride : nullptr, weight, bias, op.number, op.choice,
               static_cast<S*>(op.out) + row * op.out_stride, size);
  });
}

}  // namespace

// first: residual, second: weight, third: bias, or null; choice: NormBits. Without THEN_ADD x is added to the residual,
// and their sum is normalized
void run_norm(const Operation& op, int64_t num_rows, int num_threads) {
  with_storage(op.half, [&](auto zero) { norm<decltype(zero)>(op, num_rows, num_threads); });
}

// x: [num_rows, num_outputs], or if gated [num_rows, 2 * num_outputs], gate beside up
void run_activation(const Operation& op, int64_t num_rows, int num_threads) {
  with_storage(op.half, [&](auto zero) {
    typedef decltype(zero) S;
    switch (op.choice) {
      case RELU: return activate<S, RELU>(op, num_rows, num_threads);
      case SILU: return activate<S, SILU>(op, num_rows, num_threads);
      case GELU: return activate<S, GELU>(op, num_rows, num_threads);
      default: return activate<S, GELU_TANH>(op, num_rows, num_threads);
    }
  });
}

}  // namespace quire
