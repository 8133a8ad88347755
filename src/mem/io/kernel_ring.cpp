#include "mem/io/kernel_ring.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>

namespace zcomm::mem {
namespace {

using namespace ring_abi;

unsigned load_acquire(unsigned* index) { return std::atomic_ref(*index).load(std::memory_order_acquire); }
unsigned load_relaxed(unsigned* index) { return std::atomic_ref(*index).load(std::memory_order_relaxed); }
void store_release(unsigned* index, unsigned value) { std::atomic_ref(*index).store(value, std::memory_order_release); }

}  // namespace

KernelRing::~KernelRing() {
  unmap(entries_);
  unmap(rings_);
}

int KernelRing::map(Mapping& mapping, std::size_t nbytes, std::int64_t offset) {
  void* memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), offset);
  if (memory == MAP_FAILED) return errno;
  mapping = {memory, nbytes};
  return 0;
}

void KernelRing::unmap(Mapping& mapping) noexcept {
  if (mapping.memory != nullptr) ::munmap(mapping.memory, mapping.nbytes);
  mapping = {};
}

int KernelRing::open(unsigned entries, std::uint32_t setup_flags) {
  Parameters parameters{};
  parameters.flags = setup_flags;
  const long fd = ::syscall(kCallSetup, entries, &parameters);
  if (fd < 0) return errno;
  fd_.reset(static_cast<int>(fd));
  if ((parameters.features & kFeatureSingleMmap) == 0) return EOPNOTSUPP;
  const SubmissionOffsets& submission = parameters.submission;
  const CompletionOffsets& completion = parameters.completion;
  const std::size_t submission_end = submission.array + parameters.submission_entries * sizeof(unsigned);
  const std::size_t completion_end = completion.completions + parameters.completion_entries * sizeof(Completion);
  int code = map(rings_, std::max(submission_end, completion_end), kOffsetRings);
  if (code == 0) code = map(entries_, parameters.submission_entries * sizeof(Submission), kOffsetSubmissions);
  if (code != 0) {
    unmap(rings_);
    return code;
  }
  auto* base = static_cast<std::byte*>(rings_.memory);
  const auto word = [base](std::uint32_t offset) { return reinterpret_cast<unsigned*>(base + offset); };
  submission_head_ = word(submission.head);
  submission_tail_ = word(submission.tail);
  submission_mask_ = *word(submission.mask);
  submission_entries_ = parameters.submission_entries;
  completion_head_ = word(completion.head);
  completion_tail_ = word(completion.tail);
  completion_mask_ = *word(completion.mask);
  completions_ = reinterpret_cast<Completion*>(base + completion.completions);
  submissions_ = static_cast<Submission*>(entries_.memory);
  unsigned* order = word(submission.array);  // entry i of the ring is always submission i
  for (unsigned i = 0; i < submission_entries_; ++i) order[i] = i;
  return 0;
}

int KernelRing::enable() {
  return ::syscall(kCallRegister, fd_.get(), kRegisterEnableRings, nullptr, 0) < 0 ? errno : 0;
}

bool KernelRing::supports(Opcode first, Opcode second) const {
  const auto probe = std::make_unique<Probe>();
  if (::syscall(kCallRegister, fd_.get(), kRegisterProbe, probe.get(), std::size(probe->operations)) < 0) return false;
  const auto has = [&probe](Opcode opcode) {
    return opcode <= probe->last_opcode && (probe->operations[opcode].flags & kProbeSupported) != 0;
  };
  return has(first) && has(second);
}

KernelRing::Submission* KernelRing::add() {
  if (queued() == submission_entries_) return nullptr;
  const unsigned tail = load_relaxed(submission_tail_);
  Submission& made = submissions_[tail & submission_mask_];
  made = {};
  store_release(submission_tail_, tail + 1);  // the kernel reads it only in enter(), after it has been filled
  return &made;
}

unsigned KernelRing::queued() const { return load_relaxed(submission_tail_) - load_acquire(submission_head_); }

const KernelRing::Submission* KernelRing::withdraw() {
  if (queued() == 0) return nullptr;
  const unsigned tail = load_relaxed(submission_tail_) - 1;
  store_release(submission_tail_, tail);
  return &submissions_[tail & submission_mask_];
}

int KernelRing::enter(unsigned completions, bool look) {
  const std::uint32_t flags = completions > 0 || look ? kEnterGetEvents : 0;
  const long taken = ::syscall(kCallEnter, fd_.get(), queued(), completions, flags, nullptr, 0);
  return taken < 0 ? -errno : static_cast<int>(taken);
}

const KernelRing::Completion* KernelRing::peek() const {
  const unsigned head = load_relaxed(completion_head_);
  return head == load_acquire(completion_tail_) ? nullptr : &completions_[head & completion_mask_];
}

void KernelRing::pop() { store_release(completion_head_, load_relaxed(completion_head_) + 1); }

}  // namespace zcomm::mem
