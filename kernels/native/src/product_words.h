// Layout of packed weights in their panels, and their products with the inputs of a row, for each storage of both.
// Knows one panel and one row.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace quire {

#if defined(__AVX512F__)
constexpr int VECTORS = 2, ROWS = 12;
#elif defined(__aarch64__)
constexpr int VECTORS = 4, ROWS = 6;
#else
constexpr int VECTORS = 2, ROWS = 6;
#endif
constexpr int PANEL = VECTORS * LANES;  // outputs that lie side by side

// One input at a time, as float32: [in][PANEL].
template <class W>
struct OneByOne {
  static constexpr int STEP = 1;  // inputs at a time, of which there are whole steps
  static constexpr bool TILED = false;
  typedef W Weight;
  typedef float Input;  // rows as they are multiplied
  typedef vfloat Word;  // of the weights, for LANES outputs

  static int64_t place_of(int64_t output, int64_t input) { return input * PANEL + output; }

  QUIRE_INLINE void load_words(const W* p, Word (&words)[VECTORS]) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) words[v] = load_floats(p + v * LANES);
  }
  // A broadcast from memory, since x - 0 is x for every x, as x + 0 is not.
  QUIRE_INLINE Word spread(const float* x) { return *x - vfloat{}; }
  QUIRE_INLINE vfloat add(vfloat sum, Word inputs, Word words) { return sum + inputs * words; }
  static W stored(W weight) { return weight; }  // as it is packed
};

// The same with bfloat16 of which two vectors lie as pairs, since to part them takes one instruction each.
struct Parted : OneByOne<bf16> {
  static int64_t place_of(int64_t output, int64_t input) {
    int64_t pair = output / (2 * LANES), lane = output % LANES, second = output / LANES % 2;
    return input * PANEL + (pair * LANES + lane) * 2 + second;
  }

  QUIRE_INLINE void load_words(const bf16* p, Word (&words)[VECTORS]) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v += 2) {
      vuint pairs = load<vuint>(p + v * LANES);
      words[v] = first_of(pairs);
      words[v + 1] = second_of(pairs);
    }
  }
};

#if QUIRE_PAIRS
// Two inputs at a time, as bfloat16, which holds every int8 as well: [in / 2][PANEL][2].
template <class W>
struct InPairs {
  static constexpr int STEP = 2;
  static constexpr bool TILED = false;
  typedef W Weight;
  typedef bf16 Input;
  typedef vuint Word;

  static int64_t place_of(int64_t output, int64_t input) { return input / 2 * 2 * PANEL + output * 2 + input % 2; }

  QUIRE_INLINE void load_words(const W* p, Word (&words)[VECTORS]) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) words[v] = load_pairs(p + v * 2 * LANES);
  }
  QUIRE_INLINE Word spread(const bf16* x) { return load<uint32_t>(x) - vuint{}; }
  QUIRE_INLINE vfloat add(vfloat sum, Word inputs, Word words) { return add_pairs(sum, inputs, words); }
  static W stored(W weight) { return weight; }
};

#if defined(__AVX512VBMI__)
// The two bytes of every bfloat16 from 0 to 127.
struct WholeNumbers {
  alignas(64) uint8_t low[128], high[128];

  constexpr WholeNumbers() : low(), high() {
    for (int number = 1, power = 0; number < 128; ++number) {
      while (number >> (power + 1)) ++power;
      int bits = (127 + power) << 7 | ((number << (7 - power)) & 127);
      low[number] = static_cast<uint8_t>(bits & 255);
      high[number] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
static constexpr WholeNumbers WHOLE_NUMBERS;

// Converts bytes by table lookup, a panel at once, in a third of the instructions: sign and absolute value, up to 127,
// in the order in which low and high bytes are joined.
struct LookedUp : InPairs<int8_t> {
  static_assert(PANEL == 32, "a panel of two inputs is one vector");

  static int64_t place_of(int64_t output, int64_t input) {
    int64_t lane = output % LANES;
    return input / 2 * 2 * PANEL + lane / 4 * 16 + output / LANES * 8 + lane % 4 * 2 + input % 2;
  }
  static int8_t stored(int8_t weight) { return static_cast<int8_t>(weight < 0 ? -weight - 128 : weight); }

  QUIRE_INLINE void load_words(const int8_t* p, Word (&words)[VECTORS]) {
    const uint8_t *low = WHOLE_NUMBERS.low, *high = WHOLE_NUMBERS.high;
    __m512i bytes = _mm512_loadu_si512(p);
    __m512i lows = _mm512_permutex2var_epi8(_mm512_load_si512(low), bytes, _mm512_load_si512(low + 64));
    __m512i highs = _mm512_permutex2var_epi8(_mm512_load_si512(high), bytes, _mm512_load_si512(high + 64));
    highs = _mm512_ternarylogic_epi32(highs, bytes, _mm512_set1_epi8(-128), 0xf8);  // with the sign
    words[0] = (Word)_mm512_unpacklo_epi8(lows, highs);
    words[1] = (Word)_mm512_unpackhi_epi8(lows, highs);
  }
};
#endif
#endif

#if QUIRE_TILES
// The same places as InPairs, multiplied a tile at a time: 16 pairs of inputs of 16 outputs lie as a tile's rows do.
struct InTiles : InPairs<bf16> {
  static constexpr int STEP = TILE_INPUTS;
  static constexpr bool TILED = true;
};
#endif

// W: storage of weights; S: of rows.
template <class W, class S>
struct MultipliedAs {
  typedef OneByOne<W> Type;
};
#if QUIRE_PAIRS
template <class W>
struct MultipliedAs<W, bf16> {
  typedef InPairs<W> Type;
};
#if defined(__AVX512VBMI__)
template <>
struct MultipliedAs<int8_t, bf16> {
  typedef LookedUp Type;
};
#endif
#else
template <>
struct MultipliedAs<bf16, bf16> {
  typedef Parted Type;
};
#endif
template <class W, class S>
using Multiplied = typename MultipliedAs<W, S>::Type;

// function(how, bf16()) for weights and rows in bfloat16: by tiles where the processor and the system have them.
template <class F>
void with_halves(F&& function) {
#if QUIRE_TILES
  if (tiles_allowed()) return function(InTiles(), bf16());
#endif
  function(Multiplied<bf16, bf16>(), bf16());
}

// function(Multiplied<W, S>(), S()): weights in int8, or as rows are, in bfloat16 or float.
template <class F>
void with_types(bool half, bool int8, F&& function) {
  if (int8)
    half ? function(Multiplied<int8_t, bf16>(), bf16()) : function(Multiplied<int8_t, float>(), float());
  else
    half ? with_halves(function) : function(Multiplied<float, float>(), float());
}

}  // namespace quire
