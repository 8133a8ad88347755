// Remembering the first error (coll/failure.hpp).
#include "coll/failure.hpp"

#include <string>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

std::string since(const std::exception& error) { return text("the communicator is unusable since: ", error.what()); }

}  // namespace

void Failure::set(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!first_) first_ = std::move(error);
  is_set_.store(true, std::memory_order_release);
}

std::exception_ptr Failure::repeated() const {
  if (!is_set_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(mutex_);
  try {
    std::rethrow_exception(first_);
  } catch (const PeerLost& error) {
    return std::make_exception_ptr(PeerLost(error.rank, since(error)));
  } catch (const Timeout& error) {
    return std::make_exception_ptr(Timeout(since(error)));
  } catch (const CollectiveMismatch& error) {
    return std::make_exception_ptr(CollectiveMismatch(since(error)));
  } catch (const CudaError& error) {
    return std::make_exception_ptr(CudaError(since(error)));
  } catch (const SystemError& error) {
    return std::make_exception_ptr(SystemError(error.code, since(error), error.path));
  } catch (const std::exception& error) {
    return std::make_exception_ptr(Error(since(error)));
  } catch (...) {
    return std::make_exception_ptr(Error("the communicator is unusable since an unknown error"));
  }
}

void Failure::throw_if_set() const {
  if (auto error = repeated()) std::rethrow_exception(error);
}

}  // namespace zcomm::coll
