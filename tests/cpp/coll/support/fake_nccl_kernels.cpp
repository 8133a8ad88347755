// Kernels of FakeNccl (fake_nccl_kernels.hpp).
#include "coll/support/fake_nccl_kernels.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "coll/support/comm_world.hpp"
#include "device/kernels.hpp"

namespace zcomm::test {

void complain(const std::string& what) { fail(__FILE__, __LINE__, "FakeNccl: " + what); }

namespace {

constexpr std::chrono::seconds kForEver{20};  // a test that waits so long has failed

/// NCCL's types by NCCL's numbers.
DType dtype_of(int nccl) {
  static const std::map<int, DType> known{{0, DType::int8},    {1, DType::uint8},   {2, DType::int32},
                                          {4, DType::int64},   {6, DType::float16}, {7, DType::float32},
                                          {8, DType::float64}, {9, DType::bfloat16}};
  const auto found = known.find(nccl);
  if (found != known.end()) return found->second;
  complain("no such dtype: " + std::to_string(nccl));
  return DType::uint8;
}

std::vector<double> decode(DType dtype, const void* data, std::size_t count) {
  std::vector<double> values(count);
  const auto load = [&](auto zero) {
    for (std::size_t i = 0; i < count; ++i) {
      auto value = zero;
      std::memcpy(&value, static_cast<const std::byte*>(data) + i * sizeof(value), sizeof(value));
      values[i] = static_cast<double>(value);
    }
  };
  switch (dtype) {
    case DType::int8:
      load(std::int8_t{});
      break;
    case DType::uint8:
      load(std::uint8_t{});
      break;
    case DType::int32:
      load(std::int32_t{});
      break;
    case DType::int64:
      load(std::int64_t{});
      break;
    default:
      device::cast(values.data(), DType::float64, data, dtype, count);
  }
  return values;
}

std::vector<std::byte> reduced(const std::vector<const FakeTask*>& tasks, std::size_t count) {
  constexpr int sum = 0, prod = 1, max = 2, min = 3, avg = 4;
  const DType dtype = dtype_of(tasks[0]->dtype);
  const int op = tasks[0]->op;
  if (op < sum || op > avg) complain("no such reduction: " + std::to_string(op));
  std::vector<double> result = decode(dtype, tasks[0]->in, count);
  for (std::size_t rank = 1; rank < tasks.size(); ++rank) {
    const auto next = decode(dtype, tasks[rank]->in, count);
    for (std::size_t i = 0; i < count; ++i) {
      if (op == prod) result[i] *= next[i];
      if (op == max) result[i] = std::max(result[i], next[i]);
      if (op == min) result[i] = std::min(result[i], next[i]);
      if (op == sum || op == avg) result[i] += next[i];
    }
  }
  if (op == avg)
    for (double& value : result) {
      value /= static_cast<double>(tasks.size());
      if (dtype != DType::float64) value = static_cast<double>(static_cast<float>(value));
    }
  return encode(dtype, result);
}

bool same(const FakeTask& a, const FakeTask& b) {
  return a.kind == b.kind && a.count == b.count && a.dtype == b.dtype && a.op == b.op && a.other == b.other;
}

/// All of one collective. Outputs may be inputs.
void carry_out(const std::vector<const FakeTask*>& tasks) {
  const FakeTask& first = *tasks[0];
  for (const FakeTask* task : tasks)
    if (!same(*task, first)) return complain("ranks called different collectives");
  const std::size_t ranks = tasks.size(), nbytes = first.count * size_of(dtype_of(first.dtype));
  std::vector<std::byte> result;
  if (first.kind == FakeKind::all_gather) {
    for (const FakeTask* task : tasks) {
      const auto* const in = static_cast<const std::byte*>(task->in);
      result.insert(result.end(), in, in + nbytes);
    }
  } else if (first.kind == FakeKind::broadcast) {
    const auto* const in = static_cast<const std::byte*>(tasks[static_cast<std::size_t>(first.other)]->in);
    result.assign(in, in + nbytes);
  } else {
    result = reduced(tasks, first.kind == FakeKind::reduce_scatter ? ranks * first.count : first.count);
  }
  const bool scatters = first.kind == FakeKind::reduce_scatter;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (first.kind == FakeKind::reduce && static_cast<int>(rank) != first.other) continue;
    std::memcpy(tasks[rank]->out, result.data() + (scatters ? rank * nbytes : 0),
                first.kind == FakeKind::all_gather ? ranks * nbytes : nbytes);
  }
}

bool is_message(const FakeTask& task) { return task.kind == FakeKind::send || task.kind == FakeKind::recv; }

}  // namespace

bool Rendezvous::wait(Lock& lock, int rank, const std::function<bool()>& until) {
  if (changed_.wait_for(lock, kForEver, [&] { return seat(rank).aborted || until(); })) return !seat(rank).aborted;
  complain("a kernel of rank " + std::to_string(rank) + " is not aborted");
  return false;
}

void Rendezvous::run(int rank, const std::vector<FakeTask>& tasks, bool held) {
  Lock lock(mutex_);
  if (seat(rank).aborted) return;
  ++seat(rank).running;
  changed_.notify_all();
  bool goes_on = !held || wait(lock, rank, [] { return false; });
  for (const FakeTask& task : tasks) goes_on = goes_on && (is_message(task) || meet(lock, rank, task));
  if (goes_on) exchange(lock, rank, tasks);
  --seat(rank).running;
  changed_.notify_all();
}

bool Rendezvous::meet(Lock& lock, int rank, const FakeTask& task) {
  Meeting& meeting = meetings_[seat(rank).meetings++];
  meeting.tasks.resize(seats_.size());
  const FakeTask*& own = meeting.tasks[static_cast<std::size_t>(rank)];
  own = &task;
  if (++meeting.arrived == seats_.size()) {
    for (const FakeTask* each : meeting.tasks) meeting.differs |= !same(*each, *meeting.tasks[0]);
    meeting.differs &= may_differ_;
  }
  if (meeting.arrived == seats_.size() && !meeting.differs) {
    carry_out(meeting.tasks);
    meeting.done = true;
    changed_.notify_all();
    return true;
  }
  if (wait(lock, rank, [&] { return meeting.done; })) return true;
  if (!meeting.done) own = nullptr, --meeting.arrived;  // no rank reads this one's memory any more
  return false;
}

bool Rendezvous::exchange(Lock& lock, int rank, const std::vector<FakeTask>& tasks) {
  std::deque<Letter> sent;
  for (const FakeTask& task : tasks)
    if (task.kind == FakeKind::send) mailboxes_[{rank, task.other}].push_back(&sent.emplace_back(Letter{&task}));
  changed_.notify_all();
  bool goes_on = true;
  for (const FakeTask& task : tasks)
    if (task.kind == FakeKind::recv) goes_on = goes_on && receive(lock, rank, task);
  for (const Letter& letter : sent) goes_on = goes_on && wait(lock, rank, [&] { return letter.taken; });
  for (Letter& letter : sent) std::erase(mailboxes_[{rank, letter.task->other}], &letter);
  return goes_on;
}

bool Rendezvous::receive(Lock& lock, int rank, const FakeTask& task) {
  auto& mailbox = mailboxes_[{task.other, rank}];
  if (!wait(lock, rank, [&] { return !mailbox.empty(); })) return false;
  Letter& letter = *mailbox.front();
  mailbox.pop_front();
  const bool differs = letter.task->count != task.count || letter.task->dtype != task.dtype;
  if (differs && may_differ_) return wait(lock, rank, [] { return false; });
  if (differs)
    complain("a message is not what its receiver expects");
  else if (letter.task->in == task.out)
    complain("a message to where it comes from");
  else
    std::memcpy(task.out, letter.task->in, task.count * size_of(dtype_of(task.dtype)));
  letter.taken = true;
  changed_.notify_all();
  return true;
}

void Rendezvous::abort(int rank) {
  Lock lock(mutex_);
  seat(rank).aborted = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return seat(rank).running == 0; });
}

void Rendezvous::wait_for_kernel(int rank) {
  Lock lock(mutex_);
  if (!changed_.wait_for(lock, kForEver, [&] { return seat(rank).running > 0; }))
    complain("no kernel of rank " + std::to_string(rank) + " comes");
}

void Rendezvous::let_calls_differ() {
  const std::lock_guard lock(mutex_);
  may_differ_ = true;
}

bool Rendezvous::is_running(int rank) {
  const std::lock_guard lock(mutex_);
  return seat(rank).running > 0;
}

}  // namespace zcomm::test
