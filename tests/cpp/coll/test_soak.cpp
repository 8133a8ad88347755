// A soak: many operations of random kind, size and memory between processes, each result checked, nothing growing.
//
// ZCOMM_SOAK=1000000 is the long run; the usual one is short. All values are small integers, so sums are exact.
#include <dirent.h>

#include <cstdlib>
#include <fstream>

#include "coll/support/process_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr int kWorld = 3;
// A sanitizer's own records grow with the number of operations.
constexpr std::size_t kGrowthNbytes = kSanitized ? std::size_t{1} << 30 : 2 << 20;
constexpr std::size_t kMaxPart = 20000;  // elements of one rank's part

long operation_count() {
  const char* text = std::getenv("ZCOMM_SOAK");
  return text == nullptr ? 3000 : std::atol(text);
}

std::size_t resident_nbytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t whole = 0, resident = 0;
  statm >> whole >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

int descriptor_count() {
  DIR* folder = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

struct Soak {
  Rank& self;
  Memory private_in = Memory::make(*self.comm, kMaxPart* kWorld * 4, false);
  Memory private_out = Memory::make(*self.comm, kMaxPart* kWorld * 4, false);
  Memory symmetric_in = Memory::make(*self.comm, kMaxPart* kWorld * 4, true);
  Memory symmetric_out = Memory::make(*self.comm, kMaxPart* kWorld * 4, true);
  std::mt19937 dice{42};  // the same on each rank
  long wrong = 0;

  std::int32_t value(int rank, std::size_t i, unsigned salt) const {
    return static_cast<std::int32_t>((i * 7 + salt * 13 + static_cast<unsigned>(rank) * 31) % 1000);
  }
  std::int32_t sum(std::size_t i, unsigned salt) const {
    std::int32_t all = 0;
    for (int q = 0; q < kWorld; ++q) all += value(q, i, salt);
    return all;
  }
  std::size_t part() {  // all magnitudes equally often, 0 included
    const unsigned magnitude = dice() % 15;
    return std::min<std::size_t>(dice() % (1u << magnitude), kMaxPart);
  }
  void check(const std::int32_t* data, std::size_t count, const std::function<std::int32_t(std::size_t)>& expected) {
    for (std::size_t i = 0; i < count; ++i) wrong += data[i] != expected(i);
  }

  void one() {
    const unsigned kind = dice() % 6, salt = dice() % 97;
    const std::size_t count = part(), whole = count * kWorld, me = static_cast<std::size_t>(self.rank);
    Memory& from = dice() % 2 ? symmetric_in : private_in;
    Memory& to = dice() % 2 ? symmetric_out : private_out;
    const Call call{"soak", dice() % 3 == 0};
    const int root = static_cast<int>(dice() % kWorld);
    auto* in = reinterpret_cast<std::int32_t*>(from.data());
    auto* out = reinterpret_cast<std::int32_t*>(to.data());
    for (std::size_t i = 0; i < whole; ++i) in[i] = value(self.rank, i, salt);
    const Buffer all{in, whole}, gathered{out, whole}, shard{out, count};
    const ConstBuffer all_in{in, whole}, own{in, count};
    const auto reduced = [&](std::size_t i) { return sum(i, salt); };
    switch (kind) {
      case 0:
        self.comm->all_reduce({&all, 1}, DType::int32, ReduceOp::sum, call).wait();
        return check(in, whole, reduced);
      case 1:
        self.comm->reduce_scatter({&all_in, 1}, {&shard, 1}, DType::int32, ReduceOp::sum, DType::int32, false, call)
            .wait();
        return check(out, count, [&](std::size_t i) { return sum(me * count + i, salt); });
      case 2:
        self.comm->all_gather({&own, 1}, {&gathered, 1}, DType::int32, call).wait();
        return check(out, whole, [&](std::size_t i) {
          return count == 0 ? 0 : value(static_cast<int>(i / count), i % count, salt);
        });
      case 3:
        self.comm->broadcast({&all, 1}, DType::int32, root, call).wait();
        return check(in, whole, [&](std::size_t i) { return value(root, i, salt); });
      case 4:
        self.comm->reduce({&all, 1}, DType::int32, ReduceOp::sum, root, call).wait();
        return check(in, whole,
                     [&](std::size_t i) { return self.rank == root ? sum(i, salt) : value(self.rank, i, salt); });
      default:
        self.comm->barrier(call).wait();
    }
  }
};

}  // namespace

TEST(comm_soak, mixed_operations_are_right_and_nothing_grows) {
  const long operations = operation_count();
  const auto codes = run_processes(kWorld, small_slots(60, 4096), [&](Rank& self) {
    Soak soak{self};
    long done = 0;
    for (; done < operations / 10; ++done) soak.one();  // everything has been touched by now
    const std::size_t resident = resident_nbytes(), allocations = self.comm->memory().allocation_count;
    const int descriptors = descriptor_count();
    for (; done < operations; ++done) soak.one();
    const bool grew = resident_nbytes() > resident + kGrowthNbytes || descriptor_count() != descriptors ||
                      self.comm->memory().allocation_count != allocations;
    if (grew || soak.wrong != 0)
      std::cerr << "rank " << self.rank << ": " << soak.wrong << " wrong; resident " << resident << " -> "
                << resident_nbytes() << ", descriptors " << descriptors << " -> " << descriptor_count() << std::endl;
    return !grew && soak.wrong == 0;
  });
  for (const int code : codes) EXPECT_EQ(code, 0);
}
