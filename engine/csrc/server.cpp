// The thread that answers a GPU's requests for experts: polls the mailbox, computes, replies. See handoff.h for the protocol.
//
// It never calls the GPU's driver and knows no tensors. Between turns it parks; a request that comes while it is parked and
// that nobody announced with asv_serve_wake is still found, at the next look, half a millisecond later at most.
#include "handoff.h"

#include <string.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::atomic_signal_fence(std::memory_order_seq_cst); }
#endif

namespace {

// Layers that need the CPU are 50 to 500 us apart while a step runs, but where most experts are resident a whole step of 2 to
// 5 ms may need it once or twice. Helpers that had parked kept the first layer waiting for about 300 us.
constexpr double kHelperSpinUs = 5000.0;
constexpr auto kParkedLook = std::chrono::microseconds(500);
constexpr auto kStopPatience = std::chrono::seconds(2);
enum Fault { kNone = 0, kExit = 1, kHang = 2, kFail = 3 };

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}

}  // namespace

struct asv_server {
  asv_serve_config c;
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  bool woken = false, ended = false;
  std::atomic<bool> stopping{false}, alive{true}, parked{false};
  std::atomic<int32_t> fault_kind{kNone}, fault_epoch{0};
  std::atomic<uint64_t> served{0}, busy_ns{0}, seen_ns{now_ns()}, parks{0}, bytes{0};
  int32_t last = 0;

  int32_t *field(int offset) const { return reinterpret_cast<int32_t *>(c.box + offset); }
  int32_t epoch() const { return __atomic_load_n(field(ASV_BOX_REQUEST_EPOCH), __ATOMIC_ACQUIRE); }

  void run() {
    while (!stopping.load(std::memory_order_relaxed)) {
      int32_t wanted = look();
      if (wanted == last) continue;
      last = wanted;
      if (!injected(wanted)) break;
      uint64_t from = now_ns();
      int32_t status = compute();
      uint64_t took = now_ns() - from;
      if (fault_kind.load() == kFail && fault_epoch.load() == wanted) status = 1;
      served.fetch_add(1);
      busy_ns.fetch_add(took);
      seen_ns.store(now_ns());
      *field(ASV_BOX_REPLY_STATUS) = status;
      memcpy(c.box + ASV_BOX_REPLY_BUSY_NS, &took, sizeof took);
      __atomic_store_n(field(ASV_BOX_REPLY_EPOCH), wanted, __ATOMIC_RELEASE);
    }
    alive.store(false);
    std::lock_guard<std::mutex> lock(mutex);
    ended = true;
    changed.notify_all();
  }

  // A new epoch, or the last one after a park.
  int32_t look() {
    uint64_t until = now_ns() + uint64_t(c.spin_us) * 1000;
    do {
      for (int i = 0; i < 256; ++i) {
        int32_t now = epoch();
        if (now != last) return now;
        relax();
      }
      seen_ns.store(now_ns(), std::memory_order_relaxed);
    } while (now_ns() < until && !stopping.load(std::memory_order_relaxed));
    std::unique_lock<std::mutex> lock(mutex);
    parked.store(true);
    parks.fetch_add(1);
    changed.wait_for(lock, kParkedLook, [&] { return woken || stopping.load(); });
    woken = false;
    parked.store(false);
    return epoch();
  }

  // False: the thread ends here.
  bool injected(int32_t wanted) {
    if (fault_epoch.load() != wanted) return true;
    if (fault_kind.load() == kExit) return false;
    if (fault_kind.load() == kHang) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return stopping.load(); });
      return false;
    }
    return true;
  }

  int32_t compute() {
    int32_t layer = *field(ASV_BOX_REQUEST_LAYER), tokens = *field(ASV_BOX_REQUEST_TOKENS);
    int32_t taken = *field(ASV_BOX_REQUEST_TAKEN), rows = c.inter - taken;
    if (layer < 0 || layer >= c.layers || tokens < 0 || tokens > c.max_tokens || taken < 0 || rows < 1) return 2;
    const uint8_t *bank = c.bank + size_t(layer) * size_t(c.experts) * c.record_bytes;
    size_t item = c.bf16 ? 2 : 4, matrix = size_t(c.hidden) * size_t(c.inter) * item;
    asv_op op;
    memset(&op, 0, sizeof op);
    op.code = ASV_OP_EXPERTS;
    op.flags = c.bf16 ? 3 : 0;
    op.p[0] = c.x;
    op.p[1] = c.ids;
    op.p[2] = c.weights;
    op.p[3] = bank;
    op.p[4] = bank + 2 * matrix;
    op.p[5] = c.out;
    int32_t stride = int32_t(c.record_bytes / item);
    const int32_t n[] = {tokens, c.hidden, rows, c.top_k, c.experts, c.hidden, c.hidden, 0, stride, stride, c.inter};
    memcpy(op.n, n, sizeof n);
    count_bytes(tokens, 3 * size_t(c.hidden) * size_t(rows) * item);
    return asv_run(&op, 1, tokens, 1, 1) == 0 ? 0 : 3;
  }

  void count_bytes(int32_t tokens, size_t each) {
    uint64_t seen[64] = {};  // experts up to 4096
    uint64_t distinct = 0;
    for (int32_t i = 0; i < tokens * c.top_k; ++i) {
      int32_t e = c.ids[i];
      if (e < 0 || e >= c.experts || e >= 4096) continue;
      uint64_t bit = uint64_t(1) << (e & 63);
      if (!(seen[e >> 6] & bit)) ++distinct;
      seen[e >> 6] |= bit;
    }
    bytes.fetch_add(distinct * each);
  }
};

extern "C" {

asv_server *asv_serve_start(const asv_serve_config *config) {
  try {
    asv_server *server = new asv_server;
    server->c = *config;
    server->last = server->epoch();  // here: a request may come before the thread runs
    asv::pool_set_spin(kHelperSpinUs);
    try {
      server->thread = std::thread([server] { server->run(); });
    } catch (const std::exception &) {
      delete server;
      return nullptr;
    }
    return server;
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void asv_serve_wake(asv_server *server) {
  if (!server->parked.load()) return;
  std::lock_guard<std::mutex> lock(server->mutex);
  server->woken = true;
  server->changed.notify_all();
}

void asv_serve_state(asv_server *server, uint64_t out[6]) {
  out[0] = server->alive.load();
  out[1] = server->served.load();
  out[2] = server->busy_ns.load();
  uint64_t now = now_ns(), seen = server->seen_ns.load();
  out[3] = now > seen ? (now - seen) / 1000 : 0;
  out[4] = server->parks.load();
  out[5] = server->bytes.load();
}

void asv_serve_fault(asv_server *server, int32_t kind, int32_t epoch) {
  server->fault_kind.store(kind);
  server->fault_epoch.store(epoch);
}

int asv_serve_stop(asv_server *server) {
  {
    std::unique_lock<std::mutex> lock(server->mutex);
    server->stopping.store(true);
    server->changed.notify_all();
    if (!server->changed.wait_for(lock, kStopPatience, [&] { return server->ended; })) {
      server->thread.detach();
      return -1;
    }
  }
  server->thread.join();
  asv::pool_set_spin(0);
  delete server;
  return 0;
}

int asv_serve_config_bytes(void) { return int(sizeof(asv_serve_config)); }
}
