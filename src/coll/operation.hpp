// Operation: one collective call, from the caller's arguments to the request that an engine runs.
//
// Operations live in the ring of the Executor and are refilled: up to kInline buffers take no memory, longer lists
// borrow a vector from the queue's spares. Arguments are checked on the calling thread, before anything is queued.
// Thread rule: filled by the caller under the executor's lock, then owned by the thread that runs it.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coll/signature.hpp"
#include "coll/symmetric_memory.hpp"
#include "device/device.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/work.hpp"

namespace zcomm::coll {

class NcclComm;

/// One tensor of a list; for all_to_all, the exchange with one rank.
struct Item {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::size_t count = 0;      ///< of the whole if inputs are outputs, else of one rank's part; all_to_all: of `in`
  std::size_t out_count = 0;  ///< all_to_all: of `out`
  const Allocation* in_home = nullptr;  ///< the symmetric allocation it lies in, if any
  const Allocation* out_home = nullptr;
};

/// The signatures of one operation, by rank.
using SignatureOf = std::function<const Signature&(int rank)>;

/// Vectors that no list uses at the moment; the maximum number of long lists in flight so far.
using SpareItems = std::vector<std::vector<Item>>;

class ItemList {
 public:
  void clear() { count_ = 0, spill_.clear(); }
  void add(const Item& item, SpareItems& spares);
  /// Empties the list and returns its vector, if it has one, to the spares.
  void give_back(SpareItems& spares);
  std::span<const Item> all() const {
    return spill_.empty() ? std::span<const Item>(inline_).first(count_) : std::span<const Item>(spill_);
  }

 private:
  static constexpr std::size_t kInline = 16;
  std::array<Item, kInline> inline_{};
  std::size_t count_ = 0;
  std::vector<Item> spill_;  // all items once there are more than kInline
};

/// The result of allocate() and allocate_shared().
struct AllocateResult {
  std::shared_ptr<SymmetricBuffer> buffer;
  std::exception_ptr refused;
};

/// This rank's place in a split, and its part (coll/cuda/nccl_comm.hpp).
struct NcclSplit {
  int color, key;
  std::shared_ptr<NcclComm> made;
};

/// One tensor's buffers of a call with a codec (zcomm::Coding); null: none.
struct CodingItem {
  std::byte* error = nullptr;
  std::byte* server_error = nullptr;
  const std::uint8_t* mask = nullptr;
};

/// The rest of a Coding; the signature has the codec.
struct OperationCoding {
  float keep = 0.0f;
  DType error_dtype = DType::float32;
  bool differences = false;
  std::vector<CodingItem> items;  ///< one for each tensor; keeps its capacity
};

/// See Communicator::verify.
enum class Verify : std::uint8_t { no, all, earlier };

struct Operation {
  Signature signature;
  ItemList items;
  OperationCoding coding;    ///< if the signature has one
  std::vector<OwnPart> own;  ///< of reduce_scatter's only item; keeps its capacity
  AllocateResult* allocate = nullptr;
  NcclSplit* split = nullptr;
  std::shared_ptr<device::Event> after;  ///< not null: only wait for this (local, no signature)
  std::shared_ptr<Completion> awaited;   ///< the same for another communicator's operation
  std::string reason;                    ///< not empty: only fail with it (local, no signature)
  Verify verify = Verify::no;            ///< otherwise: only wait for the comparison (no signature)
  std::shared_ptr<Completion> completion;
  bool async = true;
  std::shared_ptr<DeviceTail> tail;  ///< of engines that end on a device (Engine::prepare)
};

/// A caller's arguments. In-place operations: `in` equals `out`.
struct Request {
  OpKind kind;
  std::span<const ConstBuffer> in;
  std::span<const Buffer> out;
  DType dtype = DType::uint8;
  DType out_dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  bool accumulate = false;
  int root = -1;
  Call call{};
  std::span<const OwnPart> own{};
  std::size_t nbytes = 0;
  AllocateResult* allocate = nullptr;
  const Coding* coding = nullptr;
  NcclSplit* split = nullptr;
};

/// Throws InvalidArgument naming the wrong argument.
void check(const Request& request, int rank, int world_size, const SymmetricMemory& memory);
/// Of a request with a codec, after check(). coded_parts: as Engine has it.
void check_coding(const Request& request, int rank, int world_size, int coded_parts);

/// Sets all of `operation` but its completion and sequence number.
void fill(Operation& operation, SpareItems& spares, const Request& request, int rank, int world_size,
          const SymmetricMemory& memory);

/// Sets buffers, counts and identity of a signature from the items of one tensor each, with their kind and dtype.
void count_items(Signature& signature, std::span<const Item> items, int rank, int world_size);

/// Copies the parts of this rank's own chunk that lie elsewhere to their final addresses, and clears the list of parts.
void bring_home(Operation& operation, int rank);

}  // namespace zcomm::coll
