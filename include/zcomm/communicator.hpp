// Communicator: collectives and messages between the ranks of a job (decisions D1, D2, D5, D6).
//
// Ranks may be threads of one process (tests) or processes; the code is the same.
// Invariants: operations of one communicator run in call order on every rank; before bytes move (over NCCL: behind
// them, see verify), all ranks have compared signatures; after any failure the communicator is poisoned and each later
// call throws that failure. Thread rule: any thread may call; collectives are serialised by the communicator, and every
// rank must issue them in the same order. send and recv are not part of that order: they match by (peer, tag), in call
// order per pair and tag. Source: owner-computes reduction, docs/internals/algorithms.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zcomm/codec.hpp"
#include "zcomm/dtype.hpp"
#include "zcomm/work.hpp"

namespace zcomm {

namespace net {
class Mesh;
}
namespace device {
class Event;
}
namespace coll {
class NcclComm;
}

/// `count` elements at `data`.
struct Buffer {
  void* data;
  std::size_t count;
};
struct ConstBuffer {
  const void* data;
  std::size_t count;
};

/// Elements [begin, begin + count) of this rank's own chunk of an input, stored at `data` instead.
struct OwnPart {
  std::size_t begin, count;
  const void* data;
};

/// The form in which a collective sends its elements ([Note: encoded collectives] in coll/encoded.hpp). Ranks agree on
/// `codec`, on `differences` and on whether there are masks; the rest is each rank's own. Elements are f32, bf16 or
/// f16.
///
/// errors: none, or one for each buffer: the residue that is added before encoding, and then replaced
/// ([Note: error feedback] in device/codec.hpp). Its count is the elements that this rank encodes: of reduce_scatter
/// coded_parts() * out.count, of all_gather in.count, of all_reduce the tensor's; with int8 bytes, see error_count.
/// server_errors: only of all_reduce, of the sum's second encoding; count: all_reduce_part's of this rank.
/// masks: only of all_reduce with sign; bit k % 8 of byte k / 8 belongs to element k. 0: counts as 0, decodes to 0.
/// differences: only of all_gather: `out` holds the decoded values of the last call, the same bits on all ranks, and
/// only the difference to them is sent; `in` must not alias it.
struct Coding {
  Codec codec{};
  float keep = 0.0f;                   ///< error = keep * error + (1 - keep) * residue; in [0, 1)
  DType error_dtype = DType::float32;  ///< or bfloat16, or int8: encoded bytes, aligned to kEncodedAlign
  std::span<const Buffer> errors{}, server_errors{};
  std::span<const std::uint8_t* const> masks{};
  bool differences = false;
};

/// Elements [begin, begin + count) of a tensor of `count` elements, which rank `rank` sums in all_reduce with a codec:
/// ceil(count / world_size), rounded up to a multiple of kCodecBlock; the last ranks have fewer or none.
struct TensorPart {
  std::size_t begin, count;
};
TensorPart all_reduce_part(std::size_t count, int rank, int world_size);

/// The count of an error buffer for `count` elements that are encoded in parts of `step`, the last perhaps shorter:
/// `count`, or with int8 the bytes of all encoded parts, one behind the other.
std::size_t error_count(DType error_dtype, std::size_t count, std::size_t step);

/// Which ranks of a job the ranks of a communicator are, as a text and by rank.
struct RanksInJob {
  std::string text;
  std::vector<int> of;
};

/// Options of one call. Strings must live as long as the operation (pass literals or interned ones).
struct Call {
  const char* name = "";  ///< appears in errors, and must be equal on all ranks
  const char* site = "";  ///< call site in the program ("train.py:42"), for errors; may differ between ranks
  bool async = true;      ///< false: done when the call returns (on the calling thread if nothing is queued)
  /// For send and recv: the caller's name of an element that the DType stands in for ("complex64", moved as bytes).
  /// Both sides must pass the same name.
  const char* element = "";
  /// For buffers on a device: the native handle of the stream on which they become ready, and which may use them again
  /// after wait() (or after a call that is not async). Ignored otherwise.
  std::uintptr_t stream = 0;
  /// Of all_reduce, reduce and reduce_scatter; the same on all ranks.
  ReduceOrder order = ReduceOrder::any;

  Call() = default;
  Call(const char* of_name, bool is_async = true, const char* from = "") : name(of_name), site(from), async(is_async) {}
};
inline const Call kBlocking{"", false};

struct CommOptions {
  double timeout_s = 600.0;                ///< deadline of every operation, from the moment it starts
  std::size_t slot_nbytes = 256 << 10;     ///< staging slot for private tensors
  int slot_count = 4;                      ///< staging slots per rank
  std::size_t one_shot_nbytes = 16 << 10;  ///< up to this size an operation's data travels in its entry
  double limit_s = 0.0;                    ///< above timeout_s: the deadline for ranks that show life
  double warn_s = 60.0;                    ///< after this time a waiting rank posts a notice of the late ones, once
};

/// Memory that every rank of the host has mapped. Freed when the last owner on this rank drops it.
class SymmetricBuffer {
 public:
  virtual ~SymmetricBuffer() = default;
  virtual std::byte* data() = 0;           ///< this rank's own memory
  virtual std::byte* peer(int rank) = 0;   ///< rank's memory as mapped by this process
  virtual std::size_t nbytes() const = 0;  ///< of one rank
};

/// Bytes held by the communicator on this rank, for accounting.
struct CommMemory {
  std::size_t symmetric_nbytes;  ///< user allocations, own part
  std::size_t shared_nbytes;     ///< host-wide allocations (counted once per host: on rank 0 only)
  std::size_t slot_nbytes;       ///< staging slots and control block
  std::size_t allocation_count;  ///< number of allocations so far; constant in the steady state
};

class Communicator {
 public:
  /// Collective: all ranks of `mesh` call it in the same order.
  static std::unique_ptr<Communicator> create(std::shared_ptr<net::Mesh> mesh, CommOptions options = {});
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// Symmetric memory, zero-filled, page aligned. Collective: same nbytes on each rank.
  virtual std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes) = 0;
  /// ONE segment that all ranks of the host map (decision D4): data() == peer(any) contents.
  virtual std::shared_ptr<SymmetricBuffer> allocate_shared(std::size_t nbytes) = 0;

  // Collectives. A list of buffers is one fused operation. With call.async the Work reports its end, and buffers must
  // not be touched until then; otherwise the returned Work is done and the call itself throws errors. Buffers that
  // share memory are refused (InvalidArgument) unless neither is written to or one "may alias" the other, exactly.

  // With `coding`, of all_reduce, reduce_scatter and all_gather, elements travel encoded. Sums and averages only.

  /// Reduces in place.
  virtual Work all_reduce(std::span<const Buffer> buffers, DType dtype, ReduceOp op, const Call& call = {},
                          const Coding* coding = nullptr) = 0;

  /// Reduces into root's buffers; the other ranks' buffers are only read.
  virtual Work reduce(std::span<const Buffer> buffers, DType dtype, ReduceOp op, int root, const Call& call = {}) = 0;

  /// in[i].count == world_size * out[i].count; rank r receives chunk r of the reduction. 2-byte floats accumulate in
  /// fp32.
  /// `out_dtype` is `dtype`, or f32 for f16/bf16 input (then nothing is rounded to 16 bits).
  /// `accumulate`: out += result instead of out = result. out may alias in at chunk `rank`, if dtypes are equal and
  /// without `accumulate`.
  /// `own`: parts of the only buffer of the list, in order, in host memory. Passing them saves copying them to chunk
  /// `rank` of `in`; paths that need the copy make it, so `in` must be writable. out must not overlap in or the parts.
  virtual Work reduce_scatter(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, ReduceOp op,
                              DType out_dtype, bool accumulate, const Call& call = {},
                              std::span<const OwnPart> own = {}, const Coding* coding = nullptr) = 0;

  /// The number of parts that reduce_scatter with a codec encodes: the ranks, or, if ranks share hosts, the hosts: a
  /// host's ranks add exactly, and only the sums of hosts are encoded.
  virtual int coded_parts() const = 0;

  /// Whether passing `own` to reduce_scatter saves copies here.
  virtual bool reads_own_parts() const = 0;

  /// out[i].count == world_size * in[i].count; in may alias out at chunk `rank`.
  virtual Work all_gather(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype,
                          const Call& call = {}, const Coding* coding = nullptr) = 0;

  virtual Work broadcast(std::span<const Buffer> buffers, DType dtype, int root, const Call& call = {}) = 0;

  /// At root out[i].count == world_size * in[i].count; on other ranks `out` is empty. in may alias out at chunk `root`.
  virtual Work gather(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, int root,
                      const Call& call = {}) = 0;

  /// At root in[i].count == world_size * out[i].count; on other ranks `in` is empty. out may alias in at chunk `root`.
  virtual Work scatter(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, int root,
                       const Call& call = {}) = 0;

  /// in[q] goes to rank q, out[q] comes from rank q; world_size buffers each, of any counts, if each sent count equals
  /// its expected count (otherwise CollectiveMismatch naming both ranks and counts). All of in may alias out[rank], if
  /// in[rank] does.
  virtual Work all_to_all(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype,
                          const Call& call = {}) = 0;

  virtual Work barrier(const Call& call = {}) = 0;

  /// Local: later operations start after the work recorded in `event` is done (for example a copy from a device). Not
  /// collective; ranks need not agree on it. It has the deadline of an operation; CudaError and Timeout poison the
  /// communicator, and the other ranks get PeerLost. A later call throws the same error, or its Work does if it was
  /// queued before. Until it is done, record nothing new in `event`.
  virtual Work after(std::shared_ptr<device::Event> event, const Call& call = {}) = 0;

  /// Local: later operations start after the operation of `other`, usually of another communicator, has ended, on its
  /// device too. Does not wait for it. `other` remains the caller's, and may be dropped. The entry has no deadline:
  /// `other` has one. If `other` fails, this communicator is poisoned by an error of the same type that names the cause
  /// (PeerLost: rank -1, because the message's ranks are counted in the other communicator, and the same job_rank), and
  /// its ranks get that cause. Ranks that order two communicators against each other in different ways end at a
  /// deadline.
  virtual Work after(const Work& other, const Call& call = {}) = 0;

  /// Waits until the ranks have compared all calls so far. `behind`: only those before the last verify(), so that a
  /// program which calls it before each update seldom waits. Engines that compare calls before bytes move return at
  /// once; over NCCL a call starts first. Every rank calls it at the same place in its order of calls. Throws the
  /// failure.
  virtual void verify(bool behind) = 0;

  // Messages between two ranks, matched by tag (>= 0), the list as a whole. Both sides pass the same dtype, element and
  // total count, or both get CollectiveMismatch. A small message is sent before its receive is posted.

  virtual Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call = {}) = 0;
  /// src -1: from any rank; `*source` (if given, it must live until the Work is done) receives its rank.
  virtual Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call = {},
                    int* source = nullptr) = 0;

  /// Collective: a second communicator over the same ranks with its own order of calls and thread.
  virtual std::unique_ptr<Communicator> duplicate() = 0;

  /// Collective: splits the devices' communicator of NCCL by ncclCommSplit, when all earlier calls have ended on the
  /// devices. Ranks of one color >= 0 are a part, in order of `key`; `*part` is null for color -1. False, on all ranks
  /// and without a message: it cannot (another backend, or a rank's NCCL before 2.18). A failure poisons it.
  virtual bool split_devices(int color, int key, std::shared_ptr<coll::NcclComm>* part) = 0;

  /// Local: when earlier calls have ended, this rank fails, and all ranks with it: later calls throw an Error with
  /// `reason`, on other ranks behind "rank r failed: ". The Work ends with that Error.
  virtual Work fail(std::string reason) = 0;

  /// The text of `ranks` then ends the messages of failed operations and messages. Before the first call. Duplicates
  /// made later have it, too.
  virtual void describe(RanksInJob ranks) = 0;

  /// While a rank holds at least one suspension, no wait for it (its own included) reaches the deadline; loss of a rank
  /// is still noticed. For slow set-up by one rank. Calls nest.
  virtual void suspend_deadline() = 0;
  virtual void resume_deadline() = 0;

  /// Calls so far only set the communicator up and do not predict which threads will call: see coll/callers.hpp.
  virtual void forget_callers() noexcept {}

  virtual CommMemory memory() const = 0;
  /// Ends pending operations and frees all memory; later calls throw. Not collective, safe after failures.
  virtual void close() noexcept = 0;
};

}  // namespace zcomm
