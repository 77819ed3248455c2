// SPDX-License-Identifier: Apache-2.0
//
// fp32 in ieee mode, at the start of the main kernel: the scales, and whether this family computes the problem. Every
// CTA comes to the same answer from what the pre-kernel found (split_prepare.cu). CTA 0 leaves the answer in memory for
// the sm80 family's launches, which are enqueued behind this kernel and return at once where it is no.
#pragma once

#include "sm90/params.hpp"
#include "sm90/split.hpp"

namespace convt3d::sm90 {

struct SplitRoute {
  struct SharedStorage {
    uint32_t largest;      // finite magnitude of x
    int32_t small;         // regions of the sample
    int32_t tiny_weights;  // of all classes
  };

  /// The exponents of x and of the class's weights, and below what a sum may be spoilt by tiny weights.
  struct Scales {
    int x, weights;
    float floor;

    CUTLASS_DEVICE float x_factor() const { return __uint_as_float(power_of_two_bits(x)); }
    /// The inverse of both scales, in two factors of the same sign: neither product leaves fp32's range where the
    /// result does not.
    CUTLASS_DEVICE float inverse(int i) const {
      int const exponent = -(x + weights);
      int const first = max(-126, min(126, exponent));
      return __uint_as_float(power_of_two_bits(i == 0 ? first : exponent - first));
    }
  };

  /// Called by all threads of the CTA. False: the sm80 family's turn.
  template <int kThreads>
  CUTLASS_DEVICE static bool decide(SplitParams const& p, SharedStorage& shared, int cls, int thread, Scales& scales) {
    static_assert(kThreads >= kScanCtas);
    if (thread == 0) shared = SharedStorage{};
    // All loads at once: nothing else can start before. Each thread sums two bins over some of the CTAs that scanned.
    uint32_t largest = thread < kScanCtas ? __ldcg(&p.scan[thread].largest) : 0;
    constexpr int kWords = kExponentBins / 2;
    constexpr int kRounds = ceil_div(kScanCtas, kThreads / kWords);
    int const word = thread % kWords;
    uint32_t bins[kRounds];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRounds; ++i) {
      int const cta = thread / kWords + i * (kThreads / kWords);
      bins[i] = cta < kScanCtas ? __ldcg(&p.scan[cta].bins[word]) : 0;
    }
    int32_t tiny = 0;
    for (int i = thread; i < p.weight_results; i += kThreads) tiny += __ldcg(p.tiny_weights + i);
    scales.weights = __ldcg(p.weight_exponent + cls);
    int32_t count[2] = {};
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t const two : bins) {
      count[0] += static_cast<int32_t>(two & ScanResult::kMost);
      count[1] += static_cast<int32_t>(two >> 16);
    }
    __syncthreads();
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (thread % 32 == 0) atomicMax(&shared.largest, largest);
    if (tiny != 0) atomicAdd(&shared.tiny_weights, tiny);
    __syncthreads();
    scales.x = split_exponent(shared.largest) - p.head_room;
    for (int i = 0; i < 2; ++i) {
      if (count[i] != 0 && bin_counts(2 * word + i, scales.x)) atomicAdd(&shared.small, count[i]);
    }
    __syncthreads();
    scales.floor = kTinyFloor * static_cast<float>(shared.tiny_weights);
    bool const here = shared.tiny_weights <= kFewTinyWeights && shared.small <= p.too_many;
    if (blockIdx.x == 0 && thread == 0) *p.declined = here ? 0 : 1;
    return here;
  }
};

}  // namespace convt3d::sm90
