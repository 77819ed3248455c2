// SPDX-License-Identifier: Apache-2.0
//
// The commonest activations in the fewest instructions. The streaming kernel chooses among them once for each unit, so
// that nothing is chosen output by output: its tensor cores mostly wait while units are finished.
#pragma once

#include <cmath>

#include "convt3d/convt3d.h"
#include "cutlass/cutlass.h"
#include "sm90/params.hpp"

namespace convt3d::sm90::stream {

namespace common {

struct None {
  CUTLASS_DEVICE float operator()(float t) const { return t; }
};

struct Relu {
  CUTLASS_DEVICE float operator()(float t) const {
    float r;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(t));
    return r;
  }
};

/// A comparison and a multiplication, which is left out where it has no place.
struct LeakyRelu {
  float slope;
  CUTLASS_DEVICE float operator()(float t) const { return t < 0.f ? t * slope : t; }
};

/// As XHardswishTail.
struct XHardswish {
  CUTLASS_DEVICE float operator()(float t) const { return t * (t * __saturatef(fmaf(t, 1.0f / 6.0f, 0.5f))); }
};

}  // namespace common

/// These, chosen at run time, as a tail (collective_epilogue.hpp).
struct CommonTail {
  static constexpr bool kAny = false;
};

/// Calls `function` with the form of a common activation (tile_width.hpp).
template <class Function>
CUTLASS_DEVICE void with_form(EpilogueParams const& p, Function&& function) {
  if (p.activation == CONVT3D_ACT_NONE) {
    function(common::None{});
  } else if (p.activation == CONVT3D_ACT_RELU) {
    function(common::Relu{});
  } else if (p.activation == CONVT3D_ACT_X_HARDSWISH) {
    function(common::XHardswish{});
  } else {
    function(common::LeakyRelu{p.negative_slope});
  }
}

}  // namespace convt3d::sm90::stream
