// SPDX-License-Identifier: Apache-2.0
//
// What the streaming kernel and its host code agree on. The host's choices are in choose.hpp, so that no kernel is
// compiled anew for another choice.
#pragma once

#include "sm90/config.hpp"
#include "sm90/stream/geometry.hpp"

namespace convt3d::sm90::stream {

constexpr int kStoreWarps = 2;
constexpr int kLoadWarps = 3;  // of add, where boxes do not bring it in
constexpr int kMaxSlots = 16;
constexpr int kSmallestRing = 5;  // a step of four units must not pass the ring
constexpr int kPieceCtas = 1024;  // of the pre-kernel, at most

// fp32 in ieee mode: what the scan of both operands leaves (scan.cu).
constexpr int kScanResults = 264;       // of x: two CTAs of each multiprocessor
constexpr int kSampleThreads = 512;     // of each
constexpr int kWeightScanResults = 32;  // of the weights of each channel tile: a warp reads them at once
constexpr int kMaxSplitTiles = 64;      // channel tiles of 4096 channels

struct Config {
  int stages;  // slabs of x
  int slots;   // weight pieces
  int ring;    // units
};

/// What the pre-kernels of fp32 in ieee mode tell the main one, beside the exponents of the weights.
struct SplitState {
  unsigned long long bad_x;   // values that are nan or infinite as parts
  unsigned long long tiny_x;  // values whose parts lack digits
  int32_t bad_weights;        // whether there are values of either kind among them
  int32_t x_exponent;         // of the scale
  int32_t declined;           // whether the sm80 family is to compute the problem
};

}  // namespace convt3d::sm90::stream
