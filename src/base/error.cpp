#include "base/error.hpp"

#include <cstring>

namespace zcomm {

void throw_system_error(int code, const std::string& what, const std::string& path) {
  throw SystemError(code, text(what, ": ", std::strerror(code)), path);
}

}  // namespace zcomm
