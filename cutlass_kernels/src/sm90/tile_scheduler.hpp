// SPDX-License-Identifier: Apache-2.0
//
// Hands out runs (a few tiles along D) of one class to its CTAs, dynamically: CTAs that meet faster memory take
// more. The load thread fetches and publishes run numbers in a small ring; every other role reads them there.
#pragma once

#include "cutlass/arch/barrier.h"
#include "sm90/params.hpp"

namespace convt3d::sm90 {

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

/// Position in a ring of `size` slots, with the parity of the barrier phase.
struct RingState {
  int slot = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance(int step, int size) {
    slot += step;
    if (slot >= size) {
      slot -= size;
      phase ^= 1;
    }
  }
};

/// Position in the ring of units, whose users are not in step: how often the ring was passed. A barrier's parity
/// cannot tell a phase from the one two before it, so each slot has several barriers, used in turn.
struct UnitState {
  int slot = 0;
  int lap = 0;

  CUTLASS_DEVICE void advance(int step, int size) {  // at most once around
    slot += step;
    if (slot >= size) {
      slot -= size;
      ++lap;
    }
  }
};

struct TileScheduler {
  using Params = SchedulerParams;

  struct SharedStorage {
    TransactionBarrier full[kScheduleSlots];
    Barrier empty[kScheduleSlots];
    int32_t run[kScheduleSlots];
    int32_t first_claim;  // the first run of the class that no CTA starts with; for the load thread
  };

  static constexpr int kReaders = kGroups * 4 + kLoaderWarps;  // warps
  static constexpr int kEnd = -1;

  /// First tile of a run, in tile coordinates, and the number of its tiles.
  struct Run {
    int n, d, h, w, length;
  };

  CUTLASS_DEVICE static void init(SharedStorage& shared, int readers = kReaders) {
    for (int i = 0; i < kScheduleSlots; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(readers);
    }
  }

  CUTLASS_DEVICE static Run decode(Params const& params, int run) {
    Run r;
    int rest, hh, ww, dd;
    params.divide_tiles_h(rest, hh, run);
    params.divide_tiles_w(rest, ww, rest);
    params.divide_runs_d(rest, dd, rest);
    r.n = rest;
    r.d = dd * params.run_length;
    r.h = hh;
    r.w = ww;
    r.length = min(params.run_length, params.pairs_d - r.d);
    return r;
  }

  /// The load thread's side. The next run is claimed when one starts and published a little later, when the claim
  /// has come back: early enough for x of the next run to be fetched during this one, and no earlier, because
  /// tiles that are worked on at one time should lie close together in memory.
  struct Producer {
    Params const& params;
    SharedStorage& shared;

    CUTLASS_DEVICE Producer(Params const& params_, SharedStorage& shared_, int cta, int ctas)
        : params(params_), shared(shared_), cls_(cta % params_.classes), next_(cta / params_.classes) {
      shared.first_claim = (ctas - cls_ + params.classes - 1) / params.classes;
      publish();
    }

    /// Starts the published run (or kEnd) and claims the one after it.
    CUTLASS_DEVICE int start() {
      if (published_ != kEnd) next_ = shared.first_claim + atomicAdd(params.counters + cls_, 1);
      return published_;
    }

    /// To be called once after each start() that did not return kEnd.
    CUTLASS_DEVICE void publish() {
      published_ = next_ < params.runs ? next_ : kEnd;
      if (published_ != kEnd) params.owners[static_cast<int64_t>(cls_) * params.runs + published_] = 1 + blockIdx.x;
      shared.empty[state_.slot].wait(state_.phase ^ 1);
      shared.run[state_.slot] = published_;
      shared.full[state_.slot].arrive();
      state_.advance(1, kScheduleSlots);
    }

   private:
    int cls_, next_, published_;
    RingState state_;
  };

  /// A reading warp's side.
  struct Consumer {
    SharedStorage& shared;
    RingState state;

    /// Whether fetch() would return at once; the same answer for the whole warp.
    CUTLASS_DEVICE bool available() {
      return __all_sync(0xffffffffu, shared.full[state.slot].test_wait(state.phase)) != 0;
    }

    CUTLASS_DEVICE int fetch() {
      shared.full[state.slot].wait(state.phase);
      int const run = *static_cast<int32_t volatile*>(&shared.run[state.slot]);
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) shared.empty[state.slot].arrive();
      state.advance(1, kScheduleSlots);
      return run;
    }
  };
};

}  // namespace convt3d::sm90
