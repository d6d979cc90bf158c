// Matrix tiles (Intel AMX): 16 rows of 64 bytes each, and one instruction that multiplies two of them in bfloat16.
// Knows no kernel. Where a compiler has no such instructions QUIRE_TILES is 0 and nothing else is here.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && QUIRE_PAIRS && QUIRE_LANES == 16
#define QUIRE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define QUIRE_TILES 0
#endif

namespace quire {

#if QUIRE_TILES

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_INPUTS = 32;  // bfloat16 in a row of a tile

// True if the kernel lets this process use tiles; asked once, for all threads.
inline bool tiles_allowed() {
  static const bool allowed = [] {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
  }();
  return allowed;
}

// Rows, and bytes of a row, of one tile; none of either: it is not used.
struct TileShape {
  int64_t rows = 0, row_bytes = 64;
};

// The shapes of this thread's tiles, from the first `load` on while it lives. Loading clears all tiles.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() {
    if (is_loaded_) _tile_release();
  }
  Tiles(const Tiles&) = delete;

  __attribute__((noinline)) void load(const TileShape (&tiles)[8]) {
    struct alignas(64) Shapes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      if (!tiles[tile].rows) continue;
      shapes.rows[tile] = static_cast<uint8_t>(tiles[tile].rows);
      shapes.row_bytes[tile] = static_cast<uint16_t>(tiles[tile].row_bytes);
    }
    asm volatile("" : : "m"(shapes));  // GCC 12 takes only the first bytes of what is loaded for read
    _tile_loadconfig(&shapes);
    is_loaded_ = true;
  }

 private:
  bool is_loaded_ = false;
};

// GCC 12 does not know that tiles are loaded from memory: what was stored before this is in memory.
QUIRE_INLINE void stored_for_tiles() { asm volatile("" : : : "memory"); }

#endif

}  // namespace quire
