// SPDX-License-Identifier: Apache-2.0
#include "sm80/configs.hpp"
#include "sm80/instance.hpp"
#include "sm80/instances/instances.hpp"

convt3d::sm80::LaunchFn convt3d::sm80::f16_n32() { return &Instance<HalfN32<cutlass::half_t>, true>::launch; }
