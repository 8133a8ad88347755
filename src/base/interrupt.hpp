// Interrupts: lets a thread that waits for other ranks notice that its program wants to stop (Ctrl-C in Python).
//
// Thread rule: set_interrupt_check once at start; check_interrupt from any thread.
#pragma once

#include "base/error.hpp"

namespace zcomm {

/// The program asked to stop while an operation waited.
struct Interrupted : Error {
  Interrupted() : Error("interrupted by a signal") {}
};

/// `check` throws Interrupted when the calling thread should stop waiting. Called every 50 ms or so.
void set_interrupt_check(void (*check)());
void check_interrupt();

}  // namespace zcomm
