// Running operations by NCCL (coll/cuda/nccl_engine.hpp).
#include "coll/cuda/nccl_engine.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr double kLastCalls_s = 2.0;                      // at the end, for pending calls and for their comparison
constexpr std::chrono::milliseconds kNcclLastWords{500};  // while it connects, and a rank has died
constexpr std::chrono::milliseconds kNcclJoins{2000};     // or has left, maybe because it has joined already
constexpr double kNcclFarewell_s = 2.0;

/// The text that ranks compare in a barrier, without the call site, which may differ.
std::string identity(Signature signature) {
  signature.site[0] = '\0';
  return describe(signature);
}

/// The guard finds it first: this is for a device that stops while all else goes on.
double backstop_s(double timeout_s) { return 2 * timeout_s + 5; }

}  // namespace

NcclEngine::NcclEngine(const NcclHosts& hosts, std::shared_ptr<net::Mesh> watched,
                       std::shared_ptr<device::Device> device, const NcclLibrary& nccl, const NcclOptions& options)
    : control_(hosts.control),
      guard_control_(hosts.guard),
      watched_(std::move(watched)),
      device_(std::move(device)),
      nccl_(nccl),
      options_(options),
      messenger_(hosts.messages == nullptr
                     ? nullptr
                     : std::make_unique<NcclMessenger>(*hosts.messages, watched_, device_, nccl_, options.timeout_s)),
      guard_(std::make_shared<TrailingGuard>(guard_control_, watched_, WaitTimes{.timeout_s = options.timeout_s},
                                             options.round_s)),
      device_liveness_(
          std::make_shared<DeviceLiveness>(device_, guard_, control_.rank(), backstop_s(options.timeout_s))),
      tickets_(device_liveness_),
      stream_(device_->make_stream()),
      comm_(hosts.joined ? hosts.joined : std::make_shared<NcclComm>(device_, nccl)) {
  if (hosts.joined)
    splits_ = true;
  else
    connect();
  guard_->start(*this);
}

NcclEngine::~NcclEngine() {
  guard_->leave(patience_s());
  const bool settled = guard_->settle();
  guard_->stop();
  if (const std::string words = guard_->unreported(); !words.empty())
    post_notice(text("found when the communicator was closed: ", words));
  if (!settled || !comm_->finalize(std::min(kNcclFarewell_s, options_.timeout_s))) comm_->abort();
}

double NcclEngine::patience_s() const { return std::min(kLastCalls_s, options_.timeout_s / 2); }

void NcclEngine::connect() {
  NcclId id{};
  try {
    if (rank() == 0) id = comm_->make_id();
    const Buffer buffer{id.bytes.data(), id.bytes.size()};
    control_.broadcast({&buffer, 1}, DType::uint8, 0, Call("NCCL's unique id", false));
    auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(options_.timeout_s));
    bool has_last_words = false;
    comm_->init(world_size(), id, rank(), [&] {
      check_interrupt();
      const auto loss = lost();
      const auto grace = loss && loss->fate == net::Fate::died ? kNcclLastWords : kNcclJoins;
      if (loss && !std::exchange(has_last_words, true)) deadline = std::min(deadline, Clock::now() + grace);
      if (Clock::now() < deadline) return;
      if (loss && (loss->fate == net::Fate::died || grace < Seconds(options_.timeout_s)))
        throw PeerLost(loss->rank, text(net::describe(*loss), "; init of NCCL"));
      throw Timeout(text("init of NCCL: rank ", rank(), " waited ", options_.timeout_s, " s for all ranks to join it",
                         loss ? text("; rank ", loss->rank, " has left meanwhile") : ""));
    });
  } catch (const CudaError& error) {
    throw CudaError(text("init of NCCL: ", error.what()));
  }
  std::int32_t can_split = nccl_.comm_split != nullptr;
  const Buffer told{&can_split, 1};
  control_.all_reduce({&told, 1}, DType::int32, ReduceOp::min, Call("NCCL's split", false));
  splits_ = can_split != 0;
}

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
  const Signature& signature = operation.signature;
  if (closing_) throw Error(text("communicator was closed before ", describe(signature)));
  require_supported(signature);
  if (operation.allocate != nullptr) {
    operation.allocate->refused = std::make_exception_ptr(
        Unsupported("empty: backend nccl has no symmetric memory; use torch.empty(..., device=\"cuda\")"));
    return;
  }
  guard_->throw_again_if_failed(signature);
  fail_together([&] { carry_out(operation); }, signature);
}

void NcclEngine::verify(bool behind) {
  Signature verify;
  set_name(verify, "verify", "");
  guard_->throw_again_if_failed(verify);
  fail_together([&] { guard_->verify(behind); }, verify);
}

/// An error of this rank ends the communicator on all ranks. Throws their first one, which may be another rank's.
template <class Function>
void NcclEngine::fail_together(const Function& function, const Signature& during) {
  try {
    function();
  } catch (const CudaError& error) {
    guard_->fail(std::make_exception_ptr(CudaError(text(describe(during), ": ", error.what()))));
  } catch (...) {
    guard_->fail(std::current_exception(), closing_);
  }
  if (!guard_->has_failed()) return;
  stop();
  guard_->throw_if_failed(during);
}

void NcclEngine::carry_out(Operation& operation) {
  const OpKind kind = operation.signature.kind;
  if (!moves_data(kind) && kind != OpKind::barrier) {
    guard_->begin(operation, nullptr);
    enter(operation);
    if (operation.split != nullptr) split(operation);
    return guard_->ended();
  }
  const auto ticket = tickets_.of(operation);
  if (const auto& oldest = in_flight_[next_]) device_liveness_->wait(oldest->end(), oldest->signature);
  guard_->begin(operation, ticket);
  running_ = &operation.signature;
  if (kind == OpKind::barrier) {
    guard_->waits_on_host();
    enter(operation);
    guard_->launching();
  }
  stream_->wait(ticket->ready());
  if (kind == OpKind::barrier)
    join_streams();
  else
    launch(operation);
  stream_->record(ticket->end());
  guard_->launched();
  in_flight_[next_] = ticket;
  next_ = (next_ + 1) % kInFlight;
  if (!operation.async) ticket->order(std::nullopt);
}

/// The streams' part of a barrier: later work of each rank's stream runs after the earlier work of all.
void NcclEngine::join_streams() {
  if (!token_) token_ = device_->allocate(sizeof(float));
  launch_group([this] {
    void* const stream = reinterpret_cast<void*>(stream_->native());
    comm_->check(nccl_.all_reduce(token_.get(), token_.get(), 1, nccl_dtype(DType::uint8),
                                  nccl_op(ReduceOp::max, DType::uint8), native_, stream),
                 "ncclAllReduce");
  });
}

/// A barrier of the hosts. Throws the errors of `control`.
void NcclEngine::enter(const Operation& operation) {
  const std::string name = identity(operation.signature);
  try {
    control_.barrier(Call(name.c_str(), false, operation.signature.site));
  } catch (const PeerLost& error) {
    // A rank that has failed, or has found a mismatch, leaves. The guard knows why, or will.
    if (watched_->fate(error.rank) != net::Fate::died && guard_->will_fail())
      guard_->throw_if_failed(operation.signature);
    throw;
  }
}

/// All ranks have come; each waits for its device, because NCCL splits only while nothing runs.
void NcclEngine::split(const Operation& operation) {
  NcclSplit& split = *operation.split;
  for (const auto& ticket : in_flight_)
    if (ticket) device_liveness_->wait(ticket->end(), ticket->signature);
  split.made = comm_->split(split.color, split.key, [&] { look_meanwhile(operation.signature); });
}

void NcclEngine::launch(const Operation& operation) {
  if (adds_by_kernel(operation.signature)) return add_parts(operation);
  launch_group([&] {
    int peer = 0;
    for (const Item& item : operation.items.all()) launch_item(operation.signature, item, peer++);
  });
}

/// The NCCL calls of `calls` as one. While it connects ranks, the guard may find that one of them has failed.
void NcclEngine::launch_group(const std::function<void()>& calls) {
  comm_->group(
      [&](NcclLibrary::Comm native) {
        native_ = native;
        calls();
      },
      [this] { look_meanwhile(*running_); });
}

void NcclEngine::look_meanwhile(const Signature& running) {
  if (closing_) throw Error(text("communicator was closed while ", describe(running), " was running"));
  check_interrupt();
  guard_->throw_if_failed(running);
}

void NcclEngine::send(const void* data, std::size_t count, int dtype, int peer) {
  void* const stream = reinterpret_cast<void*>(stream_->native());
  comm_->check(nccl_.send(data, count, dtype, peer, native_, stream), "ncclSend");
}

void NcclEngine::recv(void* data, std::size_t count, int dtype, int peer) {
  void* const stream = reinterpret_cast<void*>(stream_->native());
  comm_->check(nccl_.recv(data, count, dtype, peer, native_, stream), "ncclRecv");
}

/// reduce_scatter: the same bytes on the links as ncclReduceScatter, but sums in rank order, in fp32 for 2-byte floats.
void NcclEngine::add_parts(const Operation& operation) {
  const Signature& signature = operation.signature;
  const auto items = operation.items.all();
  const std::size_t size = size_of(signature.dtype);
  make_room(PartPieces::buffer_nbytes(items, world_size(), size, options_.received_nbytes));
  receives_ = tickets_.of(operation);
  PartPieces passes(items, world_size(), size, received_nbytes_);
  for (auto pieces = passes.next(); !pieces.empty(); pieces = passes.next()) {
    if (world_size() > 1) launch_group([&] { swap_pieces(signature, pieces); });
    for (const PartPiece& piece : pieces) add_piece(signature, piece);
  }
}

/// Grows the buffer of received pieces, after the last operation that uses it.
void NcclEngine::make_room(std::size_t nbytes) {
  if (nbytes <= received_nbytes_) return;
  if (receives_) device_liveness_->wait(receives_->end(), receives_->signature);
  received_nbytes_ = 0;
  received_.reset();  // before the larger one exists
  received_ = device_->allocate(nbytes);
  received_nbytes_ = nbytes;
}

/// Sends each rank its elements of these pieces, and receives this rank's.
void NcclEngine::swap_pieces(const Signature& signature, std::span<const PartPiece> pieces) {
  const int dtype = nccl_dtype(signature.dtype);
  const std::size_t size = size_of(signature.dtype);
  for (const PartPiece& piece : pieces)
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      const std::size_t first = piece.item->count * static_cast<std::size_t>(peer) + piece.begin;
      send(piece.item->in + first * size, piece.count, dtype, peer);
      recv(static_cast<std::byte*>(received_.get()) + piece.place(peer, rank()), piece.count, dtype, peer);
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
    if (item.count != 0) send(item.in, item.count, dtype, peer);
    if (item.out_count != 0) recv(item.out, item.out_count, dtype, peer);
    return;
  }
  if (item.count == 0) return;
  switch (signature.kind) {
    case OpKind::all_reduce:
      return comm_->check(nccl_.all_reduce(item.in, item.out, item.count, dtype, op, native_, stream), "ncclAllReduce");
    case OpKind::reduce:
      return comm_->check(nccl_.reduce(item.in, item.out, item.count, dtype, op, root, native_, stream), "ncclReduce");
    case OpKind::reduce_scatter:
      return comm_->check(nccl_.reduce_scatter(item.in, item.out, item.count, dtype, op, native_, stream),
                          "ncclReduceScatter");
    case OpKind::all_gather:
      return comm_->check(nccl_.all_gather(item.in, item.out, item.count, dtype, native_, stream), "ncclAllGather");
    case OpKind::broadcast:
      return comm_->check(nccl_.broadcast(item.in, item.out, item.count, dtype, root, native_, stream),
                          "ncclBroadcast");
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
  const std::byte* own_place = nullptr;
  if (is_root) own_place = (gathers ? item.out : item.in) + part * static_cast<std::size_t>(rank());
  const bool in_place = is_root && (gathers ? item.in : item.out) == own_place;
  if (is_root) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank() && in_place) continue;
      const std::size_t at = part * static_cast<std::size_t>(peer);
      if (gathers)
        recv(item.out + at, item.count, dtype, peer);
      else
        send(item.in + at, item.count, dtype, peer);
    }
  }
  if (in_place) return;
  if (gathers)
    send(item.in, item.count, dtype, signature.root);
  else
    recv(item.out, item.count, dtype, signature.root);
}

Messenger& NcclEngine::messenger() {
  if (messenger_ == nullptr)
    throw Unsupported("send, recv: this communicator of backend nccl was made without messages; use a collective");
  return *messenger_;
}

/// A rank that died, or else one that left, which may have done its part before.
std::optional<net::Loss> NcclEngine::lost() const {
  const auto first = watched_->lost();
  if (!first || first->fate == net::Fate::died) return first;
  for (int rank = 0; rank < world_size(); ++rank)
    if (watched_->fate(rank) == net::Fate::died) return net::Loss{rank, net::Fate::died};
  return first;
}

bool NcclEngine::look() { return comm_->state() != NcclLibrary::kRemoteError; }

void NcclEngine::raise_missing() { comm_->check(NcclLibrary::kRemoteError, "its kernels"); }

/// From any thread.
void NcclEngine::stop() noexcept {
  comm_->abort();
  control_.close();  // the others must not wait for this rank any more
}

void NcclEngine::fail(const std::string& why) noexcept {
  guard_->fail(std::make_exception_ptr(Error(why)));
  stop();
}

void NcclEngine::close() noexcept {
  closing_ = true;
  if (messenger_) messenger_->close();
  guard_->leave(patience_s());
  device_liveness_->close();
  control_.close();
}

void NcclEngine::suspend_deadline(bool suspended) {
  if (suspended_.exchange(suspended) == suspended) return;  // control counts them
  device_liveness_->suspend_deadline(suspended);
  guard_->suspend_deadline(suspended);
  if (messenger_) messenger_->suspend_deadline(suspended);
  for (Communicator* host : {&control_, &guard_control_}) {
    if (suspended)
      host->suspend_deadline();
    else
      host->resume_deadline();
  }
}

std::unique_ptr<Communicator> make_nccl_communicator(const NcclHosts& hosts, std::shared_ptr<net::Mesh> watched,
                                                     std::shared_ptr<device::Device> device, const NcclLibrary& nccl,
                                                     const NcclOptions& options) {
  return make_communicator([hosts, watched = std::move(watched), device = std::move(device), &nccl, options,
                            made = false](SymmetricMemory&) mutable -> std::unique_ptr<Engine> {
    if (std::exchange(made, true)) throw Unsupported("duplicate: split a communicator of backend nccl instead");
    return std::make_unique<NcclEngine>(hosts, watched, device, nccl, options);
  });
}

std::unique_ptr<Communicator> make_nccl_communicator(const NcclHosts& hosts, std::shared_ptr<net::Mesh> watched,
                                                     int device, const std::string& library,
                                                     const NcclOptions& options) {
  const NcclLibrary& nccl = NcclLibrary::load(library);
  return make_nccl_communicator(hosts, std::move(watched), device::make_cuda_device(device), nccl, options);
}

}  // namespace zcomm::coll
