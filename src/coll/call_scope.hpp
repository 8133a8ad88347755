// CallScope: the communicators on which this thread is inside a blocking call, and the locks of theirs that it holds.
//
// A signal handler runs inside such a call, on its thread, and may call the same communicator again. Thread rule: an
// object lives on the stack of the thread that made it.
#pragma once

namespace zcomm::coll {

class CallScope {
 public:
  /// The pointer: the address of a communicator, or of its lock.
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
