// The pure parts: checksum, extents, blocks.
#include <cstring>
#include <string>

#include "mem/extents.hpp"
#include "mem/io/crc32c.hpp"
#include "mem/io/crc32c_kernels.hpp"
#include "mem_test.hpp"

using namespace zcomm;
using namespace zcomm::mem;
using zcomm::test::Pattern;

TEST(Crc32c, known_values) {
  const auto of = [](const std::string& s) { return crc32c(reinterpret_cast<const std::byte*>(s.data()), s.size()); };
  EXPECT_EQ(of(""), 0u);
  EXPECT_EQ(of("123456789"), 0xE3069283u);            // check value of the CRC catalogue
  EXPECT_EQ(of(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720 B.4
  EXPECT_EQ(of(std::string(32, '\xff')), 0x62A8AB43u);
}

TEST(Crc32c, every_kernel_agrees_with_the_tables) {
  Pattern data(100000, 3);
  const auto check = [&](const NamedCrc32c& kernel, std::size_t shift, std::size_t nbytes) {
    for (const std::uint32_t state : {~0u, 0u, 0x12345678u})
      if (kernel.kernel(state, data.data() + shift, nbytes) != crc32c_tables(state, data.data() + shift, nbytes))
        return test::fail(__FILE__, __LINE__,
                          std::string(kernel.name) + " differs at " + std::to_string(nbytes) + " bytes from " +
                              std::to_string(shift));
  };
  for (const NamedCrc32c& kernel : crc32c_kernels().at) {
    if (!kernel.here) continue;
    for (std::size_t nbytes = 0; nbytes <= 2000; ++nbytes) check(kernel, nbytes % 67, nbytes);
    for (const std::size_t nbytes : {4095, 12287, 12288, 12289, 24576, 65536, 99900})
      for (const std::size_t shift : {0, 1, 5, 63}) check(kernel, shift, nbytes);
  }
}

TEST(Crc32c, a_flipped_bit_shows) {
  Pattern data(100000, 3);
  const auto before = crc32c(data.data(), 100000);
  data.data()[54321] ^= std::byte{4};
  EXPECT_NE(before, crc32c(data.data(), 100000));
}

TEST(Extents, first_fit_and_joining) {
  Extents extents;
  EXPECT_EQ(extents.take(1), 0u);
  EXPECT_EQ(extents.take(8192), 4096u);
  EXPECT_EQ(extents.take(4097), 12288u);
  EXPECT_EQ(extents.take(4096), 20480u);
  EXPECT_EQ(extents.end(), 24576u);
  extents.give_back(4096, 8192);
  EXPECT_EQ(extents.take(4000), 4096u);   // into the hole
  EXPECT_EQ(extents.take(5000), 24576u);  // the rest is too small
  extents.give_back(4096, 4000);
  extents.give_back(12288, 4097);
  EXPECT_EQ(extents.take(16384), 4096u);  // joined with both neighbours
  EXPECT_EQ(extents.used_nbytes(), extents.end());
  EXPECT_EQ(extents.take(0), 0u);
}

TEST(Extents, giving_all_back_leaves_nothing) {
  Extents extents;
  const std::size_t sizes[] = {1, 5000, 4096, 100000, 12288};
  std::vector<std::uint64_t> offsets;
  for (const std::size_t size : sizes) offsets.push_back(extents.take(size));
  for (const std::size_t i : {std::size_t{2}, std::size_t{0}, std::size_t{4}, std::size_t{1}, std::size_t{3}})
    extents.give_back(offsets[i], sizes[i]);
  EXPECT_EQ(extents.used_nbytes(), 0u);
  EXPECT_EQ(extents.end(), 0u);
}

TEST(Blocks, cover_everything_once_and_keep_the_tail_apart) {
  for (const std::size_t alignment : {std::size_t{1}, std::size_t{4096}}) {
    for (const std::size_t nbytes : {0, 1, 511, 4096, 4097, 8192, 12288, 65536, 65537, 200000}) {
      for (const std::size_t block : {4096, 8192, 65536}) {
        std::size_t next = 0;
        const std::size_t count = block_count(nbytes, block, alignment);
        for (std::size_t i = 0; i < count; ++i) {
          const Block each = block_at(i, nbytes, block, alignment);
          EXPECT_EQ(each.begin, next);
          EXPECT_GT(each.nbytes, 0u);
          EXPECT_LE(each.nbytes, block);
          if (i + 1 < count) EXPECT_EQ(each.nbytes % alignment, 0u);
          next += each.nbytes;
        }
        EXPECT_EQ(next, nbytes);
        if (count > 0 && nbytes % alignment != 0)
          EXPECT_EQ(block_at(count - 1, nbytes, block, alignment).nbytes, nbytes % alignment);
      }
    }
  }
}
