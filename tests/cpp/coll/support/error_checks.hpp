// Shared by tests of errors: messages of exceptions, and calls that differ in one field.
#pragma once

#include <functional>
#include <initializer_list>
#include <mutex>

#include "coll/support/comm_world.hpp"

namespace zcomm::test {

/// The message of the Type that `statement` throws; "" and a failed check otherwise.
template <class Type, class Statement>
std::string message_of(const Statement& statement, const char* what) {
  try {
    statement();
    fail(__FILE__, __LINE__, std::string(what) + ": nothing was thrown");
  } catch (const Type& error) {
    return error.what();
  } catch (const std::exception& error) {
    fail(__FILE__, __LINE__, std::string(what) + ": other type: " + error.what());
  }
  return "";
}

inline void expect_contains(const std::string& message, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    if (message.find(part) == std::string::npos) fail(__FILE__, __LINE__, "message lacks '" + part + "': " + message);
}

namespace calls {

using CommCall = std::function<void(Communicator&)>;  // a call on a communicator with all of its arguments

inline float data[65536];  // shared by rank threads, but no byte of it moves in a mismatch

inline CommCall all_reduce(std::size_t count, DType dtype = DType::float32, ReduceOp op = ReduceOp::sum,
                           const char* name = "g") {
  return [=](Communicator& comm) {
    const Buffer buffer{data, count};
    comm.all_reduce({&buffer, 1}, dtype, op, name).wait();
  };
}

inline CommCall all_reduce_list(std::vector<std::size_t> counts) {
  return [=](Communicator& comm) {
    std::vector<Buffer> buffers;
    for (const std::size_t count : counts) buffers.push_back({data + 256 * buffers.size(), count});
    comm.all_reduce(buffers, DType::float32, ReduceOp::sum, "list").wait();
  };
}

inline CommCall reduce_scatter(DType out_dtype, bool accumulate) {
  return [=](Communicator& comm) {
    const ConstBuffer in{data, 3 * 16};
    const Buffer out{data + 1024, 16};
    comm.reduce_scatter({&in, 1}, {&out, 1}, DType::bfloat16, ReduceOp::sum, out_dtype, accumulate).wait();
  };
}

/// `n` separate buffers of `count` elements.
inline std::vector<Buffer> buffers_at(float* at, std::size_t n, std::size_t count) {
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i < n; ++i) buffers.push_back({at + 64 * i, count});
  return buffers;
}

inline CommCall broadcast(int root) {
  return [=](Communicator& comm) {
    const Buffer buffer{data, 8};
    comm.broadcast({&buffer, 1}, DType::float32, root).wait();
  };
}

}  // namespace calls

/// Rank `odd` of 3 calls `other`, the rest `usual`: the same error everywhere, naming both sides. `run` starts a world.
template <class RunWorld>
void expect_mismatch(const RunWorld& run, int odd, const calls::CommCall& usual, const calls::CommCall& other,
                     std::initializer_list<std::string> parts) {
  std::mutex mutex;
  std::vector<std::string> messages;
  run([&](Rank& self) {
    const std::string message =
        message_of<CollectiveMismatch>([&] { (self.rank == odd ? other : usual)(*self.comm); }, "mismatch");
    expect_contains(message, parts);
    expect_contains(message_of<CollectiveMismatch>([&] { self.comm->barrier().wait(); }, "afterwards"),
                    {"unusable since", message});
    const std::lock_guard lock(mutex);
    messages.push_back(message);
  });
  for (const auto& message : messages) EXPECT_EQ(message, messages[0]);
  EXPECT_EQ(messages.size(), 3u);
}

}  // namespace zcomm::test
