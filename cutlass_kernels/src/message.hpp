// SPDX-License-Identifier: Apache-2.0
//
// The one line that explains a failed call: printf into the caller's buffer. No allocation, no exception.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>

#include "convt3d/convt3d.h"

namespace convt3d {

class Message {
 public:
  /// `text` may be null: then nothing is written. Otherwise it becomes the empty string.
  Message(char* text, size_t capacity) : text_(text), capacity_(text == nullptr ? 0 : capacity) {
    if (capacity_ > 0) text_[0] = '\0';
  }

  /// Replaces the text, cut to the capacity, and returns `status`: `return message.fail(...)`.
  __attribute__((format(printf, 3, 4))) convt3d_status fail(convt3d_status status, char const* format, ...) {
    length_ = 0;
    va_list arguments;
    va_start(arguments, format);
    write(format, arguments);
    va_end(arguments);
    return status;
  }

  /// Adds to the text.
  __attribute__((format(printf, 2, 3))) void append(char const* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write(format, arguments);
    va_end(arguments);
  }

 private:
  void write(char const* format, va_list arguments) {
    if (length_ >= capacity_) return;
    int const wanted = std::vsnprintf(text_ + length_, capacity_ - length_, format, arguments);
    if (wanted > 0) length_ += static_cast<size_t>(wanted);
  }

  char* text_;
  size_t capacity_;
  size_t length_ = 0;  // of the whole text; at the capacity or beyond once it was cut
};

}  // namespace convt3d
