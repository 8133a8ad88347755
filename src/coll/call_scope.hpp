// CallScope: which communicators this thread is in the middle of a blocking call on, and which of their locks it holds.
//
// A signal's handler runs inside of such a call, on its thread, and may call the same communicator again.
// Thread rule: an object lives on the stack of the thread that made it.
#pragma once

namespace zcomm::coll {

class CallScope {
 public:
  /// `what`: the address of a communicator, or of its lock.
  explicit CallScope(const void* what) : what_(what), outer_(innermost) { innermost = this; }
  ~CallScope() { innermost = outer_; }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  static bool is_in(const void* what) {
    const CallScope* each = innermost;
    while (each != nullptr && each->what_ != what) each = each->outer_;
    return each != nullptr;
  }

 private:
  const void* const what_;
  const CallScope* const outer_;
  inline static thread_local const CallScope* innermost = nullptr;
};

}  // namespace zcomm::coll
