// FakeNccl: NCCL's functions for ranks that are threads; it enforces NCCL's rules strictly.
//
// It implements the documented behaviour of non-blocking communicators: a call may be in progress until the state has
// been queried often enough, and only then are kernels launched on the stream; they run in the stream's order, wait for
// the other ranks' kernels, and end early only by an abort. Undefined behaviour fails the test: a call on a
// communicator that is in progress, ended or another device's, a group left open, calls that differ between ranks, a
// communicator that is never freed. Streams are NcclDevice's. One at a time, because library() holds functions without
// an object. Thread rule: free-threaded. Source: NCCL user guide, "Creating a communicator", "Group calls", "Fault
// tolerance".
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "coll/cuda/nccl_library.hpp"
#include "coll/support/fake_nccl_kernels.hpp"

namespace zcomm::test {

class FakeNccl {
 public:
  /// ncclResult_t.
  enum : int {
    success = 0,
    cuda_error = 1,
    system_error = 2,
    invalid_argument = 4,
    invalid_usage = 5,
    remote_error = 6,
    in_progress = 7
  };

  /// Counts of calls on the communicator of one rank.
  struct CallCounts {
    int inits = 0, groups = 0, finalized = 0, destroyed = 0, aborted = 0;  // a part of a split has no init
    bool operator==(const CallCounts&) const = default;
  };

  FakeNccl();
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;
  /// has_split: with ncclCommSplit, as since 2.18.
  static const coll::NcclLibrary& library(bool has_split = true);

  /// Calls that may be in progress remain so for that many queries.
  void be_slow(int queries);
  /// The next `call` ("ncclAllReduce") of that rank returns `result`, and does nothing else.
  void fail(int rank, const std::string& call, int result);
  /// The state of that rank's communicator is `result` from now on.
  void break_down(int rank, int result);
  /// Calls may differ between ranks from now on; their kernels then wait for an abort, as NCCL's may.
  void let_calls_differ();
  /// Kernels that that rank launches from now on wait for an abort.
  void hold_kernels(int rank);
  /// Finalize calls of that rank remain in progress.
  void hold_finalize(int rank);
  /// That rank joins a communicator so much later.
  void delay_init(int rank, double seconds);

  /// Blocks until a kernel of that rank runs.
  void wait_for_kernel(int rank);
  /// Of its latest communicator.
  CallCounts call_counts(int rank);
  /// Calls of all ranks that made a communicator, by ncclCommInitRankConfig and by ncclCommSplit.
  std::pair<int, int> made() const;

 private:
  friend struct NcclCalls;
  using Comm = coll::NcclCommHandle;
  struct Orders {
    std::map<std::string, int> failures;
    int state = success;
    bool holds_kernels = false, holds_finalize = false;
    double init_delay_s = 0;
  };

  int name_world(std::uint64_t& number);
  int init(Comm** made, int ranks, std::uint64_t world, int place);
  int split(Comm& parent, int color, int key, Comm** made);
  void part(const Rendezvous* world);
  int query(Comm& comm, int& state);
  int start_group();
  int add(const char* call, Comm& comm, const FakeTask& task, void* stream);
  int end_group();
  int finalize(Comm& comm);
  int destroy(Comm& comm);
  int abort(Comm& comm);

  /// Whether NCCL allows `call` now; fails the test if not.
  bool allows(const char* call, const Comm& comm) const;
  int ordered(const char* call, int rank);
  int begin(Comm& comm);
  int state_of(Comm& comm);
  int launch(Comm& comm);
  Comm& comm_of(int rank);

  mutable std::mutex mutex_;
  struct Splitting {
    Comm* parent;
    int color, key;
    Comm** made;
  };
  std::map<const Rendezvous*, std::vector<Splitting>> splits_;  // until all ranks have called
  std::map<std::uint64_t, std::shared_ptr<Rendezvous>> worlds_;
  std::vector<std::unique_ptr<Comm>> comms_;  // kept to the end, to detect the use of an ended one
  std::map<int, Orders> orders_;
  std::uint64_t last_world_ = 0;
  int queries_ = 0, open_groups_ = 0, inits_ = 0, parts_ = 0;
  bool may_differ_ = false;
};

}  // namespace zcomm::test
