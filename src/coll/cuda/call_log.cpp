// Digests of calls (coll/cuda/call_log.hpp).
#include "coll/cuda/call_log.hpp"

namespace zcomm::coll {

void CallLog::add(Operation& operation) {
  const CallDigest before = (*this)[count_].digest;
  ++count_;
  Signature& signature = operation.signature;
  signature.sequence = static_cast<std::uint32_t>(count_);
  Entry& entry = entries_[count_ % kRoom];
  copy_signature(entry.signature, signature);
  entry.splits.clear();
  entry.digest = {mix(before.calls, signature.identity), before.balance};
  if (signature.kind != OpKind::all_to_all) return;
  entry.splits = split_counts(operation.items.all());
  entry.digest.balance += (mix(7, count_) | 1) * signature.counts[0];
}

}  // namespace zcomm::coll
