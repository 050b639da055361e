// Threads that run one parallel loop at a time, and the scratch memory that belongs to them. No arithmetic here.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace asv {

using TaskFn = void (*)(void *context, int task, int worker);

// Run fn(context, task, worker) for every task in [0, tasks). The caller is worker 0. Tasks are claimed one by one, so
// a slow worker takes fewer. Loops estimated below kParallelWorthUs run on the caller alone.
void parallel_for(int tasks, double estimate_us, TaskFn fn, void *context);

// Scratch that lives until the next request for the same slot; 64-byte aligned. `worker` scratch is private to one
// worker, `shared` scratch is visible to all of them within an operation.
void *worker_scratch(int worker, int slot, size_t bytes);
void *shared_scratch(int slot, size_t bytes);

int pool_threads();
int pool_resize(int threads, bool pin);
void pool_stats(uint64_t out[3]);
// How long helpers look for the next loop before they park; 0: the default.
void pool_set_spin(double us);

constexpr double kParallelWorthUs = 30.0;
constexpr int kMaxThreads = 256;
constexpr int kScratchSlots = 8;

}  // namespace asv
