// KernelRing: io_uring by the kernel's documented ABI; the build needs neither a library nor kernel headers.
//
// Two rings are shared with the kernel. We fill submissions and move their tail; the kernel takes them only inside of
// io_uring_enter (no polling thread is requested), so a submission that it has not taken can still be withdrawn. The
// kernel fills completions and moves their tail; we move their head. A side reads the other's index with acquire and
// writes its own with release. Thread rule: one thread at a time. Source: io_uring(7), io_uring_setup(2),
// io_uring_enter(2), io_uring_register(2).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/unique_fd.hpp"

namespace zcomm::mem {

/// The kernel's structures and numbers (tests compare them with <linux/io_uring.h> if it exists).
namespace ring_abi {

struct Submission {  // io_uring_sqe
  std::uint8_t opcode, flags;
  std::uint16_t priority;
  std::int32_t fd;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t nbytes;
  std::uint32_t operation_flags;
  std::uint64_t user_data;
  std::uint64_t unused[3];
};

struct Completion {  // io_uring_cqe
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};

struct SubmissionOffsets {  // io_sqring_offsets
  std::uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
  std::uint64_t user_address;
};

struct CompletionOffsets {  // io_cqring_offsets
  std::uint32_t head, tail, mask, entries, overflow, completions, flags, reserved;
  std::uint64_t user_address;
};

struct Parameters {  // io_uring_params
  std::uint32_t submission_entries, completion_entries, flags, thread_cpu, thread_idle, features, workers_fd;
  std::uint32_t reserved[3];
  SubmissionOffsets submission;
  CompletionOffsets completion;
};

struct Probe {  // io_uring_probe
  struct Operation {
    std::uint8_t opcode, reserved;
    std::uint16_t flags;
    std::uint32_t reserved2;
  };
  std::uint8_t last_opcode, count;
  std::uint16_t reserved;
  std::uint32_t reserved2[3];
  Operation operations[256];
};

enum Opcode : std::uint8_t { kNop = 0, kPollAdd = 6, kRead = 22, kWrite = 23 };
inline constexpr std::uint32_t kSetupDisabled = 1u << 6, kSetupSingleIssuer = 1u << 12, kSetupDeferTaskrun = 1u << 13;
inline constexpr std::uint32_t kFeatureSingleMmap = 1u << 0;
inline constexpr std::uint32_t kEnterGetEvents = 1u << 0;
inline constexpr std::uint32_t kRegisterProbe = 8, kRegisterEnableRings = 12;
inline constexpr std::uint16_t kProbeSupported = 1u << 0;
inline constexpr std::int64_t kOffsetRings = 0, kOffsetSubmissions = 0x10000000;
inline constexpr long kCallSetup = 425, kCallEnter = 426, kCallRegister = 427;  // the same on x86-64, Arm and RISC-V

}  // namespace ring_abi

class KernelRing {
 public:
  using Submission = ring_abi::Submission;
  using Completion = ring_abi::Completion;

  KernelRing() = default;
  KernelRing(const KernelRing&) = delete;
  KernelRing& operator=(const KernelRing&) = delete;
  ~KernelRing();

  /// Room for at least `entries` submissions and twice as many completions. Returns 0, or the errno of the refusal
  /// (EOPNOTSUPP: the kernel is older than 5.4); may be called again after a refusal.
  int open(unsigned entries, std::uint32_t setup_flags);
  /// Starts a ring opened with kSetupDisabled, which then belongs to the calling thread. 0 or errno.
  int enable();
  /// False also if the kernel does not report it (before 5.6).
  bool supports(ring_abi::Opcode first, ring_abi::Opcode second) const;

  /// A zeroed submission to fill; it counts as queued. nullptr while the ring is full.
  Submission* add();
  /// Submissions that the kernel has not taken.
  unsigned queued() const;
  /// Withdraws the last queued submission; it is never executed. nullptr: none is queued.
  const Submission* withdraw();
  /// Offers the queued submissions to the kernel, and waits for `completions` more results if it took all of them.
  /// `look`: deferred completions are processed in any case. Returns the number of submissions taken, or -errno.
  int enter(unsigned completions, bool look = false);
  /// The oldest completion, or nullptr. Valid until pop().
  const Completion* peek() const;
  void pop();

 private:
  struct Mapping {
    void* memory = nullptr;
    std::size_t nbytes = 0;
  };
  int map(Mapping& mapping, std::size_t nbytes, std::int64_t offset);
  static void unmap(Mapping& mapping) noexcept;

  UniqueFd fd_;
  Mapping rings_, entries_;
  Submission* submissions_ = nullptr;
  Completion* completions_ = nullptr;
  unsigned *submission_head_ = nullptr, *submission_tail_ = nullptr;
  unsigned *completion_head_ = nullptr, *completion_tail_ = nullptr;
  unsigned submission_entries_ = 0, submission_mask_ = 0, completion_mask_ = 0;
};

}  // namespace zcomm::mem
