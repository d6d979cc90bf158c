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
void activate(const S* x, int64_t stride, bool gated, S* out, int64_t out_stride, int64_t num_rows, int64_t size,
              int num_threads) {
  share_rows(num_threads, num_rows, num_rows * size > MIN_PARALLEL, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      activate_row<S, KIND>(x + row * stride, gated ? x + row * stride + size : nullptr, out + row * out_stride, size);
  });
}

template <class S>
void activate_by(int kind, const void* x, int64_t stride, bool gated, void* out, int64_t out_stride, int64_t num_rows,
                 int64_t size, int num_threads) {
  const S* from = static_cast<const S*>(x);
  S* to = static_cast<S*>(out);
  switch (kind) {
    case RELU: return activate<S, RELU>(from, stride, gated, to, out_stride, num_rows, size, num_threads);
    case SILU: return activate<S, SILU>(from, stride, gated, to, out_stride, num_rows, size, num_threads);
    case GELU: return activate<S, GELU>(from, stride, gated, to, out_stride, num_rows, size, num_threads);
    default: return activate<S, GELU_TANH>(from, stride, gated, to, out_stride, num_rows, size, num_threads);
  }
}

}  // namespace

}  // namespace quire

extern "C" {

// rule: NormBits. Without THEN_ADD x is added to the residual, and their sum is normalized
void quire_add_norm(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, const void* weight,
                    const void* bias, float eps, int rule, void* out, int64_t out_stride, int64_t num_rows,
                    int64_t size, int half, int num_threads) {
  auto run = [&](auto zero) {
    typedef decltype(zero) S;
    quire::share_rows(num_threads, num_rows, num_rows * size > quire::MIN_PARALLEL, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        quire::norm_row<S>(static_cast<const S*>(x) + row * x_stride,
                           residual ? static_cast<S*>(residual) + row * residual_stride : nullptr,
                           static_cast<const S*>(weight), static_cast<const S*>(bias), eps, rule,
                           static_cast<S*>(out) + row * out_stride, size);
    });
  };
  if (half)
    run(quire::bf16());
  else
    run(0.0f);
}

// x: [num_rows, size], or if gated [num_rows, 2 * size], gate beside up
void quire_activate(int kind, const void* x, int64_t stride, int gated, void* out, int64_t out_stride,
                    int64_t num_rows, int64_t size, int half, int num_threads) {
  if (half)
    quire::activate_by<quire::bf16>(kind, x, stride, gated, out, out_stride, num_rows, size, num_threads);
  else
    quire::activate_by<float>(kind, x, stride, gated, out, out_stride, num_rows, size, num_threads);
}
}
