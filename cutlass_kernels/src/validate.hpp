// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"
#include "message.hpp"

namespace convt3d {

/// convt3d_output_size without the C wrapping: checks the sizes and the geometry, then fills `out_size`.
Status checked_output_size(Problem const& problem, int64_t out_size[3], Message& message);

/// convt3d_validate without the C wrapping. After OK, everything in problem.hpp is free of overflow.
Status validate(Problem const& problem, Message& message);

}  // namespace convt3d
