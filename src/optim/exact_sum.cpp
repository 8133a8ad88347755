// ExactSum: a fixed-point number of 69 32-bit digits, lowest first; bit 0 weighs 2^-1074, the smallest double.
//
// Invariant: |word| < 2^62. An addition changes a word by less than 2^32, so carries wait for kPendingLimit of them;
// normalized words are below 2^32, so 2^20 accumulators may be added word by word in between.
#include "zcomm/exact_sum.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#include "base/error.hpp"
#include "base/float_mode.hpp"
#include "base/thread_pool.hpp"
#include "device/kernels.hpp"
#include "optim/shard.hpp"
#include "optim/stream_optim.hpp"

namespace zcomm {
namespace {

constexpr std::size_t kPartCount = 64 * 64 * kNormBlock;  // elements that are worth a thread
constexpr std::size_t kDigits = ExactSum::kWords - 1;     // the last word counts non-finite terms
constexpr std::uint32_t kPendingLimit = 1u << 29;
constexpr std::int64_t kDigitMask = 0xffffffff;

/// Moves carries up: digits in [0, 2^32), except that the highest keeps the sign.
void carry(std::int64_t* words) {
  for (std::size_t i = 0; i + 1 < kDigits; ++i) {
    words[i + 1] += words[i] >> 32;  // arithmetic shift: floor
    words[i] &= kDigitMask;
  }
}

/// Carried, non-negative digits -> double, rounded once to nearest even.
double round_digits(const std::int64_t* words) {
  std::size_t top = kDigits;
  while (top > 0 && words[top - 1] == 0) --top;
  if (top == 0) return 0.0;
  const auto digit = [&](std::size_t below) -> std::uint64_t {
    return below < top ? static_cast<std::uint64_t>(words[top - 1 - below]) : 0;
  };
  // The 64 bits from the highest set one down, and whether anything is left below (sticky): 64 >= 53 + 2 bits, so the
  // conversion to double rounds as if it saw all of them. Sums of up to 53 bits convert exactly.
  const int zeros = std::countl_zero(static_cast<std::uint32_t>(digit(0)));
  std::uint64_t mantissa = (digit(0) << 32 | digit(1)) << zeros;
  if (zeros > 0) mantissa |= digit(2) >> (32 - zeros);
  bool sticky = (digit(2) << zeros & kDigitMask) != 0;
  for (std::size_t below = 3; below < top; ++below) sticky = sticky || digit(below) != 0;
  mantissa |= sticky ? 1 : 0;
  const int exponent = 32 * (static_cast<int>(top) - 2) - zeros - 1074;  // weight of the mantissa's bit 0
  return std::ldexp(static_cast<double>(mantissa), exponent);
}

}  // namespace

void ExactSum::clear() { *this = ExactSum(); }

void ExactSum::add(double term) {
  if (!std::isfinite(term)) {
    ++words_[kDigits];
    return;
  }
  const auto bits = std::bit_cast<std::uint64_t>(term);
  const auto exponent = static_cast<unsigned>(bits >> 52 & 0x7ff);
  const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
  const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | std::uint64_t{1} << 52;
  const unsigned position = exponent == 0 ? 0 : exponent - 1, shift = position % 32;
  const std::uint64_t low = mantissa << shift;
  const std::uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
  std::int64_t* word = words_ + position / 32;
  const std::int64_t sign = term < 0 ? -1 : 1;
  word[0] += sign * (static_cast<std::int64_t>(low) & kDigitMask);
  word[1] += sign * static_cast<std::int64_t>(low >> 32);
  word[2] += sign * static_cast<std::int64_t>(high);
  if (++pending_ >= kPendingLimit) normalize();
}

void ExactSum::normalize() {
  carry(words_);
  pending_ = 0;
}

void ExactSum::add(ExactSum other) {
  normalize();
  other.normalize();
  for (std::size_t i = 0; i < kWords; ++i) words_[i] += other.words_[i];
  normalize();
}

double ExactSum::value() const {
  if (words_[kDigits] != 0) return std::numeric_limits<double>::quiet_NaN();
  std::int64_t words[kWords];
  std::copy(std::begin(words_), std::end(words_), words);
  carry(words);
  if (words[kDigits - 1] >= 0) return round_digits(words);
  for (std::int64_t& word : words) word = -word;
  carry(words);
  return -round_digits(words);
}

namespace optim {

void check_squares(const void* grad, DType dtype, std::size_t count) {
  if (dtype != DType::float32 && dtype != DType::bfloat16 && dtype != DType::float16)
    throw InvalidArgument(text("add_squares: ", name_of(dtype), " is not float32, bfloat16 or float16"));
  if (grad == nullptr && count > 0) throw InvalidArgument(text("add_squares: grad is null, count ", count));
}

void block_squares(double* sums, const void* grad, DType dtype, std::size_t count) {
  const DefaultFloatMode mode;
  const auto& table = current_optim_table();
  const std::size_t blocks = count / kNormBlock, rest = count % kNormBlock;
  table.squares(sums, grad, dtype, blocks);
  if (rest == 0) return;
  float padded[kNormBlock] = {};  // zeros add nothing
  const auto* last = static_cast<const std::byte*>(grad) + blocks * kNormBlock * size_of(dtype);
  device::cast(padded, DType::float32, last, dtype, rest);
  table.squares(sums + blocks, padded, DType::float32, 1);
}

void add_block_sums(ExactSum& sum, std::span<const double> sums) {
  for (const double term : sums) sum.add(term);
}

void add_squares_alone(ExactSum& sum, const void* grad, DType dtype, std::size_t count) {
  constexpr std::size_t at_once = 64 * kNormBlock;  // the sums are kept on the stack
  double sums[at_once / kNormBlock];
  const auto* bytes = static_cast<const std::byte*>(grad);
  for (std::size_t i = 0; i < count; i += at_once) {
    const std::size_t n = std::min(at_once, count - i);
    block_squares(sums, bytes + i * size_of(dtype), dtype, n);
    add_block_sums(sum, std::span(sums, (n + kNormBlock - 1) / kNormBlock));
  }
}

}  // namespace optim

void add_squares(ExactSum& sum, const void* grad, DType dtype, std::size_t count) {
  optim::check_squares(grad, dtype, count);
  if (count <= kPartCount) return optim::add_squares_alone(sum, grad, dtype, count);
  std::mutex mutex;
  ThreadPool::shared().parallel_for(count, kPartCount, 0, [&](std::size_t begin, std::size_t end) {
    ExactSum mine;
    optim::add_squares_alone(mine, static_cast<const std::byte*>(grad) + begin * size_of(dtype), dtype, end - begin);
    const std::lock_guard lock(mutex);
    sum.add(mine);
  });
}

}  // namespace zcomm
