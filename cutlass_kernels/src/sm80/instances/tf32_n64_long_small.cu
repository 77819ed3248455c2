// SPDX-License-Identifier: Apache-2.0
#include "sm80/configs.hpp"
#include "sm80/instance.hpp"
#include "sm80/instances/instances.hpp"

namespace convt3d::sm80 {

// With the epilogue for planes and its pairs of classes the registers are enough for three thread blocks.
using PlaneSmall =
    Config<Tf32N64LongSmall::Operand, float, Multiply, Tf32N64LongSmall::Tile, Tf32N64LongSmall::WarpTile,
           Tf32N64LongSmall::Instruction, 3, 3, ShortIn::kRegisters, Tf32N64LongSmall::kSumIterations>;

LaunchFn tf32_n64_long_small(bool channels_last) {
  return channels_last ? &Instance<Tf32N64LongSmall, true>::launch : &Instance<PlaneSmall, false>::launch;
}

}  // namespace convt3d::sm80
