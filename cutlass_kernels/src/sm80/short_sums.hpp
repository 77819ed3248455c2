// SPDX-License-Identifier: Apache-2.0
//
// Short sums. A tensor core cuts its sum off instead of rounding it, so a long one drifts, by as much as the bound
// allows after some 250 products of one sign (docs/numerics.md). So a warp multiplies a few mainloop iterations into
// accumulators of their own, and fp32 instructions, which round, add these up.
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/array.h"

namespace convt3d::sm80 {

/// More additions of short sums than these carry the rounding of each into the next. Fewer stray by a third of ieee
/// mode's bound at most.
constexpr int kMostRoundedAdditions = 32;

/// A warp's accumulators as CUTLASS's mainloop hands them around. `kSteps`: calls of the operator in one iteration of
/// the mainloop; `kIterations`: iterations that make a short sum.
template <class Fragment, int kSteps, int kIterations>
struct ShortSums {
  Fragment total, part;
  int step, iteration;
  bool carry;

  CUTLASS_DEVICE void clear() { start(0, nullptr); }

  CUTLASS_DEVICE void start(int iterations, float4*) {
    total.clear();
    part.clear();
    step = iteration = 0;
    carry = iterations > kMostRoundedAdditions * kIterations;
  }

  /// After each call of the operator. The test comes after an iteration's first step, where the mainloop has a barrier:
  /// a branch anywhere else would keep the compiler from interleaving what stands before and after it. Steps are the
  /// same in every iteration, so the loop over them, unrolled, has one test.
  CUTLASS_DEVICE void advance() {
    bool const first = step == 0;
    step = step + 1 == kSteps ? 0 : step + 1;
    if (!first || ++iteration <= kIterations) return;
    iteration = 1;
    if (carry) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Fragment::kElements; ++i) {
        float const sum = total[i] + part[i];
        part[i] -= sum - total[i];
        total[i] = sum;
      }
    } else {
      finish();
      part.clear();
    }
  }

  CUTLASS_DEVICE Fragment& finish() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) total[i] += part[i];
    return total;
  }

  /// The mainloop names it for sums that it keeps short itself, and then never comes there.
  CUTLASS_DEVICE ShortSums& operator+=(ShortSums const&) { return *this; }
};

/// The sum so far in shared memory, for tiles whose accumulators fill the registers: its place for each of `kThreads`
/// threads. Without room for it nothing is ever set aside. `kKept` of a thread's numbers stay in registers, for want of
/// shared memory.
template <class Fragment, int kThreads, int kKept = 0>
struct Stash {
  static constexpr int kVectors = (Fragment::kElements - kKept) / 4;
  float4* place;
  float kept[kKept > 0 ? kKept : 1];
  int left;  // until something is set aside
  bool used;

  CUTLASS_DEVICE void start(float4* room, int first) {
    place = room + threadIdx.x;
    left = room == nullptr ? 0x7fffffff : first;
    used = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kKept; ++i) kept[i] = 0.f;
  }

  /// Moves `part` there, in every `period`-th call.
  CUTLASS_DEVICE void advance(Fragment& part, int period) {
    if (--left > 0) return;
    left = period;
    if (used) add_to(part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kKept; ++i) kept[i] += part[4 * kVectors + i];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      place[i * kThreads] = make_float4(part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
    }
    part.clear();
    used = true;
  }

  CUTLASS_DEVICE void finish(Fragment& part) {
    if (used) add_to(part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kKept; ++i) part[4 * kVectors + i] += kept[i];
  }

 private:
  CUTLASS_DEVICE void add_to(Fragment& part) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      float4 const sum = place[i * kThreads];
      part[4 * i] += sum.x;
      part[4 * i + 1] += sum.y;
      part[4 * i + 2] += sum.z;
      part[4 * i + 3] += sum.w;
    }
  }
};

/// Short sums with a stash.
template <class Fragment, int kSteps, int kIterations, int kThreads, int kKept = 0>
struct StashedSums {
  Fragment part;
  Stash<Fragment, kThreads, kKept> stash;
  int step;

  CUTLASS_DEVICE void clear() { start(0, nullptr); }

  CUTLASS_DEVICE void start(int, float4* room) {
    part.clear();
    stash.start(room, kIterations + 1);
    step = 0;
  }

  CUTLASS_DEVICE void advance() {
    bool const first = step == 0;
    step = step + 1 == kSteps ? 0 : step + 1;
    if (first) stash.advance(part, kIterations);
  }

  CUTLASS_DEVICE Fragment& finish() {
    stash.finish(part);
    return part;
  }

  CUTLASS_DEVICE StashedSums& operator+=(StashedSums const&) { return *this; }
};

template <class Sums>
constexpr bool kStashed = false;

template <class Fragment, int kSteps, int kIterations, int kThreads, int kKept>
constexpr bool kStashed<StashedSums<Fragment, kSteps, kIterations, kThreads, kKept>> = true;

/// For the mainloop's own short sums, of one iteration each, in three-product arithmetic: after kIterations of them
/// their sum goes to the stash, so that no number takes in thousands of them, each with a rounding.
template <class Fragment, int kIterations, int kThreads>
struct StagedSums {
  Fragment part;
  Stash<Fragment, kThreads> stash;

  CUTLASS_DEVICE void clear() { start(0, nullptr); }

  CUTLASS_DEVICE void start(int, float4* room) {
    part.clear();
    stash.start(room, kIterations);
  }

  CUTLASS_DEVICE void advance() {}

  CUTLASS_DEVICE StagedSums& operator+=(StagedSums const& other) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) part[i] += other.part[i];
    stash.advance(part, kIterations);
    return *this;
  }

  CUTLASS_DEVICE Fragment& finish() {
    stash.finish(part);
    return part;
  }
};

/// A warp-level product on such accumulators. `Math`: whether the mainloop keeps sums short by its own rule.
template <class WarpMma, class Sums, class Math>
struct ShortSumMma : WarpMma {
  using MathOperator = Math;
  using FragmentC = Sums;

  template <class FragmentA, class FragmentB>
  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const&) const {
    WarpMma::operator()(d.part, a, b, d.part);
    d.advance();
  }
};

/// Before and after a mainloop of so many iterations.
template <class Element, int kCount>
CUTLASS_DEVICE void start_sums(cutlass::Array<Element, kCount>& sums, int, float4*) {
  sums.clear();
}

template <class Sums>
CUTLASS_DEVICE void start_sums(Sums& sums, int iterations, float4* stash) {
  sums.start(iterations, stash);
}

template <class Element, int kCount>
CUTLASS_DEVICE auto& finish_sums(cutlass::Array<Element, kCount>& sums) {
  return sums;
}

template <class Sums>
CUTLASS_DEVICE auto& finish_sums(Sums& sums) {
  return sums.finish();
}

/// Gives sums `share` of themselves: the middle of what was cut off if all products had one sign. Sums of either sign
/// are small beside their products, and this beside their bound. Where eight bits at the end of all of a thread's sums
/// are zero nothing has been cut off: sums of whole numbers up to 2^16 stay what they are.
template <class Element, int kCount>
CUTLASS_DEVICE void center(cutlass::Array<Element, kCount>& sums, float share) {
  uint32_t bits = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) bits |= __float_as_uint(sums[i]);
  if ((bits & 0xffu) == 0) return;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) sums[i] = fmaf(sums[i], share, sums[i]);
}

}  // namespace convt3d::sm80
