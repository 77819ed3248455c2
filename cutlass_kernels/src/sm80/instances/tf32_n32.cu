// SPDX-License-Identifier: Apache-2.0
#include "sm80/configs.hpp"
#include "sm80/instance.hpp"
#include "sm80/instances/instances.hpp"

convt3d::sm80::LaunchFn convt3d::sm80::tf32_n32() { return &Instance<Tf32N32, true>::launch; }
