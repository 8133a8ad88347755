// The call site in the program: "train.py:42", for messages about late ranks.
#pragma once

namespace zcomm::bindings {

/// The innermost Python line of the program, or "". The text lives as long as the process.
/// Thread rule: holds the interpreter lock.
const char* call_site();

/// Sets the site of this thread's next calls; nullptr: each call's own. `site` must live as long as the process.
void set_call_site(const char* site);

}  // namespace zcomm::bindings
