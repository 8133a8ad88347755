// Running operations by NCCL (coll/cuda/nccl_engine.hpp).
#include "coll/cuda/nccl_engine.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm::coll {

using Clock = std::chrono::steady_clock;

namespace {

constexpr int kSpins = 1000;
constexpr std::chrono::microseconds kNap{20};
constexpr std::chrono::milliseconds kNcclLastWords{500}, kNcclFarewell{2000};

}  // namespace

NcclEngine::NcclEngine(Communicator& control, std::shared_ptr<net::Mesh> watched,
                       std::shared_ptr<device::Device> device, const NcclLibrary& nccl, const NcclOptions& options)
    : control_(control),
      watched_(std::move(watched)),
      device_(std::move(device)),
      nccl_(nccl),
      options_(options),
      tickets_(std::make_shared<DeviceLiveness>(device_, nullptr, control.rank(), options.timeout_s)),
      stream_(device_->make_stream()) {
  try {
    connect();
  } catch (...) {
    abort();
    throw;
  }
}

NcclEngine::~NcclEngine() {
  if (comm_ != nullptr) finish();
  abort();
}

/// Waits, for a limited time because they may be dead, until the other ranks have received all data that NCCL forwards
/// or lends for them here.
void NcclEngine::finish() noexcept {
  try {
    const device::CurrentDevice current(*device_);
    const std::chrono::duration<double> patience = std::min<std::chrono::duration<double>>(kNcclFarewell, timeout());
    const auto until = Clock::now() + patience;
    int state = nccl_.comm_finalize(comm_);
    while (state == NcclLibrary::kInProgress && Clock::now() < until) {
      std::this_thread::sleep_for(kNap);
      if (nccl_.comm_get_async_error(comm_, &state) != NcclLibrary::kSuccess) return;
    }
    if (state == NcclLibrary::kSuccess) nccl_.comm_destroy(std::exchange(comm_, nullptr));
  } catch (const Error&) {  // the device is lost
  }
}

void NcclEngine::connect() {
  during_ = "init of NCCL";
  NcclId id{};
  if (rank() == 0) check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
  const Buffer buffer{id.bytes.data(), id.bytes.size()};
  control_.broadcast({&buffer, 1}, DType::uint8, 0, Call("NCCL's unique id", false));
  restart_clock();
  const device::CurrentDevice current(*device_);
  NcclConfig config;
  check(nccl_.comm_init_rank_config(&comm_, world_size(), id, rank(), &config), "ncclCommInitRankConfig");
  finish_call("ncclCommInitRankConfig");
}

namespace {

/// The text that the ranks compare, without the call site, which may differ.
std::string identity(Signature signature) {
  signature.site[0] = '\0';
  return describe(signature);
}

}  // namespace

bool NcclEngine::adds_by_kernel(const Signature& signature) const {
  return signature.kind == OpKind::reduce_scatter &&
         static_cast<std::size_t>(world_size()) <= device::kMaxKernelBuffers;
}

/// Refused on every rank that calls it, before any rank waits.
void NcclEngine::require_supported(const Signature& signature) const {
  if (!adds_by_kernel(signature) && (signature.accumulate || signature.out_dtype != signature.dtype))
    throw Unsupported(text(describe(signature), ": backend nccl neither accumulates nor widens among ", world_size(),
                           " ranks; at most ", device::kMaxKernelBuffers, ": use out of the same dtype"));
  if (!adds_by_kernel(signature) && signature.order == ReduceOrder::rank)
    throw Unsupported(text(describe(signature),
                           ": backend nccl adds in an order of its own, but for reduce_scatter among ",
                           device::kMaxKernelBuffers, " ranks at most: use reduce_scatter and all_gather"));
}

void NcclEngine::run(Operation& operation) {
  if (closing_) throw Error(text("communicator was closed before ", describe(operation.signature)));
  require_supported(operation.signature);
  during_ = identity(operation.signature);
  if (operation.allocate != nullptr) {
    operation.allocate->refused = std::make_exception_ptr(
        Unsupported("empty: backend nccl has no symmetric memory; use torch.empty(..., device=\"cuda\")"));
    return;
  }
  try {
    enter(operation);
    if (moves_data(operation.signature.kind)) carry_out(operation);
  } catch (...) {
    abort();
    throw;
  }
}

/// Throws CollectiveMismatch, and the errors of `control`.
void NcclEngine::enter(const Operation& operation) {
  const auto in_full = [&](const Error& error) {  // the compared name was cut to its beginning
    const bool is_cut = during_.size() >= sizeof(Signature::name);
    return text(error.what(), is_cut ? text("; rank ", rank(), " called ", during_) : "");
  };
  try {
    if (operation.signature.kind == OpKind::all_to_all)
      compare_parts(operation);
    else
      control_.barrier(Call(during_.c_str(), false, operation.signature.site));
  } catch (const CollectiveMismatch& error) {
    throw CollectiveMismatch(in_full(error));
  } catch (const PeerLost& error) {
    throw PeerLost(error.rank, in_full(error));
  } catch (const Timeout& error) {
    throw Timeout(in_full(error));
  }
}

void NcclEngine::carry_out(const Operation& operation) {
  try {
    restart_clock();
    const auto ticket = tickets_.of(operation);
    stream_->wait(ticket->ready());
    launch(operation);
    stream_->record(ticket->end());
    for (int turn = 0; !ticket->end().done(); ++turn) {
      look_around("waiting for its kernels");
      if (turn > kSpins) std::this_thread::sleep_for(kNap);
    }
  } catch (...) {
    control_.close();  // the others must not wait for this rank any more
    throw;
  }
}

/// The counts of all_to_all belong to pairs of ranks. Every rank sees all of them, so that all raise a mismatch.
void NcclEngine::compare_parts(const Operation& operation) {
  const auto items = operation.items.all();
  const std::size_t ranks = static_cast<std::size_t>(world_size());
  std::vector<std::int64_t> mine, all(2 * ranks * ranks);
  for (const Item& item : items) mine.push_back(static_cast<std::int64_t>(item.count));
  for (const Item& item : items) mine.push_back(static_cast<std::int64_t>(item.out_count));
  const ConstBuffer from{mine.data(), mine.size()};
  const Buffer to{all.data(), all.size()};
  control_.all_gather({&from, 1}, {&to, 1}, DType::int64, Call(during_.c_str(), false, operation.signature.site));
  for (std::size_t a = 0; a < ranks; ++a)
    for (std::size_t b = 0; b < ranks; ++b) {
      const auto sent = all[2 * ranks * a + b], expected = all[2 * ranks * b + ranks + a];
      if (sent != expected)
        throw CollectiveMismatch(
            text("all_to_all: rank ", a, " sends ", sent, " elements to rank ", b, ", which expects ", expected));
    }
}

void NcclEngine::launch(const Operation& operation) {
  const device::CurrentDevice current(*device_);
  if (adds_by_kernel(operation.signature)) return add_parts(operation);
  launch_group([&] {
    int peer = 0;
    for (const Item& item : operation.items.all()) launch_item(operation.signature, item, peer++);
  });
}

/// The NCCL calls of `calls` as one.
template <class Calls>
void NcclEngine::launch_group(const Calls& calls) {
  check(nccl_.group_start(), "ncclGroupStart");
  try {
    calls();
  } catch (...) {
    nccl_.group_end();  // a thread's groups nest
    throw;
  }
  check(nccl_.group_end(), "ncclGroupEnd");
  finish_call("ncclGroupEnd");
}

/// reduce_scatter: the same bytes on the links as ncclReduceScatter, but sums in rank order, in fp32 for 2-byte floats.
void NcclEngine::add_parts(const Operation& operation) {
  const Signature& signature = operation.signature;
  const auto items = operation.items.all();
  const std::size_t size = size_of(signature.dtype);
  const std::size_t needed = PartPieces::buffer_nbytes(items, world_size(), size, options_.received_nbytes);
  if (needed > received_nbytes_) {
    received_nbytes_ = 0;
    received_.reset();  // before the larger one exists
    received_ = device_->allocate(needed);
    received_nbytes_ = needed;
  }
  PartPieces passes(items, world_size(), size, received_nbytes_);
  for (auto pieces = passes.next(); !pieces.empty(); pieces = passes.next()) {
    if (world_size() > 1) launch_group([&] { swap_pieces(signature, pieces); });
    for (const PartPiece& piece : pieces) add_piece(signature, piece);
  }
}

/// Sends each rank its elements of these pieces, and receives this rank's.
void NcclEngine::swap_pieces(const Signature& signature, std::span<const PartPiece> pieces) {
  const int dtype = nccl_dtype(signature.dtype);
  const std::size_t size = size_of(signature.dtype);
  void* const stream = reinterpret_cast<void*>(stream_->native());
  for (const PartPiece& piece : pieces)
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      const std::size_t first = piece.item->count * static_cast<std::size_t>(peer) + piece.begin;
      check(nccl_.send(piece.item->in + first * size, piece.count, dtype, peer, comm_, stream), "ncclSend");
      std::byte* const to = static_cast<std::byte*>(received_.get()) + piece.place(peer, rank());
      check(nccl_.recv(to, piece.count, dtype, peer, comm_, stream), "ncclRecv");
    }
}

void NcclEngine::add_piece(const Signature& signature, const PartPiece& piece) {
  const std::size_t size = size_of(signature.dtype);
  sources_.clear();
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::size_t own = piece.item->count * static_cast<std::size_t>(peer) + piece.begin;
    sources_.push_back(peer == rank() ? piece.item->in + own * size
                                      : static_cast<std::byte*>(received_.get()) + piece.place(peer, rank()));
  }
  void* const target = piece.item->out + piece.begin * size_of(signature.out_dtype);
  stream_->kernels().reduce({.dst = {&target, 1},
                             .src = sources_,
                             .count = piece.count,
                             .in = signature.dtype,
                             .out = signature.out_dtype,
                             .op = signature.op,
                             .accumulate = signature.accumulate});
}

void NcclEngine::launch_item(const Signature& signature, const Item& item, int peer) {
  const int dtype = nccl_dtype(signature.dtype), op = nccl_op(signature.op, signature.dtype), root = signature.root;
  void* const stream = reinterpret_cast<void*>(stream_->native());
  if (signature.kind == OpKind::all_to_all) {
    if (item.count != 0) check(nccl_.send(item.in, item.count, dtype, peer, comm_, stream), "ncclSend");
    if (item.out_count != 0) check(nccl_.recv(item.out, item.out_count, dtype, peer, comm_, stream), "ncclRecv");
    return;
  }
  if (item.count == 0) return;
  switch (signature.kind) {
    case OpKind::all_reduce:
      return check(nccl_.all_reduce(item.in, item.out, item.count, dtype, op, comm_, stream), "ncclAllReduce");
    case OpKind::reduce:
      return check(nccl_.reduce(item.in, item.out, item.count, dtype, op, root, comm_, stream), "ncclReduce");
    case OpKind::reduce_scatter:
      return check(nccl_.reduce_scatter(item.in, item.out, item.count, dtype, op, comm_, stream), "ncclReduceScatter");
    case OpKind::all_gather:
      return check(nccl_.all_gather(item.in, item.out, item.count, dtype, comm_, stream), "ncclAllGather");
    case OpKind::broadcast:
      return check(nccl_.broadcast(item.in, item.out, item.count, dtype, root, comm_, stream), "ncclBroadcast");
    case OpKind::gather:
    case OpKind::scatter:
      return deal(signature, item);
    default:
      throw Unsupported(text(name_of(signature.kind), ": not on backend nccl"));
  }
}

/// gather and scatter: messages between the root and each rank, itself included.
void NcclEngine::deal(const Signature& signature, const Item& item) {
  const int dtype = nccl_dtype(signature.dtype);
  const std::size_t part = item.count * size_of(signature.dtype);
  const bool gathers = signature.kind == OpKind::gather, is_root = rank() == signature.root;
  void* const stream = reinterpret_cast<void*>(stream_->native());
  const std::byte* own_place = nullptr;
  if (is_root) own_place = (gathers ? item.out : item.in) + part * static_cast<std::size_t>(rank());
  const bool in_place = is_root && (gathers ? item.in : item.out) == own_place;
  if (is_root) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank() && in_place) continue;
      const std::size_t at = part * static_cast<std::size_t>(peer);
      if (gathers)
        check(nccl_.recv(item.out + at, item.count, dtype, peer, comm_, stream), "ncclRecv");
      else
        check(nccl_.send(item.in + at, item.count, dtype, peer, comm_, stream), "ncclSend");
    }
  }
  if (in_place) return;
  if (gathers)
    check(nccl_.send(item.in, item.count, dtype, signature.root, comm_, stream), "ncclSend");
  else
    check(nccl_.recv(item.out, item.count, dtype, signature.root, comm_, stream), "ncclRecv");
}

Messenger& NcclEngine::messenger() { throw Unsupported("send, recv: not on backend nccl; use a collective"); }

void NcclEngine::check(int result, const char* what) {
  if (result == NcclLibrary::kSuccess || result == NcclLibrary::kInProgress) return;
  throw CudaError(text(during_, ": ", what, ": ", nccl_.get_error_string(result), ": ", nccl_.get_last_error(comm_)));
}

/// Waits until NCCL has completed the call on the host.
void NcclEngine::finish_call(const char* what) {
  for (int turn = 0; look_around(what) != NcclLibrary::kSuccess; ++turn)
    if (turn > kSpins) std::this_thread::sleep_for(kNap);
}

/// The state of NCCL's communicator, unless it is time to give up.
int NcclEngine::look_around(const char* what) {
  if (closing_) throw Error(text("communicator was closed while ", during_, " was running"));
  check_interrupt();
  int state = NcclLibrary::kSuccess;
  check(nccl_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
  const bool is_remote = state == NcclLibrary::kRemoteError;
  if (!is_remote) check(state, what);
  const auto loss = lost();
  const bool has_died = loss && loss->fate == net::Fate::died;
  const bool is_missed = has_died || is_remote;
  // A dead rank may have finished its part. If NCCL reports a missing rank, the sockets identify it.
  if (is_missed && !std::exchange(has_last_words_, true))
    deadline_ = std::min(deadline_, Clock::now() + kNcclLastWords);
  if (suspended_ && !has_last_words_) restart_clock();
  const bool is_late = Clock::now() >= deadline_;
  if (loss && is_missed && (is_late || (has_died && is_remote)))
    throw PeerLost(loss->rank, text("rank ", loss->rank, has_died ? " died; " : " left; ", during_, " cannot finish"));
  if (!is_late) return state;
  check(state, what);
  throw Timeout(text(during_, ": rank ", rank(), " waited ", options_.timeout_s, " s, ", what,
                     "; all ranks have entered it, but one, the link to it, or a stream that it comes after may have "
                     "stopped",
                     loss ? text("; rank ", loss->rank, " has left meanwhile") : ""));
}

/// A rank that died, or else one that left, which may have done its part before.
std::optional<net::Loss> NcclEngine::lost() const {
  const auto first = watched_->lost();
  if (!first || first->fate == net::Fate::died) return first;
  for (int rank = 0; rank < world_size(); ++rank)
    if (watched_->fate(rank) == net::Fate::died) return net::Loss{rank, net::Fate::died};
  return first;
}

void NcclEngine::restart_clock() {
  has_last_words_ = false;
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout());
}

void NcclEngine::abort() noexcept {
  auto* const comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return;
  try {
    const device::CurrentDevice current(*device_);  // else this thread would start device 0
    nccl_.comm_abort(comm);
  } catch (const Error&) {  // the device is lost, and all that was on it
  }
}

void NcclEngine::close() noexcept {
  closing_ = true;
  control_.close();
}

void NcclEngine::suspend_deadline(bool suspended) {
  if (suspended_.exchange(suspended) == suspended) return;  // control counts them
  if (suspended)
    control_.suspend_deadline();
  else
    control_.resume_deadline();
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& control, std::shared_ptr<net::Mesh> watched,
                                                     std::shared_ptr<device::Device> device, const NcclLibrary& nccl,
                                                     const NcclOptions& options) {
  return make_communicator([&control, watched = std::move(watched), device = std::move(device), &nccl, options,
                            made = false](SymmetricMemory&) mutable -> std::unique_ptr<Engine> {
    if (std::exchange(made, true)) throw Unsupported("duplicate: split a communicator of backend nccl instead");
    return std::make_unique<NcclEngine>(control, watched, device, nccl, options);
  });
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& control, std::shared_ptr<net::Mesh> watched,
                                                     int device, const std::string& library,
                                                     const NcclOptions& options) {
  const NcclLibrary& nccl = NcclLibrary::load(library);
  return make_nccl_communicator(control, std::move(watched), device::make_cuda_device(device), nccl, options);
}

}  // namespace zcomm::coll
