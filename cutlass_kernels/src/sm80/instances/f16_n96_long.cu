// SPDX-License-Identifier: Apache-2.0
#include "sm80/configs.hpp"
#include "sm80/instance.hpp"
#include "sm80/instances/instances.hpp"

convt3d::sm80::LaunchFn convt3d::sm80::f16_n96_long(bool channels_last) {
  return launch_for<HalfN96Long<cutlass::half_t>>(channels_last);
}
