// Remembering the first error (coll/failure.hpp).
#include "coll/failure.hpp"

#include <string>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {

namespace {

/// An error of the same type with another message. lost: the rank of a PeerLost.
template <class Message>
std::exception_ptr reworded(const std::exception_ptr& error, std::optional<int> lost, const Message& message) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& from) {
    return std::make_exception_ptr(PeerLost(lost.value_or(from.rank), message(from)));
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

std::exception_ptr prefixed(const std::exception_ptr& error, const std::string& before, std::optional<int> lost) {
  return reworded(error, lost, [&](const std::exception& from) { return text(before, from.what()); });
}

std::exception_ptr suffixed(const std::exception_ptr& error, const std::string& behind) {
  return reworded(error, {}, [&](const std::exception& from) { return text(from.what(), behind); });
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
