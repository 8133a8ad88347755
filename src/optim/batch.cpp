#include <vector>

#include "base/error.hpp"
#include "optim/kinds.hpp"
#include "zcomm/optim_batch.hpp"

namespace zcomm {

template <class Params>
struct OptimBatch<Params>::Impl {
  using K = optim::Kind<Params>;
  std::vector<OptimBatchItem> items;
  std::vector<optim::CheckedShard> shards;  // of the same items
  std::vector<typename K::Factors> factors;

  static Params params_of(const OptimBatchItem& item, std::span<const Params> groups) {
    if (item.group >= groups.size())
      throw InvalidArgument(text(K::kName, ": an item is of group ", item.group, ", given are ", groups.size()));
    Params params = groups[item.group];
    if constexpr (requires { params.step; })
      if (item.counter != nullptr) params.step = static_cast<std::int64_t>(*item.counter) + 1;
    if constexpr (requires { params.first; }) params.buffer = item.buffer, params.first = item.first;
    return params;
  }

  /// Whether the item before has the same factors.
  bool as_before(std::size_t i) const {
    if (i == 0) return false;
    const OptimBatchItem &a = items[i - 1], &b = items[i];
    const bool counted_alike =
        a.counter == nullptr || b.counter == nullptr ? a.counter == b.counter : *a.counter == *b.counter;
    return a.group == b.group && counted_alike && a.buffer == b.buffer && a.first == b.first;
  }
};

template <class Params>
OptimBatch<Params>::OptimBatch() : impl_(std::make_unique<Impl>()) {}
template <class Params>
OptimBatch<Params>::~OptimBatch() = default;
template <class Params>
OptimBatch<Params>::OptimBatch(OptimBatch&&) noexcept = default;
template <class Params>
OptimBatch<Params>& OptimBatch<Params>::operator=(OptimBatch&&) noexcept = default;

template <class Params>
void OptimBatch<Params>::add(const OptimBatchItem& item) {
  Impl& b = *impl_;
  Params params{};
  if constexpr (requires { params.buffer; }) params.buffer = item.buffer;
  b.items.push_back(item);
  b.shards.push_back({item.shard, Impl::K::arrays(params), b.shards.empty() ? 0 : b.shards.back().end()});
}

template <class Params>
std::size_t OptimBatch<Params>::size() const {
  return impl_->items.size();
}

template <class Params>
void OptimBatch<Params>::step(std::span<const Params> groups, std::span<const void* const> grads, int threads,
                              ExactSum* squares) {
  using K = typename Impl::K;
  Impl& b = *impl_;
  if (grads.size() != b.items.size())
    throw InvalidArgument(text(K::kName, ": ", grads.size(), " gradients for ", b.items.size(), " items"));
  b.factors.resize(b.items.size());
  for (std::size_t i = 0; i < b.items.size(); ++i) {
    const Params params = Impl::params_of(b.items[i], groups);
    b.shards[i].shard.grad = grads[i];
    optim::check_step(b.shards[i].shard, params);
    b.factors[i] = b.as_before(i) ? b.factors[i - 1] : K::factors(params);
  }
  optim::run_step<typename K::Factors>(b.shards, b.factors.data(), threads, optim::current_optim_table().*K::kKernel,
                                       squares);
  for (const OptimBatchItem& item : b.items)
    if (item.counter != nullptr) *item.counter += 1.0f;
}

template class OptimBatch<AdamParams>;
template class OptimBatch<SgdParams>;
template class OptimBatch<LionParams>;
template class OptimBatch<AdagradParams>;

}  // namespace zcomm
