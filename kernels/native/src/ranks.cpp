// Sums and joins of rows over the ranks of a tensor-parallel group, processes of one machine that share memory.
//
// Each rank has two slots, used in turn. It writes its rows to a slot, says so by the number of a round, and reads the
// others' slots. A rank that has written for the next exchange has read all of this one, so a slot is free again two
// exchanges later. Of many rows each of several ranks adds a part, and a second round hands the sums on. Sums are in
// float32 in the order of the ranks, so all ranks have the same bits. A rank that does not come in time fails the group.
//
// Knows rows and slots, no layers.

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace quire {

namespace {

typedef std::chrono::steady_clock Clock;

constexpr int MAX_RANKS = 64;
constexpr int64_t MIN_PARALLEL = 1 << 15;  // elements, below which a second thread costs more than it saves
constexpr int64_t MIN_DIVIDED = 1 << 16;  // elements, below which a second round costs more than adding all
constexpr int64_t SLEEP_NS = 100 * 1000 * 1000;  // most between two looks at the deadline

struct alignas(64) RankState {
  std::atomic<uint32_t> round;     // the last that the rank has come to
  std::atomic<uint32_t> sleepers;  // ranks that may sleep until `round` changes
  std::atomic<int32_t> cpu;        // where the rank was when it last wrote
};

// At the begin of the shared memory, which is zero at first.
struct Header {
  alignas(64) std::atomic<uint32_t> failed;
  RankState ranks[MAX_RANKS];
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// One rank's view of its group.
class Ranks {
 public:
  Ranks(char* memory, int rank, int size, int64_t slot_bytes, int64_t timeout_ms, int64_t spin_us)
      : header_(reinterpret_cast<Header*>(memory)),
        slots_(memory + sizeof(Header)),
        rank_(rank),
        size_(size),
        slot_bytes_(slot_bytes),
        timeout_(std::chrono::milliseconds(timeout_ms)),
        spins_(std::chrono::microseconds(spin_us)) {}

  bool failed() const { return header_->failed.load(std::memory_order_relaxed); }
  void fail() { header_->failed.store(1, std::memory_order_relaxed); }
  int64_t nanoseconds() const { return nanoseconds_; }
  int64_t waited_nanoseconds() const { return waited_; }

  // x = sum of all ranks' x. x: [num_rows, op.num_outputs]
  template <class S>
  void sum(const Operation& op, int64_t num_rows, int num_threads) {
    int64_t size = op.num_outputs, most = slot_bytes_ / (size * sizeof(S));
    for (int64_t first = 0; first < num_rows; first += most) {
      int64_t count = num_rows - first < most ? num_rows - first : most;
      S* x = static_cast<S*>(op.x) + first * op.x_stride;
      if (!begin_exchange()) return;
      write(x, op.x_stride, count, size, num_threads);
      if (!end_round(true)) return;
      const S* parts[MAX_RANKS];
      for (int rank = 0; rank < size_; ++rank) parts[rank] = slot<S>(rank);
      bool is_divided = size_ > 2 && count * size > MIN_DIVIDED;
      Rows own = is_divided ? rows_of(rank_, count) : Rows{0, count};
      share_rows(num_threads, own.end - own.begin, (own.end - own.begin) * size > MIN_PARALLEL,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = own.begin + begin; row < own.begin + end; ++row)
                     add_row(parts, row * size, x + row * op.x_stride, size);
                 });
      if (is_divided && !hand_on(x, op.x_stride, count, size, num_threads)) return;
    }
  }

  // Columns of all ranks side by side, each with an equal part of `total`, the last ones with less. op.choice: all ranks
  // get them, else rank 0 alone. x: [num_rows, op.num_inputs]; out: [num_rows, op.num_outputs], may contain x
  template <class S>
  void join(const Operation& op, int64_t num_rows, int num_threads) {
    int64_t total = op.num_outputs, part = (total + size_ - 1) / size_;
    int64_t most = slot_bytes_ / (part * sizeof(S));
    bool reads = op.choice || rank_ == 0, writes = op.choice || rank_ != 0;
    for (int64_t first = 0; first < num_rows; first += most) {
      int64_t count = num_rows - first < most ? num_rows - first : most;
      const S* x = static_cast<const S*>(op.x) + first * op.x_stride;
      if (!begin_exchange()) return;
      if (writes) write(x, op.x_stride, count, op.num_inputs, num_threads);
      if (!end_round(reads)) return;
      if (!reads) continue;
      S* out = static_cast<S*>(op.out) + first * op.out_stride;
      share_rows(num_threads, count, count * total > MIN_PARALLEL, [&](int64_t begin, int64_t end) {
        for (int rank = 0; rank < size_; ++rank) {
          int64_t column = rank * part, width = total - column < part ? total - column : part;
          if (width <= 0) break;
          const S* from = rank == rank_ ? x : slot<S>(rank);
          int64_t stride = rank == rank_ ? op.x_stride : width;
          if (from == out + column) continue;
          for (int64_t row = begin; row < end; ++row)
            std::memcpy(out + row * op.out_stride + column, from + row * stride, width * sizeof(S));
        }
      });
    }
  }

  // Adds the time of a call.
  class Timer {
   public:
    explicit Timer(Ranks& ranks) : ranks_(ranks), began_(Clock::now()) {}
    ~Timer() { ranks_.nanoseconds_ += std::chrono::nanoseconds(Clock::now() - began_).count(); }

   private:
    Ranks& ranks_;
    Clock::time_point began_;
  };

 private:
  template <class S>
  S* slot(int rank) {
    return reinterpret_cast<S*>(slots_ + ((exchange_ & 1) * size_ + rank) * slot_bytes_);
  }

  // Waits until all have read what this rank's slot held: they have, once they have come to the exchange before.
  bool begin_exchange() {
    if (!wait_for_all(round_)) return false;
    ++exchange_;
    return true;
  }

  struct Rows {
    int64_t begin, end;
  };

  Rows rows_of(int rank, int64_t count) const { return {count * rank / size_, count * (rank + 1) / size_}; }

  // Gives the others this rank's part of the sums, and takes theirs. Only this rank reads its part of its own slot.
  template <class S>
  bool hand_on(S* x, int64_t stride, int64_t count, int64_t size, int num_threads) {
    Rows own = rows_of(rank_, count);
    copy(x + own.begin * stride, stride, slot<S>(rank_) + own.begin * size, size, own.end - own.begin, size,
         num_threads);
    if (!end_round(true)) return false;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      Rows rows = rows_of(rank, count);
      copy(slot<S>(rank) + rows.begin * size, size, x + rows.begin * stride, stride, rows.end - rows.begin, size,
           num_threads);
    }
    return true;
  }

  template <class S>
  void write(const S* x, int64_t stride, int64_t count, int64_t size, int num_threads) {
    copy(x, stride, slot<S>(rank_), size, count, size, num_threads);
  }

  template <class S>
  static void copy(const S* from, int64_t from_stride, S* to, int64_t to_stride, int64_t count, int64_t size,
                   int num_threads) {
    share_rows(num_threads, count, count * size > MIN_PARALLEL, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        std::memcpy(to + row * to_stride, from + row * from_stride, size * sizeof(S));
    });
  }

  // Says that this rank has come to the next round.
  bool end_round(bool waits) {
    ++round_;
    RankState& own = header_->ranks[rank_];
    own.cpu.store(sched_getcpu(), std::memory_order_relaxed);
    own.round.store(round_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst))
      syscall(SYS_futex, &own.round, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return !waits || wait_for_all(round_);
  }

  bool wait_for_all(uint32_t round) {
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_ && !has_come(rank, round) && !wait_for(header_->ranks[rank], rank, round)) return false;
    return !failed();
  }

  bool has_come(int rank, uint32_t round) const {
    return static_cast<int32_t>(header_->ranks[rank].round.load(std::memory_order_acquire) - round) >= 0;
  }

  bool wait_for(RankState& other, int rank, uint32_t round) {
    Clock::time_point began = Clock::now(), now = began;
    // A rank that was last seen on this core cannot come while this one spins.
    bool is_here = other.cpu.load(std::memory_order_relaxed) == sched_getcpu();
    Clock::duration spins = is_here ? Clock::duration::zero() : spins_;
    do {
      for (int turn = 0; turn < 32; ++turn) {
        if (has_come(rank, round)) return waited_since(began);
        relax();
      }
      now = Clock::now();
    } while (now - began < spins);
    AwayFromOthers away(*this);
    for (; now - began < timeout_; now = Clock::now()) {
      other.sleepers.fetch_add(1, std::memory_order_seq_cst);
      uint32_t seen = other.round.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(seen - round) < 0) {
        timespec limit = {0, SLEEP_NS};
        syscall(SYS_futex, &other.round, FUTEX_WAIT, seen, &limit, nullptr, 0);
      }
      other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (has_come(rank, round)) return waited_since(began);
      if (failed()) return false;
    }
    fail();
    return false;
  }

  // A sleeper is often woken on the core of the rank that wakes it, and both then compute in turn there. So while this
  // lives the thread may run only where no other rank was last seen, if ranks do not share cores anyway.
  class AwayFromOthers {
   public:
    explicit AwayFromOthers(const Ranks& ranks) {
      if (ranks.spins_ == Clock::duration::zero() || sched_getaffinity(0, sizeof(own_), &own_)) return;
      cpu_set_t others = own_;
      for (int rank = 0; rank < ranks.size_; ++rank) {
        int cpu = ranks.header_->ranks[rank].cpu.load(std::memory_order_relaxed);
        if (rank != ranks.rank_ && cpu >= 0 && cpu < CPU_SETSIZE) CPU_CLR(cpu, &others);
      }
      has_left_ = CPU_COUNT(&others) && sched_setaffinity(0, sizeof(others), &others) == 0;
    }
    ~AwayFromOthers() {
      if (has_left_) sched_setaffinity(0, sizeof(own_), &own_);
    }
    AwayFromOthers(const AwayFromOthers&) = delete;

   private:
    cpu_set_t own_;
    bool has_left_ = false;
  };

  bool waited_since(Clock::time_point began) {
    waited_ += std::chrono::nanoseconds(Clock::now() - began).count();
    return true;
  }

  template <class S>
  void add_row(const S* const* parts, int64_t offset, S* out, int64_t size) const {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      vfloat sum = load_floats(parts[0] + offset + i);
      for (int rank = 1; rank < size_; ++rank) sum += load_floats(parts[rank] + offset + i);
      store_floats(out + i, sum);
    }
    if (i == size) return;
    S rest[LANES] = {};
    vfloat sum = {};
    for (int rank = 0; rank < size_; ++rank) {
      std::memcpy(rest, parts[rank] + offset + i, (size - i) * sizeof(S));
      sum += load_floats(rest);
    }
    store_floats(rest, sum);
    std::memcpy(out + i, rest, (size - i) * sizeof(S));
  }

  Header* header_;
  char* slots_;
  int rank_, size_;
  int64_t slot_bytes_;
  Clock::duration timeout_, spins_;
  uint32_t round_ = 0;     // the last that this rank has come to
  uint32_t exchange_ = 0;  // number of exchanges so far
  int64_t nanoseconds_ = 0, waited_ = 0;  // in all calls; waiting for other ranks
};

// first: Ranks
void run_sum(const Operation& op, int64_t num_rows, int num_threads) {
  Ranks& ranks = *static_cast<Ranks*>(op.first);
  Ranks::Timer timer(ranks);
  with_storage(op.half, [&](auto zero) { ranks.sum<decltype(zero)>(op, num_rows, num_threads); });
}

// first: Ranks
void run_join(const Operation& op, int64_t num_rows, int num_threads) {
  Ranks& ranks = *static_cast<Ranks*>(op.first);
  Ranks::Timer timer(ranks);
  with_storage(op.half, [&](auto zero) { ranks.join<decltype(zero)>(op, num_rows, num_threads); });
}

}  // namespace quire

// Bytes of shared memory for `size` ranks with slots of `slot_bytes`, a multiple of 64.
extern "C" int64_t quire_ranks_bytes(int size, int64_t slot_bytes) {
  return static_cast<int64_t>(sizeof(quire::Header)) + 2 * size * slot_bytes;
}

extern "C" quire::Ranks* quire_ranks_new(void* memory, int rank, int size, int64_t slot_bytes, int64_t timeout_ms,
                                         int64_t spin_us) {
  return new quire::Ranks(static_cast<char*>(memory), rank, size, slot_bytes, timeout_ms, spin_us);
}

extern "C" void quire_ranks_delete(quire::Ranks* ranks) { delete ranks; }

extern "C" int quire_ranks_failed(const quire::Ranks* ranks) { return ranks->failed(); }

// Ends all waits of all ranks, for good.
extern "C" void quire_ranks_fail(quire::Ranks* ranks) { ranks->fail(); }

extern "C" int64_t quire_ranks_nanoseconds(const quire::Ranks* ranks) { return ranks->nanoseconds(); }

extern "C" int64_t quire_ranks_waited_nanoseconds(const quire::Ranks* ranks) { return ranks->waited_nanoseconds(); }
