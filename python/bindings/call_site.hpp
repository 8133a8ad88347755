// Where the program calls zcomm from: "train.py:42", for messages about late ranks.
#pragma once

namespace zcomm::bindings {

/// The innermost Python line outside of zcomm and the standard library, or "". The text lives as long as the process.
/// Thread rule: holds the interpreter lock.
const char* call_site();

}  // namespace zcomm::bindings
