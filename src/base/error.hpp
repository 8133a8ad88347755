// Builders of error messages and of SystemError from errno.
#pragma once

#include <cerrno>
#include <sstream>
#include <string>

#include "zcomm/error.hpp"

namespace zcomm {

/// Concatenates anything that can be streamed.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// SystemError with the text, ": " and strerror(code).
[[noreturn]] void throw_system_error(int code, const std::string& what, const std::string& path = {});

}  // namespace zcomm
