// The threads behind `share_units`. A thread takes a unit by incrementing a ticket that holds the number of the current
// work, so a late thread finds no unit. A waiting thread spins briefly and then sleeps: that frees its core, also for
// a thread that lost its own core and is waited for.
//
// Knows units, no kernel.

#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace quire {

namespace {

constexpr int MAX_THREADS = 256;
// As long as the gap between two shared kernels of a pass, but shorter than the gap between passes.
constexpr std::chrono::microseconds HELPER_SPINS(50);
// As long as the units of two threads differ. After that a thread has most likely lost its core.
constexpr std::chrono::microseconds CALLER_SPINS(30);
constexpr int TURNS = 32;  // of spinning between two looks at the clock

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr, nullptr, 0);
}

// True if the condition held before the time was over.
template <class F>
bool spin_until(F holds, std::chrono::microseconds limit) {
  auto until = std::chrono::steady_clock::now() + limit;
  do
    for (int turn = 0; turn < TURNS; ++turn) {
      if (holds()) return true;
      relax();
    }
  while (std::chrono::steady_clock::now() < until);
  return holds();
}

// Where this thread may run.
class Affinity {
 public:
  Affinity() { known_ = sched_getaffinity(0, sizeof(own_), &own_) == 0 && CPU_COUNT(&own_) > 1; }

  // Moves it at once if it is there.
  void leave(int cpu) {
    if (!known_ || cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t others = own_;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof(others), &others);
  }

  void restore() {
    if (known_) sched_setaffinity(0, sizeof(own_), &own_);
  }

 private:
  cpu_set_t own_;
  bool known_;
};

// Never destroyed: threads sleep in it until the process ends.
class Team {
 public:
  void share(int num_threads, int64_t count, UnitFunction function, void* context) {
    std::unique_lock<std::mutex> lock(caller_, std::try_to_lock);
    if (num_threads <= 1 || !lock.owns_lock() || count >= ASLEEP) {
      for (int64_t unit = 0; unit < count; ++unit) function(context, unit, 0);
      return;
    }
    num_threads = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    while (num_helpers_ < num_threads - 1) start_helper();
    uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    // Closed while the work is written: a thread that read part of it with an older ticket takes no unit.
    ticket_.store(ticket_of(number, UINT32_MAX), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    num_threads_.store(num_threads, std::memory_order_relaxed);
    unfinished_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    ticket_.store(ticket_of(number, 0), std::memory_order_release);
    number_.store(number, std::memory_order_seq_cst);
    caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
    if (num_asleep_.load(std::memory_order_seq_cst) && num_asleep_.exchange(0, std::memory_order_seq_cst)) wake(number_);
    take_units(number, 0);
    auto all_done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (spin_until(all_done, CALLER_SPINS)) return;
    for (uint32_t left; (left = unfinished_.load(std::memory_order_acquire)) & ~ASLEEP;)
      if (left & ASLEEP || unfinished_.compare_exchange_weak(left, left | ASLEEP, std::memory_order_acq_rel))
        sleep_while(unfinished_, left | ASLEEP);
  }

 private:
  static constexpr uint32_t ASLEEP = 1u << 31;  // in unfinished_: the caller sleeps

  static uint64_t ticket_of(uint32_t number, uint32_t unit) { return static_cast<uint64_t>(number) << 32 | unit; }

  void start_helper() {
    int thread = ++num_helpers_;
    std::thread([this, thread] { help(thread); }).detach();
  }

  void help(int thread) {
    for (uint32_t seen = 0;;) {
      auto is_new = [&] { return number_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(is_new, HELPER_SPINS)) sleep_until_new(seen);
      seen = number_.load(std::memory_order_acquire);
      take_units(seen, thread);
    }
  }

  // A thread is often woken on its caller's core and then delays the caller: so before it sleeps it excludes that core
  // from its affinity.
  void sleep_until_new(uint32_t seen) {
    Affinity own;
    own.leave(caller_cpu_.load(std::memory_order_relaxed));
    do {
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      if (number_.load(std::memory_order_seq_cst) == seen) sleep_while(number_, seen);
    } while (number_.load(std::memory_order_acquire) == seen);
    int caller_cpu = caller_cpu_.load(std::memory_order_relaxed);
    if (sched_getcpu() == caller_cpu) own.leave(caller_cpu);  // the caller has moved here meanwhile
    own.restore();
  }

  // A thread that took a unit has read the matching work: the work changes only once all its units are done.
  void take_units(uint32_t number, int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == number) {
      UnitFunction function = function_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      uint32_t unit = static_cast<uint32_t>(ticket);
      if (unit >= count_.load(std::memory_order_relaxed) || thread >= num_threads_.load(std::memory_order_relaxed))
        return;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      function(context, unit, thread);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == (ASLEEP | 1)) wake(unfinished_);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  std::mutex caller_;
  int num_helpers_ = 0;  // of the caller
  alignas(64) std::atomic<uint64_t> ticket_{0};  // number of the work, and its next unit
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> number_{0};
  std::atomic<uint32_t> num_asleep_{0};  // since the last wake-up, at least
  std::atomic<int> caller_cpu_{-1};
  std::atomic<UnitFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> count_{0};
  std::atomic<int> num_threads_{0};
};

}  // namespace

static thread_local int limit = MAX_THREADS;

ThreadLimit::ThreadLimit(int num_threads) : before_(limit) { limit = num_threads; }
ThreadLimit::~ThreadLimit() { limit = before_; }

void share_units(int num_threads, int64_t count, UnitFunction function, void* context) {
  static Team* team = new Team();
  if (num_threads > limit) num_threads = limit;
  team->share(num_threads, count, function, context);
}

}  // namespace quire
