// SPDX-License-Identifier: Apache-2.0
//
// The compiled sm80 kernels: one source file each, named by operand type and GEMM N tile. Each function returns the
// launch for y with channels contiguous (true) or for any other layout (false), or without an argument for the former:
// with the other epilogue, kernels for long sums spill no registers and are as fast on short ones.
#pragma once

#include "sm80/call.hpp"

namespace convt3d::sm80 {

LaunchFn tf32_n64();
LaunchFn tf32_n64_long(bool channels_last);
LaunchFn tf32_n64_long_small(bool channels_last);
LaunchFn tf32_n128_long(bool channels_last);
LaunchFn tf32_n96_long(bool channels_last);
LaunchFn tf32_n32();
LaunchFn tf32_n32_long(bool channels_last);
LaunchFn ieee_n64(bool channels_last);
LaunchFn ieee_n64_long(bool channels_last);
LaunchFn ieee_n32(bool channels_last);
LaunchFn ieee_n32_long(bool channels_last);
LaunchFn f16_n64();
LaunchFn f16_n64_long(bool channels_last);
LaunchFn f16_n32();
LaunchFn f16_n32_long(bool channels_last);
LaunchFn f16_n128();
LaunchFn f16_n128_long(bool channels_last);
LaunchFn f16_n96_long(bool channels_last);
LaunchFn bf16_n64();
LaunchFn bf16_n64_long(bool channels_last);
LaunchFn bf16_n32();
LaunchFn bf16_n32_long(bool channels_last);
LaunchFn bf16_n128();
LaunchFn bf16_n128_long(bool channels_last);
LaunchFn bf16_n96_long(bool channels_last);

}  // namespace convt3d::sm80
