// HostCommunicator: the Communicator of the ranks of one host (zcomm/communicator.hpp).
//
// A facade: each call checks its arguments, then becomes an Operation in the queue; the Runner does the rest on the
// progress thread. Runner and its memory go at close(); symmetric buffers live as long as their owners want.
// Thread rule: free-threaded; ranks must issue their calls in the same order.
#include <atomic>
#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "coll/failure.hpp"
#include "coll/progress_queue.hpp"
#include "coll/runner.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm {
namespace coll {
namespace {

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(std::shared_ptr<net::Mesh> mesh, CommOptions options)
      : mesh_(std::move(mesh)),
        options_(options),
        rank_(mesh_->rank()),
        world_size_(mesh_->world_size()),
        runner_(std::make_unique<Runner>(mesh_, options_, symmetric_)),
        queue_([this](Operation& operation) { run(operation); }) {}
  ~HostCommunicator() override { close(); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes) override { return allocate(nbytes, OpKind::allocate); }
  std::shared_ptr<SymmetricBuffer> allocate_shared(std::size_t nbytes) override {
    return allocate(nbytes, OpKind::allocate_shared);
  }

  Work all_reduce(std::span<const Buffer> buffers, DType dtype, ReduceOp op, const char* name) override {
    return submit({.kind = OpKind::all_reduce,
                   .in = {},
                   .out = buffers,
                   .dtype = dtype,
                   .out_dtype = dtype,
                   .op = op,
                   .name = name});
  }
  Work reduce_scatter(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, ReduceOp op,
                      DType out_dtype, bool accumulate, const char* name) override {
    return submit({.kind = OpKind::reduce_scatter,
                   .in = in,
                   .out = out,
                   .dtype = dtype,
                   .out_dtype = out_dtype,
                   .op = op,
                   .accumulate = accumulate,
                   .name = name});
  }
  Work all_gather(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype,
                  const char* name) override {
    return submit({.kind = OpKind::all_gather, .in = in, .out = out, .dtype = dtype, .out_dtype = dtype, .name = name});
  }
  Work broadcast(std::span<const Buffer> buffers, DType dtype, int root, const char* name) override {
    return submit({.kind = OpKind::broadcast,
                   .in = {},
                   .out = buffers,
                   .dtype = dtype,
                   .out_dtype = dtype,
                   .root = root,
                   .name = name});
  }
  Work barrier(const char* name) override {
    return submit({.kind = OpKind::barrier, .in = {}, .out = {}, .name = name});
  }

  std::unique_ptr<Communicator> duplicate() override {
    submit({.kind = OpKind::duplicate, .in = {}, .out = {}}).wait();
    return std::make_unique<HostCommunicator>(mesh_, options_);
  }

  CommMemory memory() const override {
    CommMemory memory = symmetric_.memory();
    const std::lock_guard lock(close_mutex_);
    if (rank_ != 0) memory.shared_nbytes = 0;
    memory.slot_nbytes = runner_ ? runner_->memory().nbytes() : 0;
    memory.allocation_count += 1;  // control block and slots
    return memory;
  }

  void close() noexcept override {
    closed_ = true;
    const std::lock_guard lock(close_mutex_);
    if (!runner_) return;
    runner_->watch().close();
    queue_.stop();
    runner_.reset();
  }

 private:
  Work submit(const Request& request) {
    if (closed_) throw Error(text(name_of(request.kind), ": the communicator is closed"));
    failure_.throw_if_set();
    check(request, world_size_, symmetric_);
    return queue_.submit(
        [&](Operation& operation, SpareItems& spares) { fill(operation, spares, request, world_size_, symmetric_); });
  }

  std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes, OpKind kind) {
    AllocateResult result;
    submit({.kind = kind, .in = {}, .out = {}, .nbytes = nbytes, .allocate = &result}).wait();
    if (result.refused) std::rethrow_exception(result.refused);
    return std::move(result.buffer);
  }

  void run(Operation& operation) {
    failure_.throw_if_set();
    try {
      runner_->run(operation);
    } catch (...) {
      failure_.set(std::current_exception());
      throw;
    }
  }

  const std::shared_ptr<net::Mesh> mesh_;
  const CommOptions options_;
  const int rank_, world_size_;
  SymmetricMemory symmetric_;
  Failure failure_;
  std::atomic<bool> closed_{false};
  mutable std::mutex close_mutex_;
  std::unique_ptr<Runner> runner_;
  ProgressQueue queue_;
};

}  // namespace
}  // namespace coll

std::unique_ptr<Communicator> Communicator::create(std::shared_ptr<net::Mesh> mesh, CommOptions options) {
  if (!mesh) throw InvalidArgument("Communicator::create: no mesh");
  return std::make_unique<coll::HostCommunicator>(std::move(mesh), options);
}

}  // namespace zcomm
