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
    uint32_t largest;  // finite magnitude of x
    int32_t small;     // sampled values that may be too small
  };

  /// The exponents of x and of the class's weights.
  struct Scales {
    int x, weights;

    CUTLASS_DEVICE float x_factor() const { return __uint_as_float(power_of_two_bits(x)); }
    /// The inverse of both scales, in two factors of the same sign: neither product leaves fp32's range where the
    /// result does not.
    CUTLASS_DEVICE float inverse(int i) const {
      int const exponent = -(x + weights);
      int const first = max(-126, min(126, exponent));
      return __uint_as_float(power_of_two_bits(i == 0 ? first : exponent - first));
    }
  };

  /// Called by all `threads` threads of the CTA. False: the sm80 family's turn.
  CUTLASS_DEVICE static bool decide(SplitParams const& p, SharedStorage& shared, int cls, int thread, int threads,
                                    Scales& scales) {
    if (thread == 0) shared = SharedStorage{};
    uint32_t largest = 0;
    for (int i = thread; i < p.scans; i += threads) largest = max(largest, __ldcg(&p.scan[i].largest));
    // Each thread sums one bin over some of the CTAs that scanned.
    int const bin = thread % kExponentBins;
    int32_t count = 0;
    for (int i = thread / kExponentBins; i < p.scans; i += threads / kExponentBins)
      count += __ldcg(&p.scan[i].bin[bin]);
    int bad = 0;
    for (int i = thread; i < p.weight_results; i += threads) bad |= __ldcg(p.weights_do_not_split + i);
    scales.weights = __ldcg(p.weight_exponent + cls);
    bad = __syncthreads_or(bad);
    atomicMax(&shared.largest, largest);
    __syncthreads();
    scales.x = split_exponent(shared.largest);
    if (count != 0 && bin_counts(bin, scales.x)) atomicAdd(&shared.small, count);
    __syncthreads();
    bool const here = bad == 0 && shared.small <= p.too_many;
    if (blockIdx.x == 0 && thread == 0) *p.declined = here ? 0 : 1;
    return here;
  }
};

}  // namespace convt3d::sm90
