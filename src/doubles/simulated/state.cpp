// Loss, accounting and handles of the simulated device (doubles/simulated/state.hpp).
#include "doubles/simulated/state.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <new>

#include "base/error.hpp"
#include "device/device_errors.hpp"

namespace zcomm::device::simulated {

Point::Fate Point::wait_for(double patience_s) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(patience_s), [this] { return fate_ != Fate::pending; });
  return fate_;
}

void State::check() const {
  if (!is_lost()) return;
  const std::lock_guard lock(mutex_);
  throw CudaError(lost_text(options_.name, why_));
}

void State::begin_operation() {
  check();
  if (left_.load() == 0 || left_.fetch_sub(1) != 1) return;
  lose("simulated loss");
  check();
}

void State::lose(const std::string& why) noexcept {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  why_ = why;
  lost_.store(true, std::memory_order_release);
}

namespace {
std::size_t total_nbytes(const SimulatedOptions& options) {
  if (options.memory_nbytes != 0) return options.memory_nbytes;
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}
}  // namespace

void State::take(std::size_t nbytes) {
  check();
  const std::lock_guard lock(mutex_);
  const std::size_t total = total_nbytes(options_);
  if (nbytes > total - std::min(total, used_nbytes_))
    throw CudaError(out_of_memory_text(options_.name, nbytes, total - used_nbytes_, total));
  used_nbytes_ += nbytes;
}

void State::give_back(std::size_t nbytes) noexcept {
  const std::lock_guard lock(mutex_);
  used_nbytes_ -= nbytes;
}

MemoryInfo State::memory() const {
  check();
  const std::lock_guard lock(mutex_);
  const std::size_t total = total_nbytes(options_);
  return {total - std::min(total, used_nbytes_), total};
}

namespace {

constexpr std::align_val_t kAlign{256};
constexpr std::size_t kFill = 0xff;  // NaN in every floating type

struct Registry {
  std::mutex mutex;
  std::uint64_t next = 1;
  std::map<std::uint64_t, std::weak_ptr<SharedEvent>> events;
  std::map<std::uintptr_t, std::weak_ptr<Allocation>> memory;  // by address
};

Registry& registry() {
  static Registry& all = *new Registry;  // never destroyed, because memory may be freed late
  return all;
}

/// The contents of a handle's bytes.
struct Name {
  char magic[8] = {'z', 'c', 's', 'i', 'm', 'u', 'l', '1'};
  std::int64_t pid = ::getpid();
  std::uint64_t kind = 0, number = 0;
};
enum : std::uint64_t { kEvent = 1, kMemory = 2 };

SharedHandle pack(std::uint64_t kind, std::uint64_t number, std::uint64_t offset) {
  Name name;
  name.kind = kind;
  name.number = number;
  SharedHandle handle;
  static_assert(sizeof(name) <= sizeof(handle.bytes));
  std::memcpy(handle.bytes.data(), &name, sizeof(name));
  handle.offset = offset;
  return handle;
}

std::uint64_t unpack(const SharedHandle& handle, std::uint64_t kind, const char* what) {
  Name name;
  std::memcpy(&name, handle.bytes.data(), sizeof(name));
  if (std::memcmp(name.magic, Name().magic, sizeof(name.magic)) != 0 || name.kind != kind)
    throw InvalidArgument(text("simulated device: this is not a handle of ", what));
  if (name.pid != ::getpid())
    throw Unsupported(text("simulated device: a handle of process ", name.pid, " in process ", ::getpid(),
                           ": its handles are for ranks that are threads of one process"));
  return name.number;
}

}  // namespace

Allocation::Allocation(std::shared_ptr<State> owner, std::size_t size) : state(std::move(owner)), nbytes(size) {
  state->take(nbytes);
  data = static_cast<std::byte*>(::operator new(std::max<std::size_t>(nbytes, 1), kAlign, std::nothrow));
  if (data == nullptr) {
    state->give_back(nbytes);
    throw CudaError(out_of_memory_text(state->options().name, nbytes, 0, state->memory().total_nbytes));
  }
  std::memset(data, kFill, nbytes);
}

Allocation::~Allocation() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().memory.erase(reinterpret_cast<std::uintptr_t>(data));
  }
  ::operator delete(data, kAlign);
  state->give_back(nbytes);
}

void enlist(const std::shared_ptr<Allocation>& allocation) {
  const std::lock_guard lock(registry().mutex);
  registry().memory[reinterpret_cast<std::uintptr_t>(allocation->data)] = allocation;
}

SharedHandle handle_of(const std::shared_ptr<SharedEvent>& event) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.events, [](const auto& entry) { return entry.second.expired(); });
  for (const auto& [number, known] : all.events)
    if (known.lock() == event) return pack(kEvent, number, 0);
  all.events[all.next] = event;
  return pack(kEvent, all.next++, 0);
}

SharedHandle handle_of_memory(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  auto after = all.memory.upper_bound(address);
  if (after != all.memory.begin()) {
    const auto& [base, known] = *std::prev(after);
    const auto allocation = known.lock();
    if (allocation && address < base + std::max<std::size_t>(allocation->nbytes, 1))
      return pack(kMemory, base, address - base);
  }
  throw InvalidArgument(text("simulated device: share: ", data, " is not within memory from allocate()"));
}

std::shared_ptr<SharedEvent> find_event(const SharedHandle& handle) {
  const std::uint64_t number = unpack(handle, kEvent, "an event");
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().events.find(number);
  auto event = found == registry().events.end() ? nullptr : found->second.lock();
  if (!event) throw InvalidArgument("simulated device: open_event: the event is gone");
  return event;
}

Memory find_memory(const SharedHandle& handle) {
  const std::uint64_t base = unpack(handle, kMemory, "memory");
  std::shared_ptr<Allocation> allocation;
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().memory.find(static_cast<std::uintptr_t>(base));
    if (found != registry().memory.end()) allocation = found->second.lock();
  }
  if (!allocation) throw InvalidArgument("simulated device: open_memory: the memory has been freed");
  std::byte* const data = allocation->data + handle.offset;
  return {std::move(allocation), data};
}

}  // namespace zcomm::device::simulated
