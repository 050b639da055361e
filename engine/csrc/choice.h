// Decides from measured times whether loops run on all threads or on the caller alone. Owns no threads.
//
// Whether helpers pay depends on what else the machine runs, and only a measurement tells: with busy cores a helper waits
// for a time slice while the caller waits for it, and its spinning takes processor time from the caller. So the time of
// every loop, relative to its estimate and by kind of loop, is kept for both modes. Helpers are used where they save a tenth
// or more; the other mode is tried for one short window in 8 while the two are close, in 16 or 64 while they are not: at
// three times the cost one window in 16 would lose an eighth of the time.
#pragma once
#include "pool.h"

namespace asv {

class ParallelChoice {
 public:
  bool parallel() const { return mode_ == kParallel; }

  void record(TaskFn kind, double estimate_us, double wall_us) {
    Entry &entry = find(kind);
    entry.estimate += estimate_us;
    entry.wall += wall_us;
    window_us_ += wall_us;
    ++loops_;
    if ((loops_ >= kMinLoops && window_us_ >= kWindowUs) || loops_ >= kMaxLoops) end_window();
  }

 private:
  enum Mode { kAlone = 0, kParallel = 1 };
  static constexpr int kKinds = 64, kMinLoops = 4, kMaxLoops = 256;
  static constexpr double kWindowUs = 20000;
  static constexpr int kTryClose = 8, kTryParallel = 16, kTrySeldom = 64;
  static constexpr double kWorth = 0.9, kClear = 0.85;  // parallel time over alone time
  static constexpr double kBad = 1.4;                       // from here helpers are tried as seldom as the caller alone
  static constexpr double kNewest = 0.3, kFaster = 0.6;     // weight of the newest window: none is fast by accident

  struct Entry {
    TaskFn kind = nullptr;
    double estimate = 0, wall = 0;  // in this window
    double cost[2] = {0, 0};        // wall per estimate, 0: never measured
  };

  Entry &find(TaskFn kind) {
    size_t at = (reinterpret_cast<size_t>(kind) >> 4) % kKinds;
    for (int i = 0; i < kKinds; ++i, at = (at + 1) % kKinds)
      if (entries_[at].kind == kind || entries_[at].kind == nullptr) break;
    if (entries_[at].kind != kind) entries_[at] = Entry{kind};
    return entries_[at];
  }

  void end_window() {
    double total[2] = {0, 0};
    bool other_unknown = false;
    for (Entry &entry : entries_) {
      if (entry.estimate <= 0) continue;
      double now = entry.wall / entry.estimate, &cost = entry.cost[mode_];
      // One long interruption must not decide for seconds: a window counts for at most half more than expected.
      if (cost > 0 && now > 1.5 * cost) now = 1.5 * cost;
      cost = cost == 0 ? now : cost + (now < cost ? kFaster : kNewest) * (now - cost);
      if (entry.cost[1 - mode_] == 0)
        other_unknown = true;
      else
        for (int m = 0; m < 2; ++m) total[m] += entry.estimate * entry.cost[m];
      entry.estimate = entry.wall = 0;
    }
    window_us_ = 0;
    loops_ = 0;
    ++windows_;
    if (total[kAlone] > 0) {
      double ratio = total[kParallel] / total[kAlone];
      best_ = ratio < kWorth ? kParallel : kAlone;
      bool clear = ratio < kClear || ratio > kBad;
      try_every_ = clear ? kTrySeldom : ratio < 1 / kClear ? kTryClose : kTryParallel;
    }
    bool tried = mode_ != best_;
    if (other_unknown && !tried) {
      mode_ = mode_ == kAlone ? kParallel : kAlone;
    } else {
      bool try_other = !tried && windows_ % try_every_ == 0;
      mode_ = try_other ? (best_ == kAlone ? kParallel : kAlone) : best_;
    }
  }

  Entry entries_[kKinds];
  double window_us_ = 0;
  int loops_ = 0, windows_ = 0, try_every_ = kTryClose;
  Mode mode_ = kParallel, best_ = kParallel;
};

}  // namespace asv
