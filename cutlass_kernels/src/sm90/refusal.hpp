// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "convt3d/problem.hpp"
#include "message.hpp"

namespace convt3d::sm90 {

/// Reasons why a problem is not taken: the first that is found becomes the message, where one is wanted.
class Refusal {
 public:
  explicit Refusal(Message* message = nullptr) : message_(message) {}

  /// Whether nothing was refused so far.
  bool none() const { return status_ == CONVT3D_OK; }
  Status status() const { return status_; }

  void want(bool good, char const* what, int64_t value, char const* limit) {
    if (good || !none()) return;
    status_ = CONVT3D_NOT_SUPPORTED;
    if (message_ == nullptr) return;
    message_->fail(CONVT3D_NOT_SUPPORTED, "sm90: %s is %lld, the kernel takes %s", what, static_cast<long long>(value),
                   limit);
  }

 private:
  Message* message_;
  Status status_ = CONVT3D_OK;
};

}  // namespace convt3d::sm90
