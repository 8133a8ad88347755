// Errors of the core: one type per condition that a caller can handle.
//
// Every message names the wrong value. Bindings map each type to the Python class in its comment. docs/errors.md lists
// which of them poison a communicator.
#pragma once

#include <stdexcept>
#include <string>

namespace zcomm {

/// Root of all errors thrown by zcomm (RuntimeError in Python).
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An argument that cannot be served; nothing was done (ValueError).
struct InvalidArgument : Error {
  using Error::Error;
};

/// Ranks called different operations; raised on every rank (zcomm.CollectiveMismatch).
struct CollectiveMismatch : Error {
  using Error::Error;
};

/// A rank died or left while others still needed it (zcomm.PeerLost, attributes `group_rank` and `rank`).
struct PeerLost : Error {
  PeerLost(int lost_rank, const std::string& what, int in_job = -1) : Error(what), rank(lost_rank), job_rank(in_job) {}
  int rank;      ///< of the communicator; -1: the call was on another one
  int job_rank;  ///< of the job; -1: not known
};

/// A deadline passed; the message names the late ranks (TimeoutError).
struct Timeout : Error {
  using Error::Error;
};

/// A system call failed (OSError with errno and the path, if any).
struct SystemError : Error {
  SystemError(int error_number, const std::string& what, std::string file = {})
      : Error(what), code(error_number), path(std::move(file)) {}
  int code;
  std::string path;
};

/// Data read back differs from the data written: checksum or length (OSError EIO in Python).
struct DataCorrupt : SystemError {
  using SystemError::SystemError;
};

/// Built or running without that backend (NotImplementedError).
struct Unsupported : Error {
  using Error::Error;
};

/// A CUDA call failed (zcomm.CudaError).
struct CudaError : Error {
  using Error::Error;
};

}  // namespace zcomm
