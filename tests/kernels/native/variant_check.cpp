// Products of every storage against sums in double, for compilers and processors that have no Python with torch: exits
// with 0 if all agree. Sizes are beside whole panels, vectors and pairs.
#include <cmath>
#include <cstdio>
#include <vector>

#include "kernels.h"
#include "simd.h"

extern "C" {
int64_t quire_packed_size(int64_t num_outputs, int64_t num_inputs, int half, int int8);
void quire_pack(const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed, int half, int int8,
                int num_threads);
}

using quire::bf16;

static uint32_t state = 1;

static float drawn() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state >> 8) % 2000 - 1000) / 1000.0f;
}

template <class T>
static T stored(float x) {
  T to;
  quire::set_float(to, x);
  return to;
}

template <>
int8_t stored<int8_t>(float x) {
  return static_cast<int8_t>(std::lround(x * 127));
}

// Weights as W, rows and results as S.
template <class W, class S>
static int check(int64_t rows, int64_t inputs, int64_t outputs) {
  constexpr bool HALF = sizeof(S) == 2, INT8 = sizeof(W) == 1;
  std::vector<S> x(rows * inputs), out(rows * outputs), bias(outputs);
  std::vector<W> weight(outputs * inputs), packed(quire_packed_size(outputs, inputs, HALF, INT8));
  std::vector<float> scales(outputs, 0.01f);
  for (auto& each : x) each = stored<S>(drawn());
  for (auto& each : weight) each = stored<W>(drawn());
  for (auto& each : bias) each = stored<S>(drawn());
  quire_pack(weight.data(), outputs, inputs, packed.data(), HALF, INT8, 2);
  quire::Operation product = {};
  product.half = HALF;
  product.x = x.data();
  product.x_stride = product.num_inputs = inputs;
  product.out = out.data();
  product.out_stride = product.num_outputs = outputs;
  product.first = packed.data();
  product.second = INT8 ? scales.data() : nullptr;
  product.third = bias.data();
  quire::run_product(product, rows, 2);
  int wrong = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t output = 0; output < outputs; ++output) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        double product = static_cast<double>(quire::to_float(x[row * inputs + i])) *
                         quire::to_float(weight[output * inputs + i]);
        sum += product;
        size += std::fabs(product);
      }
      if (INT8) sum *= scales[output], size *= scales[output];
      sum += quire::to_float(bias[output]);
      double error = std::fabs(quire::to_float(out[row * outputs + output]) - sum);
      double allowed = size * 1e-6 * std::sqrt(static_cast<double>(inputs)) + (HALF ? std::fabs(sum) / 256 : 0) + 1e-6;
      wrong += !(error <= allowed);
    }
  if (wrong)
    std::printf("%d of %d wrong: weights of %d bytes, rows of %d, %d x %d x %d\n", wrong,
                static_cast<int>(rows * outputs), static_cast<int>(sizeof(W)), static_cast<int>(sizeof(S)),
                static_cast<int>(rows), static_cast<int>(inputs), static_cast<int>(outputs));
  return wrong;
}

// Every bfloat16 comes back from float as it was, and what lies between two goes to the nearer.
static int check_rounding() {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x7f80u; bits += quire::LANES) {
    bf16 given[quire::LANES], back[quire::LANES], up[quire::LANES];
    float between[quire::LANES];
    for (int i = 0; i < quire::LANES; ++i) given[i].bits = static_cast<uint16_t>(bits + i);
    quire::store_floats(back, quire::load_floats(given));
    for (int i = 0; i < quire::LANES; ++i) {
      uint32_t three_quarters = (bits + i) << 16 | 0xc000u;
      std::memcpy(&between[i], &three_quarters, sizeof(float));
    }
    quire::store_floats(up, quire::load_floats(between));
    bool is_tiny = bits < 0x100;  // AVX-512 takes the smallest for zero
    for (int i = 0; i < quire::LANES && !is_tiny; ++i)
      wrong += back[i].bits != bits + i || up[i].bits != bits + i + 1;
  }
  if (wrong) std::printf("%d roundings are wrong\n", wrong);
  return wrong;
}

int main() {
  int wrong = check_rounding();
  for (int64_t rows : {1, 3, 17})
    for (int64_t inputs : {1, 63, 130})
      for (int64_t outputs : {1, 31, 65}) {
        wrong += check<float, float>(rows, inputs, outputs) + check<bf16, bf16>(rows, inputs, outputs);
        wrong += check<int8_t, float>(rows, inputs, outputs) + check<int8_t, bf16>(rows, inputs, outputs);
      }
  return wrong != 0;
}
