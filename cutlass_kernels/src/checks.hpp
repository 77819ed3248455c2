// SPDX-License-Identifier: Apache-2.0
//
// The checks that descriptions share: each names the argument and its value. Overflow-checked, since sizes come from
// outside and may be anything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convt3d/problem.hpp"
#include "message.hpp"

namespace convt3d::checks {

constexpr char const* kDimension[5] = {"N", "C", "D", "H", "W"};
constexpr int kWorkspaceAlignment = 16;

/// False where the result does not fit.
inline bool multiply(int64_t a, int64_t b, int64_t* result) { return !__builtin_mul_overflow(a, b, result); }
inline bool add(int64_t a, int64_t b, int64_t* result) { return !__builtin_add_overflow(a, b, result); }

Status at_least(char const* name, int64_t value, int64_t minimum, Message& message);
Status at_least(char const* name, int64_t const (&value)[3], int64_t minimum, Message& message);

/// In [0, count).
Status within(char const* name, int64_t value, int64_t count, Message& message);

Status power_of_two_alignment(char const* name, int32_t value, int element, Message& message);

/// Strides are non-negative and the last byte's offset fits 64 bits.
Status addressable(char const* name, Size5 const& shape, int64_t const (&stride)[5], char const* const (&dimension)[5],
                   int element, Message& message);

/// No stride of 0 on a dimension that has several elements.
Status not_broadcast(char const* name, Size5 const& shape, int64_t const (&stride)[5],
                     char const* const (&dimension)[5], Message& message);

/// Distinct elements have distinct addresses. The test is sufficient: taken from the smallest stride up, each
/// stride steps over everything the smaller ones reach. Every slice of a dense tensor passes.
Status distinct_addresses(char const* name, Size5 const& shape, int64_t const (&stride)[5], Message& message);

/// The pointer is there and is a multiple of the alignment that the description promises.
Status check_pointer(char const* name, void const* pointer, int alignment, Message& message);

}  // namespace convt3d::checks
