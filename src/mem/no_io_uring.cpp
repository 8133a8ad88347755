// Built without liburing: there is no io_uring engine.
#include "mem/io_engine.hpp"

namespace zcomm::mem {

std::unique_ptr<IoEngine> make_io_uring_engine(int, std::string* why) {
  if (why != nullptr) *why = "built without liburing";
  return nullptr;
}

}  // namespace zcomm::mem
