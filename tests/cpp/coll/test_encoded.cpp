// Collectives with a codec: the bits of encode and decode called by hand, on every engine; errors, differences, bytes.
#include <linux/tcp.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "coll/support/error_checks.hpp"
#include "coll/support/hierarchical_world.hpp"
#include "device/codec.hpp"

namespace encoded_test {

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr Codec kInt8{}, kInt4{.bits = 4}, kFp8{.kind = CodecKind::fp8_e4m3}, kSign{.kind = CodecKind::sign, .bits = 1};
constexpr Codec kCodecs[] = {kInt8, kInt4, kFp8, kSign};

using Floats = std::vector<float>;

Floats values_of(int rank, std::size_t count, unsigned step = 0) {
  return random_floats(count, 1000 * step + static_cast<unsigned>(rank));
}

/// decode(encode(x + error)); error becomes the residue. count: multiple encodings of parts are the caller's.
Floats through(const Codec& codec, const float* x, std::size_t count, float* error = nullptr, float keep = 0,
               const std::uint8_t* mask = nullptr) {
  std::vector<std::byte> room(encoded_nbytes(codec, count) + kEncodedAlign);
  auto at = reinterpret_cast<std::uintptr_t>(room.data());
  auto* const data = reinterpret_cast<std::byte*>((at + kEncodedAlign - 1) / kEncodedAlign * kEncodedAlign);
  Floats out(count);
  if (count == 0) return out;
  device::encode(
      codec,
      {.out = data, .in = x, .dtype = DType::float32, .count = count, .error = error, .keep = keep, .mask = mask});
  const std::byte* const source = data;
  device::decode_sum(codec, {.out = out.data(), .in = {&source, 1}, .count = count, .mask = mask});
  return out;
}

void add(Floats& sum, const Floats& next) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += next[i];
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void divide(Floats& values, int by) {
  for (float& value : values) value /= static_cast<float>(by);
}

/// One tensor, and a list of two.
const std::vector<std::vector<std::size_t>> kLists = {{0}, {1}, {77}, {5000}, {300, 1}};

struct Errors {
  std::vector<Floats> all;
  std::vector<Buffer> spans;
  void add(std::size_t count) { all.emplace_back(count, 0.0f); }
  std::span<const Buffer> buffers() {
    spans.clear();
    for (Floats& error : all) spans.push_back({error.data(), error.size()});
    return spans;
  }
};

/// Two steps, so that the errors of the first count in the second.
void check_reduce_scatter(Rank& self, const Codec& codec, const std::vector<std::size_t>& counts, ReduceOp op) {
  const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
  Errors errors;
  std::vector<std::vector<Floats>> reference(counts.size(), std::vector<Floats>(ranks));  // errors of all ranks
  for (std::size_t i = 0; i < counts.size(); ++i) {
    errors.add(counts[i] * ranks);
    for (Floats& error : reference[i]) error.assign(counts[i], 0.0f);
  }
  for (unsigned step = 0; step < 2; ++step) {
    std::vector<Floats> in, out;
    std::vector<ConstBuffer> ins;
    std::vector<Buffer> outs;
    for (const std::size_t count : counts) {
      in.push_back(values_of(self.rank, count * ranks, step));
      out.emplace_back(count, -1.0f);
    }
    for (std::size_t i = 0; i < counts.size(); ++i)
      ins.push_back({in[i].data(), in[i].size()}), outs.push_back({out[i].data(), counts[i]});
    const Coding coding{.codec = codec, .keep = 0.25f, .errors = errors.buffers()};
    self.comm->reduce_scatter(ins, outs, DType::float32, op, DType::float32, false, {"g", step == 0}, {}, &coding)
        .wait();
    for (std::size_t i = 0; i < counts.size(); ++i) {
      Floats wanted(counts[i], 0.0f);
      for (int r = 0; r < self.world; ++r) {
        const Floats theirs = values_of(r, counts[i] * ranks, step);
        const Floats part = through(codec, theirs.data() + me * counts[i], counts[i],
                                    reference[i][static_cast<std::size_t>(r)].data(), 0.25f);
        if (r == 0)
          wanted = part;
        else
          add(wanted, part);
      }
      if (op == ReduceOp::avg) divide(wanted, self.world);
      EXPECT_TRUE(same_bits(out[i], wanted));
      const Floats own(errors.all[i].begin() + static_cast<std::ptrdiff_t>(me * counts[i]),
                       errors.all[i].begin() + static_cast<std::ptrdiff_t>((me + 1) * counts[i]));
      EXPECT_TRUE(same_bits(own, reference[i][me]));
    }
  }
}

void check_all_gather(Rank& self, const Codec& codec, const std::vector<std::size_t>& counts) {
  const auto ranks = static_cast<std::size_t>(self.world);
  std::vector<Floats> in, out;
  std::vector<ConstBuffer> ins;
  std::vector<Buffer> outs;
  for (const std::size_t count : counts) {
    in.push_back(values_of(self.rank, count));
    out.emplace_back(count * ranks, -1.0f);
  }
  for (std::size_t i = 0; i < counts.size(); ++i)
    ins.push_back({in[i].data(), counts[i]}), outs.push_back({out[i].data(), out[i].size()});
  const Coding coding{.codec = codec};
  self.comm->all_gather(ins, outs, DType::float32, {}, &coding).wait();
  for (std::size_t i = 0; i < counts.size(); ++i) {
    Floats wanted;
    for (int r = 0; r < self.world; ++r) {
      const Floats part = through(codec, values_of(r, counts[i]).data(), counts[i]);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    EXPECT_TRUE(same_bits(out[i], wanted));
  }
}

/// mask of a tensor: every third element is out.
std::vector<std::uint8_t> mask_of(std::size_t count) {
  std::vector<std::uint8_t> mask((count + 7) / 8 + 1, 0);
  for (std::size_t i = 0; i < count; ++i)
    if (i % 3 != 0) mask[i / 8] = static_cast<std::uint8_t>(mask[i / 8] | 1u << (i % 8));
  return mask;
}

void check_all_reduce(Rank& self, const Codec& codec, const std::vector<std::size_t>& counts, ReduceOp op,
                      bool masked = false) {
  const auto ranks = static_cast<std::size_t>(self.world);
  Errors workers, servers;
  std::vector<std::vector<Floats>> worker_errors(counts.size(), std::vector<Floats>(ranks)),
      server_errors(counts.size(), std::vector<Floats>(ranks));
  std::vector<std::vector<std::uint8_t>> masks;
  std::vector<const std::uint8_t*> mask_pointers;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    workers.add(counts[i]);
    servers.add(all_reduce_part(counts[i], self.rank, self.world).count);
    for (Floats& error : worker_errors[i]) error.assign(counts[i], 0.0f);
    for (int r = 0; r < self.world; ++r)
      server_errors[i][static_cast<std::size_t>(r)].assign(all_reduce_part(counts[i], r, self.world).count, 0.0f);
    masks.push_back(mask_of(counts[i]));
  }
  for (const auto& mask : masks) mask_pointers.push_back(mask.data());
  for (unsigned step = 0; step < 2; ++step) {
    std::vector<Floats> data;
    std::vector<Buffer> buffers;
    for (const std::size_t count : counts) data.push_back(values_of(self.rank, count, step));
    for (Floats& each : data) buffers.push_back({each.data(), each.size()});
    Coding coding{.codec = codec, .errors = workers.buffers(), .server_errors = servers.buffers()};
    if (masked) coding.masks = mask_pointers;
    self.comm->all_reduce(buffers, DType::float32, op, {"m", step == 1}, &coding).wait();
    for (std::size_t i = 0; i < counts.size(); ++i) {
      Floats wanted;
      for (int q = 0; q < self.world; ++q) {
        const auto [begin, count] = all_reduce_part(counts[i], q, self.world);
        const std::uint8_t* mask = masked ? masks[i].data() + begin / 8 : nullptr;
        Floats sum(count, 0.0f);
        for (int r = 0; r < self.world; ++r) {
          const Floats theirs = values_of(r, counts[i], step);
          const Floats part = through(codec, theirs.data() + begin, count,
                                      worker_errors[i][static_cast<std::size_t>(r)].data() + begin, 0, mask);
          if (r == 0)
            sum = part;
          else
            add(sum, part);
        }
        if (op == ReduceOp::avg) divide(sum, self.world);
        const Floats result =
            through(codec, sum.data(), count, server_errors[i][static_cast<std::size_t>(q)].data(), 0, mask);
        wanted.insert(wanted.end(), result.begin(), result.end());
      }
      EXPECT_TRUE(same_bits(data[i], wanted));
      EXPECT_TRUE(same_bits(workers.all[i], worker_errors[i][static_cast<std::size_t>(self.rank)]));
      EXPECT_TRUE(same_bits(servers.all[i], server_errors[i][static_cast<std::size_t>(self.rank)]));
    }
  }
}

void check_flat(Rank& self) {
  EXPECT_EQ(self.comm->coded_parts(), self.world);
  for (const Codec& codec : kCodecs)
    for (const auto& counts : kLists) {
      check_reduce_scatter(self, codec, counts, ReduceOp::avg);
      check_all_gather(self, codec, counts);
      check_all_reduce(self, codec, counts, ReduceOp::avg);
    }
  check_reduce_scatter(self, kInt8, {5000}, ReduceOp::sum);
  check_all_reduce(self, kSign, {5000, 3}, ReduceOp::sum, true);
}

}  // namespace

TEST(encoded, values_are_those_of_the_codec) {
  for (int world = 1; world <= 4; ++world) {
    run_world(world, small_slots(), check_flat);
    run_link_world(world, {}, check_flat);
  }
}

TEST(encoded, between_hosts_only_sums_of_a_host_are_encoded) {
  for (const std::vector<int>& layout : {std::vector<int>{0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2, 1, 2, 0}}) {
    run_hosts(layout, 30, [&layout](Rank& self) {
      const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
      const int hosts = self.comm->coded_parts();
      EXPECT_EQ(hosts, *std::max_element(layout.begin(), layout.end()) + 1);
      constexpr std::size_t count = 777;
      Floats error(count * static_cast<std::size_t>(hosts), 0.0f), out(count);
      const Floats in = values_of(self.rank, count * ranks);
      const Buffer errors{error.data(), error.size()};
      const Coding coding{.codec = kInt4, .errors = {&errors, 1}};
      const ConstBuffer from{in.data(), in.size()};
      const Buffer to{out.data(), count};
      self.comm
          ->reduce_scatter({&from, 1}, {&to, 1}, DType::float32, ReduceOp::avg, DType::float32, false, {}, {}, &coding)
          .wait();
      Floats wanted;
      for (int host = 0; host < hosts; ++host) {
        Floats sum;
        for (int r = 0; r < self.world; ++r) {
          if (layout[static_cast<std::size_t>(r)] != host) continue;
          const Floats theirs = values_of(r, count * ranks);
          const Floats part(theirs.begin() + static_cast<std::ptrdiff_t>(me * count),
                            theirs.begin() + static_cast<std::ptrdiff_t>((me + 1) * count));
          if (sum.empty())
            sum = part;
          else
            add(sum, part);
        }
        const Floats decoded = through(kInt4, sum.data(), count);
        if (host == 0)
          wanted = decoded;
        else
          add(wanted, decoded);
      }
      divide(wanted, self.world);
      EXPECT_TRUE(same_bits(out, wanted));
      check_all_gather(self, kInt8, {300, 1});
      check_all_reduce(self, kSign, {5000}, ReduceOp::avg);
    });
  }
}

TEST(encoded, halves_accumulate_in_place_and_own_parts) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    run_world(2, small_slots(), [dtype](Rank& self) {
      constexpr std::size_t count = 640;
      auto in = encode(dtype, std::vector<double>(2 * count, 127));  // exact: the scale is 1
      Floats sums(count, 10.0f);
      const ConstBuffer from{in.data(), 2 * count};
      const Buffer to{sums.data(), count};
      const Coding coding{.codec = kInt8};
      self.comm->reduce_scatter({&from, 1}, {&to, 1}, dtype, ReduceOp::sum, DType::float32, true, {}, {}, &coding)
          .wait();
      EXPECT_TRUE(sums == Floats(count, 264.0f));
      const std::size_t nbytes = count * size_of(dtype), mine = static_cast<std::size_t>(self.rank) * nbytes;
      const Buffer inside{in.data() + mine, count};
      self.comm->reduce_scatter({&from, 1}, {&inside, 1}, dtype, ReduceOp::avg, dtype, false, {}, {}, &coding).wait();
      EXPECT_TRUE(equal(dtype, in.data() + mine, std::vector<double>(count, 127)));
      const ConstBuffer shard{in.data() + mine, count};
      const Buffer whole{in.data(), 2 * count};
      self.comm->all_gather({&shard, 1}, {&whole, 1}, dtype, {}, &coding).wait();
      EXPECT_TRUE(equal(dtype, in.data(), std::vector<double>(2 * count, 127)));
      self.comm->all_reduce({&whole, 1}, dtype, ReduceOp::sum, {}, &coding).wait();
      EXPECT_TRUE(equal(dtype, in.data(), std::vector<double>(2 * count, 254)));
      const auto elsewhere = encode(dtype, std::vector<double>(10, 127));
      const OwnPart own{5, 10, elsewhere.data()};
      self.comm
          ->reduce_scatter({&from, 1}, {&to, 1}, dtype, ReduceOp::sum, DType::float32, false, {}, {&own, 1}, &coding)
          .wait();
      EXPECT_TRUE(std::fabs(sums[4] - 508.0f) < 0.5f);
      EXPECT_TRUE(std::fabs(sums[5] - 381.0f) < 1.5f);
    });
  }
}

TEST(encoded, decoded_and_error_are_the_input_to_the_bit) {
  run_world(2, small_slots(), [](Rank& self) {
    for (unsigned step = 0; step < 30; ++step)
      for (const Codec& codec : {kInt8, kInt4, kFp8}) {
        const std::size_t count = 1 + step * 131 % 900;
        const Floats in = values_of(self.rank, count, step);
        Floats error(count, 0.0f), out(2 * count);
        const Buffer errors{error.data(), count}, to{out.data(), 2 * count};
        const ConstBuffer from{in.data(), count};
        const Coding coding{.codec = codec, .errors = {&errors, 1}};
        self.comm->all_gather({&from, 1}, {&to, 1}, DType::float32, {}, &coding).wait();
        bool exact = true;
        for (std::size_t i = 0; i < count; ++i)
          exact &= out[static_cast<std::size_t>(self.rank) * count + i] + error[i] == in[i];
        EXPECT_TRUE(exact);
      }
  });
}

/// A run of seeds: the same on each engine, and other chances in each call.
TEST(encoded, chances_are_equal_over_engines) {
  const Codec stochastic{.bits = 4, .stochastic = true};
  std::mutex mutex;
  std::vector<Floats> results;
  const auto body = [&](Rank& self) {
    Floats all;
    for (int call = 0; call < 2; ++call) {
      Floats data = values_of(self.rank, 5000);
      const Buffer buffer{data.data(), data.size()};
      const Coding coding{.codec = stochastic};
      self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, {}, &coding).wait();
      all.insert(all.end(), data.begin(), data.end());
    }
    const std::lock_guard lock(mutex);
    results.push_back(all);
  };
  run_world(3, small_slots(), body);
  run_link_world(3, {}, body);
  run_hosts({0, 1, 2}, 30, body);
  EXPECT_EQ(results.size(), 9u);
  for (const Floats& result : results) EXPECT_TRUE(same_bits(result, results[0]));
  EXPECT_TRUE(!std::equal(results[0].begin(), results[0].begin() + 5000, results[0].begin() + 5000));
}

TEST(encoded, differences_do_not_drift) {
  run_world(3, small_slots(), [](Rank& self) {
    const std::size_t count = 1000, me = static_cast<std::size_t>(self.rank);
    Floats weights = values_of(self.rank, count), whole(3 * count, 0.0f);
    double before = 0, after = 0;
    for (int step = 0; step < 4; ++step) {
      const ConstBuffer from{weights.data(), count};
      const Buffer to{whole.data(), 3 * count};
      const Coding coding{.codec = kInt8, .differences = true};
      self.comm->all_gather({&from, 1}, {&to, 1}, DType::float32, {}, &coding).wait();
      double worst = 0;
      for (std::size_t i = 0; i < count; ++i)
        worst = std::max(worst, std::fabs(static_cast<double>(whole[me * count + i]) - weights[i]));
      (step == 0 ? before : after) = worst;
      Floats sums(whole);
      const Buffer all{sums.data(), sums.size()};
      self.comm->all_reduce({&all, 1}, DType::float32, ReduceOp::max).wait();
      EXPECT_TRUE(same_bits(sums, whole));  // equal on all ranks
    }
    EXPECT_TRUE(before > 0 && after < before / 1000);  // the difference of unchanged weights vanishes
    const Buffer to{whole.data(), 3 * count};
    const ConstBuffer inside{whole.data() + me * count, count};
    const Coding coding{.codec = kInt8, .differences = true};
    EXPECT_THROW_WITH(self.comm->all_gather({&inside, 1}, {&to, 1}, DType::float32, {}, &coding), InvalidArgument,
                      "overlap");
  });
}

TEST(encoded, one_nan_reaches_all_ranks) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    run_world(3, small_slots(), [bad](Rank& self) {
      for (const Codec& codec : kCodecs) {
        Floats data(3 * 512, 1.0f);
        if (self.rank == 1) data[700] = bad;
        const Buffer buffer{data.data(), data.size()};
        const Coding coding{.codec = codec};
        self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::avg, {}, &coding).wait();
        EXPECT_TRUE(std::isnan(data[700]));
        EXPECT_TRUE(std::fabs(data[0] - 1.0f) < 0.01f);
      }
    });
  }
}

TEST(encoded, ranks_that_disagree_are_named) {
  static Floats data(4096);
  const auto call = [](const Codec& codec, ReduceOp op = ReduceOp::sum, bool coded = true) {
    return [=](Communicator& comm) {
      const Buffer buffer{data.data(), 1000};
      const Coding coding{.codec = codec};
      comm.all_reduce({&buffer, 1}, DType::float32, op, "g", coded ? &coding : nullptr).wait();
    };
  };
  const auto gather = [](std::size_t count) {
    return [=](Communicator& comm) {
      const ConstBuffer from{data.data(), count};
      const Buffer to{data.data() + 1024, 3 * count};
      const Coding coding{.codec = kInt8};
      comm.all_gather({&from, 1}, {&to, 1}, DType::float32, "w", &coding).wait();
    };
  };
  const std::vector<std::function<void(const std::function<void(Rank&)>&)>> engines = {
      [](const auto& body) { run_world(3, small_slots(), body); },
      [](const auto& body) { run_link_world(3, {}, body); }, [](const auto& body) { run_hosts({0, 1, 2}, 30, body); }};
  for (const auto& run : engines) {
    expect_mismatch(run, 1, call(kInt8), call(kInt4),
                    {"rank 0, 2: all_reduce float32 sum codec=int8 count=1000 'g'",
                     "rank 1: all_reduce float32 sum codec=int4 count=1000 'g'"});
    expect_mismatch(run, 1, call(kSign), call(kSign, ReduceOp::avg), {"float32 avg codec=sign"});
    expect_mismatch(run, 2, call(kInt8), call(kInt8, ReduceOp::sum, false),
                    {"codec=int8 count=1000", "rank 2: all_reduce float32 sum count=1000 'g'"});
    expect_mismatch(run, 0, gather(100), gather(101),  // as many encoded bytes
                    {"all_gather float32 codec=int8 count=300 'w'", "count=303 'w'"});
    expect_mismatch(run, 0, call({.rotate = 32}), call({.stochastic = true}),
                    {"codec=int8:rotate=32", "codec=int8:stochastic"});
  }
}

TEST(encoded, refusals_name_the_reason) {
  run_world(2, small_slots(), [](Rank& self) {
    Floats data(64), more(64);
    std::vector<double> wide(64);
    const Buffer buffer{data.data(), 64};
    const auto reduce = [&](const Coding& coding, ReduceOp op = ReduceOp::sum) {
      self.comm->all_reduce({&buffer, 1}, DType::float32, op, {}, &coding);
    };
    EXPECT_THROW_WITH(reduce({}, ReduceOp::max), InvalidArgument, "op max: decoded values differ");
    EXPECT_THROW_WITH(reduce({.codec = {.bits = 5}}), InvalidArgument, "bits 5");
    EXPECT_THROW_WITH(reduce({.keep = 0.5f}), InvalidArgument, "without error buffers");
    const Buffer worker{more.data(), 64}, shorter{more.data(), 63}, inside{data.data() + 32, 64};
    const Buffer server{data.data(), 0};
    EXPECT_THROW_WITH(reduce({.keep = 1.0f, .errors = {&worker, 1}, .server_errors = {&server, 1}}), InvalidArgument,
                      "keep 1 is not in [0, 1)");
    EXPECT_THROW_WITH(reduce({.errors = {&worker, 1}}), InvalidArgument, "1 worker error(s) and 0 server error(s)");
    const Buffer right{more.data(), self.rank == 0 ? 64u : 0u}, other{wide.data(), self.rank == 0 ? 64u : 0u};
    EXPECT_THROW_WITH(reduce({.errors = {&shorter, 1}, .server_errors = {&other, 1}}), InvalidArgument,
                      "error 0 has 63 elements, expected 64");
    EXPECT_THROW_WITH(reduce({.errors = {&worker, 1}, .server_errors = {&shorter, 1}}), InvalidArgument,
                      "server error 0 has 63 elements, expected " + std::to_string(right.count));
    EXPECT_THROW_WITH(reduce({.errors = {&inside, 1}, .server_errors = {&other, 1}}), InvalidArgument, "overlap");
    const std::uint8_t* mask = nullptr;
    EXPECT_THROW_WITH(reduce({.masks = {&mask, 1}}), InvalidArgument, "masks are for all_reduce with codec sign");
    EXPECT_THROW_WITH(reduce({.codec = kSign, .masks = {&mask, 1}}), InvalidArgument, "mask 0 is a null pointer");
    EXPECT_THROW_WITH(reduce({.differences = true}), InvalidArgument, "differences are for all_gather");
    const Buffer doubles{wide.data(), 64};
    const Coding coding{};
    EXPECT_THROW_WITH(self.comm->all_reduce({&doubles, 1}, DType::float64, ReduceOp::sum, {}, &coding), InvalidArgument,
                      "elements are float64");
    self.comm->barrier().wait();  // nothing of it has reached the others
  });
}

/// Bytes that a rank's sockets for collectives have sent.
class SentBytes {
 public:
  explicit SentBytes(const std::vector<coll::PeerSockets>& links) {
    for (const auto& sockets : links)
      if (!sockets.empty()) copies_.emplace_back(::dup(sockets[0].get()));
  }
  double now() const {
    double sum = 0;
    for (const UniqueFd& fd : copies_) {
      tcp_info info{};
      socklen_t nbytes = sizeof info;
      EXPECT_EQ(::getsockopt(fd.get(), IPPROTO_TCP, TCP_INFO, &info, &nbytes), 0);
      sum += static_cast<double>(info.tcpi_bytes_sent);
    }
    return sum;
  }

 private:
  std::vector<UniqueFd> copies_;
};

TEST(encoded, bytes_on_the_wire) {
  constexpr int kWorld = 3;
  constexpr std::size_t kCount = 64 << 10;
  Cables cables(kWorld, 2, Wire::tcp);
  std::vector<std::thread> threads;
  for (int r = 0; r < kWorld; ++r) {
    threads.emplace_back([&cables, r] {
      const SentBytes sent(cables.links[static_cast<std::size_t>(r)]);
      const auto mesh = cables.adopt(r);
      const auto comm = cables.create(mesh, {});
      Floats data = values_of(r, kWorld * kCount), out(kCount);
      const ConstBuffer from{data.data(), data.size()}, shard{out.data(), kCount};
      const Buffer to{out.data(), kCount}, whole{data.data(), data.size()};
      const auto bytes_of = [&](const Coding* coding) {
        const double before = sent.now();
        comm->reduce_scatter({&from, 1}, {&to, 1}, DType::float32, ReduceOp::sum, DType::float32, false, kBlocking, {},
                             coding);
        comm->all_gather({&shard, 1}, {&whole, 1}, DType::float32, kBlocking, coding);
        comm->barrier().wait();  // the kernel has sent all of it
        return sent.now() - before;
      };
      const double exact = bytes_of(nullptr);
      for (const auto& [codec, limit] : {std::pair(kInt8, 0.27), {kFp8, 0.27}, {kInt4, 0.15}, {kSign, 0.04}}) {
        const Coding coding{.codec = codec};
        const double bytes = bytes_of(&coding);
        EXPECT_TRUE(bytes < limit * exact);
        EXPECT_TRUE(bytes >= 2 * (kWorld - 1) * static_cast<double>(encoded_nbytes(codec, kCount)));
      }
      comm->barrier().wait();
      comm->close();
      mesh->leave();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(encoded, allocates_nothing_in_the_steady_state_and_counts_its_memory) {
  run_world(2, small_slots(), [](Rank& self) {
    Floats data(10000);
    const Buffer buffer{data.data(), data.size()};
    const Coding coding{.codec = kInt8};
    const std::size_t without = self.comm->memory().slot_nbytes;
    self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, {}, &coding).wait();
    const std::size_t with = self.comm->memory().slot_nbytes;
    EXPECT_TRUE(with >= without + 3 * encoded_nbytes(kInt8, 10000));
    self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, {}, &coding).wait();
    EXPECT_EQ(self.comm->memory().slot_nbytes, with);
  });
}

}  // namespace encoded_test
