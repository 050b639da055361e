// A pool that is fast on a free machine and harmless on a busy one.
//
// Workers spin for a bounded time, then park on a condition variable. Tasks are claimed with one atomic counter, so a worker
// that loses its core takes fewer. choice.h measures whether using helpers pays at all.
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "choice.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void cpu_relax() { _mm_pause(); }
#else
static inline void cpu_relax() { std::atomic_signal_fence(std::memory_order_seq_cst); }
#endif

namespace asv {
namespace {

constexpr double kSpinUs = 50.0;  // helpers look for the next loop this long before they park

double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

struct Buffer {
  void *data = nullptr;
  size_t bytes = 0;
  void *at_least(size_t want) {
    if (want > bytes) {
      free(data);
      size_t round = (want + want / 4 + 4095) & ~size_t(4095);
      data = aligned_alloc(4096, round);
      if (data == nullptr) throw std::bad_alloc();
      bytes = round;
    }
    return data;
  }
};

// Atomic only because a late helper may read it while the next loop is written; what it read is then thrown away.
struct alignas(64) Loop {
  std::atomic<TaskFn> fn{nullptr};
  std::atomic<void *> context{nullptr};
  std::atomic<int> tasks{0};
};

class Pool {
 public:
  int threads() const { return threads_; }

  int resize(int threads, bool pin) {
    if (threads < 1 || threads > kMaxThreads) return -1;
    stop();
    threads_ = 1;
    stopping_.store(false);
    for (int i = 1; i < threads; ++i) {
      try {
        helpers_.emplace_back([this, i] { work(i); });
      } catch (const std::exception &) {
        break;  // the system refuses more threads: run with those there are
      }
      threads_ = i + 1;
      if (pin) pin_helper(helpers_.back(), i);
    }
    return threads_ == threads ? 0 : -1;
  }

  ~Pool() { stop(); }

  void run(int tasks, double estimate_us, TaskFn fn, void *context) {
    if (tasks <= 0) return;
    bool alone = threads_ == 1 || tasks == 1 || estimate_us < kParallelWorthUs;
    if (alone) return run_alone(tasks, fn, context);
    double start = now_us();
    if (!choice_.parallel()) {
      ++alone_;
      run_alone(tasks, fn, context);
    } else {
      ++parallel_;
      run_parallel(tasks, fn, context);
    }
    choice_.record(fn, estimate_us, now_us() - start);
  }

  void set_spin(double us) { spin_us_.store(us > 0 ? us : kSpinUs); }

  void stats(uint64_t out[3]) const {
    out[0] = parallel_;
    out[1] = alone_;
    out[2] = uint64_t(waited_us_);
  }

 private:
  static void run_alone(int tasks, TaskFn fn, void *context) {
    for (int t = 0; t < tasks; ++t) fn(context, t, 0);
  }

  void run_parallel(int tasks, TaskFn fn, void *context) {
    loop_.fn.store(fn, std::memory_order_relaxed);
    loop_.context.store(context, std::memory_order_relaxed);
    loop_.tasks.store(tasks, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    // The counter carries the loop's epoch, so that a helper that wakes late cannot claim a task of the next loop
    // with this loop's function.
    uint32_t epoch = ++epoch_;
    claim_.store(uint64_t(epoch) << 32, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    int mine = claim_and_run(epoch, 0);
    done_.fetch_add(mine, std::memory_order_acq_rel);
    wait_for_helpers(tasks);
  }

  int claim_and_run(uint32_t epoch, int worker) {
    int ran = 0;
    uint64_t seen = claim_.load(std::memory_order_acquire);
    while (uint32_t(seen >> 32) == epoch) {
      // Read the loop before the claim: a successful claim of this epoch proves that it was this loop.
      TaskFn fn = loop_.fn.load(std::memory_order_relaxed);
      void *context = loop_.context.load(std::memory_order_relaxed);
      int tasks = loop_.tasks.load(std::memory_order_relaxed);
      int task = int(uint32_t(seen));
      if (task >= tasks) break;
      if (claim_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        fn(context, task, worker);
        ++ran;
        seen = claim_.load(std::memory_order_acquire);
      }
    }
    return ran;
  }

  void wait_for_helpers(int tasks) {
    if (done_.load(std::memory_order_acquire) >= tasks) return;
    double from = now_us();
    int spins = 0;
    while (done_.load(std::memory_order_acquire) < tasks) {
      cpu_relax();
      // A helper that lost its core may need ours: after a bounded spin, give it up.
      if (++spins >= 2000) {
        sched_yield();
        if (spins >= 4000) {
          timespec nap = {0, 50000};
          nanosleep(&nap, nullptr);
        }
      }
    }
    waited_us_ += now_us() - from;
  }

  void work(int worker) {
    uint32_t last = 0;
    for (;;) {
      uint32_t epoch = wait_for_loop(last);
      if (epoch == last) return;
      last = epoch;
      int ran = claim_and_run(epoch, worker);
      if (ran > 0) done_.fetch_add(ran, std::memory_order_acq_rel);
    }
  }

  // Returns the new epoch, or `last` when the pool stops.
  uint32_t wait_for_loop(uint32_t last) {
    double until = now_us() + spin_us_.load(std::memory_order_relaxed);
    for (;;) {
      for (int i = 0; i < 64; ++i) {
        uint32_t epoch = uint32_t(claim_.load(std::memory_order_acquire) >> 32);
        if (epoch != last) return epoch;
        if (stopping_.load(std::memory_order_relaxed)) return last;
        cpu_relax();
      }
      if (now_us() > until) break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    parked_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] {
      return stopping_.load() || uint32_t(claim_.load(std::memory_order_seq_cst) >> 32) != last;
    });
    parked_.fetch_sub(1, std::memory_order_seq_cst);
    return stopping_.load() ? last : uint32_t(claim_.load() >> 32);
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
      wake_.notify_all();
    }
    for (auto &thread : helpers_) thread.join();
    helpers_.clear();
  }

  static void pin_helper(std::thread &thread, int index) {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int count = CPU_COUNT(&allowed);
    if (index >= count) return;  // more threads than cores: let the scheduler place them
    // Helper i takes the i-th allowed core from the end; applications tend to start on the first.
    int skip = count - index;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      if (skip-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
      return;
    }
#else
    (void)thread;
    (void)index;
#endif
  }

  Loop loop_;
  alignas(64) std::atomic<uint64_t> claim_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<double> spin_us_{kSpinUs};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> helpers_;
  int threads_ = 1;
  uint32_t epoch_ = 0;
  ParallelChoice choice_;
  uint64_t parallel_ = 0, alone_ = 0;
  double waited_us_ = 0;
};

Pool &pool() {
  // Never destroyed: joining threads while the process unloads libraries can hang.
  static Pool *instance = new Pool;
  return *instance;
}

Buffer g_worker[kMaxThreads][kScratchSlots];
Buffer g_shared[kScratchSlots];

}  // namespace

void parallel_for(int tasks, double estimate_us, TaskFn fn, void *context) {
  pool().run(tasks, estimate_us, fn, context);
}
void *worker_scratch(int worker, int slot, size_t bytes) { return g_worker[worker][slot].at_least(bytes); }
void *shared_scratch(int slot, size_t bytes) { return g_shared[slot].at_least(bytes); }
int pool_threads() { return pool().threads(); }
int pool_resize(int threads, bool pin) { return pool().resize(threads, pin); }
void pool_stats(uint64_t out[3]) { pool().stats(out); }
void pool_set_spin(double us) { pool().set_spin(us); }

}  // namespace asv
