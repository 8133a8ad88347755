// The rings shared with the kernel: the same structures as in its headers, indices that wrap around, withdrawals.
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "mem/io/kernel_ring.hpp"
#include "test.hpp"

namespace kernel_ring_test {

using namespace zcomm;
using namespace zcomm::mem;
using namespace zcomm::mem::ring_abi;
using ring_abi::Completion;  // mem::Completion is another struct

namespace {

/// Prints a line and returns false if the kernel refuses rings.
bool open(KernelRing& ring, unsigned entries) {
  const int code = ring.open(entries, 0);
  if (code != 0) std::cout << "     no io_uring here, errno " << code << ": skipped\n";
  return code == 0;
}

void add_nop(KernelRing& ring, std::uint64_t tag) {
  Submission* made = ring.add();
  EXPECT_TRUE(made != nullptr);
  if (made == nullptr) return;
  made->opcode = kNop;
  made->user_data = tag;
}

}  // namespace

static_assert(sizeof(Submission) == 64 && sizeof(Completion) == 16 && sizeof(Parameters) == 120);
static_assert(offsetof(Submission, user_data) == 32 && offsetof(Parameters, completion) == 80);

#if __has_include(<linux/io_uring.h>)
static_assert(sizeof(Submission) == sizeof(io_uring_sqe) && sizeof(Completion) == sizeof(io_uring_cqe));
static_assert(offsetof(Submission, fd) == offsetof(io_uring_sqe, fd));
static_assert(offsetof(Submission, offset) == offsetof(io_uring_sqe, off));
static_assert(offsetof(Submission, address) == offsetof(io_uring_sqe, addr));
static_assert(offsetof(Submission, nbytes) == offsetof(io_uring_sqe, len));
static_assert(offsetof(Submission, operation_flags) == offsetof(io_uring_sqe, poll_events));
static_assert(offsetof(Submission, user_data) == offsetof(io_uring_sqe, user_data));
static_assert(offsetof(Completion, result) == offsetof(io_uring_cqe, res));
static_assert(sizeof(Parameters) == sizeof(io_uring_params));
static_assert(offsetof(Parameters, features) == offsetof(io_uring_params, features));
static_assert(offsetof(Parameters, submission) == offsetof(io_uring_params, sq_off));
static_assert(offsetof(Parameters, completion) == offsetof(io_uring_params, cq_off));
static_assert(offsetof(SubmissionOffsets, array) == offsetof(io_sqring_offsets, array));
static_assert(offsetof(CompletionOffsets, completions) == offsetof(io_cqring_offsets, cqes));
static_assert(static_cast<int>(kNop) == IORING_OP_NOP && static_cast<int>(kPollAdd) == IORING_OP_POLL_ADD);
static_assert(kEnterGetEvents == IORING_ENTER_GETEVENTS);
static_assert(kOffsetRings == IORING_OFF_SQ_RING && kOffsetSubmissions == IORING_OFF_SQES);
#ifdef IORING_FEAT_SINGLE_MMAP
static_assert(kFeatureSingleMmap == IORING_FEAT_SINGLE_MMAP);
#endif
#ifdef IO_URING_OP_SUPPORTED
static_assert(static_cast<int>(kRead) == IORING_OP_READ && static_cast<int>(kWrite) == IORING_OP_WRITE);
static_assert(offsetof(Probe, operations) == sizeof(io_uring_probe) && sizeof(Probe::Operation) == 8);
static_assert(static_cast<int>(kRegisterProbe) == IORING_REGISTER_PROBE && kProbeSupported == IO_URING_OP_SUPPORTED);
#endif
#ifdef IORING_SETUP_R_DISABLED
static_assert(kSetupDisabled == IORING_SETUP_R_DISABLED);
static_assert(static_cast<int>(kRegisterEnableRings) == IORING_REGISTER_ENABLE_RINGS);
#endif
#ifdef IORING_SETUP_DEFER_TASKRUN
static_assert(kSetupSingleIssuer == IORING_SETUP_SINGLE_ISSUER && kSetupDeferTaskrun == IORING_SETUP_DEFER_TASKRUN);
#endif
#endif

TEST(KernelRing, indices_wrap_around_and_each_completion_comes_once) {
  KernelRing ring;
  if (!open(ring, 3)) return;
  EXPECT_TRUE(ring.peek() == nullptr);
  std::uint64_t next = 0, seen = 0;
  for (int round = 0; round < 50; ++round) {
    const auto count = static_cast<unsigned>(round % 4 + 1);
    for (unsigned i = 0; i < count; ++i) add_nop(ring, next++);
    EXPECT_EQ(ring.queued(), count);
    EXPECT_EQ(ring.enter(count), static_cast<int>(count));
    EXPECT_EQ(ring.queued(), 0u);
    while (const Completion* done = ring.peek()) {
      EXPECT_EQ(done->user_data, seen++);
      EXPECT_EQ(done->result, 0);
      ring.pop();
    }
    EXPECT_EQ(seen, next);
  }
}

TEST(KernelRing, a_full_ring_takes_no_more) {
  KernelRing ring;
  if (!open(ring, 4)) return;
  for (std::uint64_t tag = 0; tag < 4; ++tag) add_nop(ring, tag);
  EXPECT_TRUE(ring.add() == nullptr);
  EXPECT_EQ(ring.enter(4), 4);
  EXPECT_TRUE(ring.add() != nullptr);
}

TEST(KernelRing, what_is_withdrawn_is_never_executed) {
  KernelRing ring;
  if (!open(ring, 4)) return;
  for (std::uint64_t tag = 0; tag < 3; ++tag) add_nop(ring, tag);
  EXPECT_EQ(ring.withdraw()->user_data, 2u);
  EXPECT_EQ(ring.withdraw()->user_data, 1u);
  add_nop(ring, 7);
  EXPECT_EQ(ring.enter(2), 2);
  for (const std::uint64_t tag : {0u, 7u}) {
    EXPECT_EQ(ring.peek()->user_data, tag);
    ring.pop();
  }
  EXPECT_TRUE(ring.peek() == nullptr);
  EXPECT_TRUE(ring.withdraw() == nullptr);
}

TEST(KernelRing, a_refusal_is_its_errno_and_another_try_may_work) {
  KernelRing ring;
  if (!open(ring, 1)) return;
  KernelRing other;
  EXPECT_EQ(other.open(0, 0), EINVAL);
  EXPECT_EQ(other.open(1u << 30, 0), EINVAL);
  EXPECT_EQ(other.open(8, 0), 0);
  EXPECT_TRUE(other.supports(kRead, kWrite) || !other.supports(kNop, kNop));
  EXPECT_FALSE(other.supports(static_cast<Opcode>(255), kNop));
}

}  // namespace kernel_ring_test
