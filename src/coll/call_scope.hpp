// Within: which communicators this thread is in the middle of a blocking call on, and which of their locks it holds.
//
// A signal's handler runs inside of such a call, on its thread, and may call the same communicator again.
// Thread rule: an object lives on the stack of the thread that made it.
#pragma once

namespace zcomm::coll {

class Within {
 public:
  /// `what`: the address of a communicator, or of its lock.
  explicit Within(const void* what) : what_(what), outer_(innermost) { innermost = this; }
  ~Within() { innermost = outer_; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

  static bool is_in(const void* what) {
    const Within* each = innermost;
    while (each != nullptr && each->what_ != what) each = each->outer_;
    return each != nullptr;
  }

 private:
  const void* const what_;
  const Within* const outer_;
  inline static thread_local const Within* innermost = nullptr;
};

}  // namespace zcomm::coll
