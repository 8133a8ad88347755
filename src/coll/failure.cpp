// Remembering the first error (coll/failure.hpp).
#include "coll/failure.hpp"

#include <string>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {

namespace {

/// An error of the same type with another message. lost: makes a PeerLost of one and its message.
template <class Message, class Lost>
std::exception_ptr reworded(const std::exception_ptr& error, const Message& message, const Lost& lost) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& from) {
    return std::make_exception_ptr(lost(from, message(from)));
  } catch (const Timeout& from) {
    return std::make_exception_ptr(Timeout(message(from)));
  } catch (const CollectiveMismatch& from) {
    return std::make_exception_ptr(CollectiveMismatch(message(from)));
  } catch (const CudaError& from) {
    return std::make_exception_ptr(CudaError(message(from)));
  } catch (const InvalidArgument& from) {
    return std::make_exception_ptr(InvalidArgument(message(from)));
  } catch (const Unsupported& from) {
    return std::make_exception_ptr(Unsupported(message(from)));
  } catch (const SystemError& from) {
    return std::make_exception_ptr(SystemError(from.code, message(from), from.path));
  } catch (const std::exception& from) {
    return std::make_exception_ptr(Error(message(from)));
  } catch (...) {
    return std::make_exception_ptr(Error(message(std::runtime_error("an unknown error"))));
  }
}

}  // namespace

std::exception_ptr prefixed(const std::exception_ptr& error, const std::string& before, std::optional<int> rank) {
  return reworded(
      error, [&](const std::exception& from) { return text(before, from.what()); },
      [&](const PeerLost& from, const std::string& message) {
        return PeerLost(rank.value_or(from.rank), message, from.job_rank);
      });
}

std::exception_ptr placed(const std::exception_ptr& error, const RanksInJob& ranks) {
  return reworded(
      error, [&](const std::exception& from) { return text(from.what(), ranks.text); },
      [&](const PeerLost& from, const std::string& message) {
        const auto rank = static_cast<std::size_t>(from.rank);  // -1: beyond all
        const int in_job = from.job_rank >= 0 || rank >= ranks.of.size() ? from.job_rank : ranks.of[rank];
        return PeerLost(from.rank, message, in_job);
      });
}

std::exception_ptr repeated(const std::exception_ptr& first) {
  const std::string since = "the communicator is unusable since: ";
  try {
    std::rethrow_exception(first);
  } catch (const std::exception& error) {
    if (std::string_view(error.what()).starts_with(since)) return first;
  } catch (...) {
  }
  return prefixed(first, since);
}

void Failure::set(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!first_) first_ = std::move(error);
  is_set_.store(true, std::memory_order_release);
}

std::exception_ptr Failure::repeated() const {
  if (!is_set_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(mutex_);
  return coll::repeated(first_);
}

void Failure::throw_if_set() const {
  if (auto error = repeated()) std::rethrow_exception(error);
}

}  // namespace zcomm::coll
