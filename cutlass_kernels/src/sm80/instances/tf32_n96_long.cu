// SPDX-License-Identifier: Apache-2.0
#include "sm80/configs.hpp"
#include "sm80/instance.hpp"
#include "sm80/instances/instances.hpp"

convt3d::sm80::LaunchFn convt3d::sm80::tf32_n96_long(bool channels_last) {
  return launch_for<Tf32N96Long>(channels_last);
}
