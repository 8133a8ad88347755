// Comparing and describing operations (coll/signature.hpp).
#include "coll/signature.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

#ifdef ZCOMM_BENCH
bool guard_enabled = true;
#endif

const char* name_of(OpKind kind) {
  static constexpr const char* names[] = {"all_reduce",      "reduce",    "reduce_scatter", "all_gather", "broadcast",
                                          "gather",          "scatter",   "all_to_all",     "barrier",    "allocate",
                                          "allocate_shared", "duplicate", "send",           "recv"};
  return names[static_cast<int>(kind)];
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  // splitmix64's finaliser: a change of any bit reaches all.
  std::uint64_t x = hash * 0x9e3779b97f4a7c15u + value + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

namespace {

/// The rest is already zero; returns the length of the whole text.
template <std::size_t kRoom>
std::size_t cut_to_fit(char (&to)[kRoom], const char* text) {
  const std::size_t length = text == nullptr ? 0 : std::strlen(text);
  std::memcpy(to, text, std::min(length, kRoom - 1));
  return length;
}

}  // namespace

namespace {

constexpr std::uint32_t kIsCoded = 1u << 31, kDifferences = 1u << 30, kMasks = 1u << 29, kCodecId = kMasks - 1;

std::string coding_name(std::uint32_t coding) {
  return text(name_of(codec_of_word(coding)), (coding & kDifferences) != 0 ? " differences" : "",
              (coding & kMasks) != 0 ? " masks" : "");
}

}  // namespace

std::uint32_t coding_word(const Coding& coding) {
  return codec_id(coding.codec) | kIsCoded | (coding.differences ? kDifferences : 0) |
         (coding.masks.empty() ? 0 : kMasks);
}

Codec codec_of_word(std::uint32_t coding) { return codec_of(coding & kCodecId); }

void set_name(Signature& signature, const char* name, const char* site) {
  if (!guard_enabled) return;
  cut_to_fit(signature.site, site);
  const std::size_t length = cut_to_fit(signature.name, name);
  signature.name_hash = length;
  for (std::size_t i = 0; i < length; i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, name + i, std::min(length - i, sizeof(word)));
    signature.name_hash = mix(signature.name_hash, word);
  }
}

void copy_signature(Signature& to, const Signature& from) {
  static_assert(std::is_trivially_copyable_v<Signature>);
  const bool has_text = from.name[0] != '\0' || from.site[0] != '\0';
  const std::size_t fields = from.coding == 0 ? offsetof(Signature, whole) : offsetof(Signature, name);
  std::memcpy(static_cast<void*>(&to), &from, has_text ? sizeof(Signature) : fields);
  if (!has_text) to.name[0] = to.site[0] = '\0';
}

namespace {

void seal_coding(Signature& signature) {
  const WholeCall& whole = signature.whole;
  const std::uint64_t what =
      static_cast<std::uint64_t>(whole.kind) | static_cast<std::uint64_t>(whole.dtype) << 8 |
      static_cast<std::uint64_t>(whole.out_dtype) << 16 | static_cast<std::uint64_t>(whole.op) << 24 |
      static_cast<std::uint64_t>(whole.accumulate) << 31 | static_cast<std::uint64_t>(whole.step) << 32;
  const std::uint64_t counts = mix(mix(whole.count, whole.counts_hash), whole.buffers);
  signature.identity = mix(mix(mix(signature.identity, signature.coding), what), counts);
}

}  // namespace

void seal(Signature& signature) {
  if (!guard_enabled) return;
  const std::uint64_t what =
      static_cast<std::uint64_t>(signature.kind) | static_cast<std::uint64_t>(signature.dtype) << 8 |
      static_cast<std::uint64_t>(signature.out_dtype) << 16 | static_cast<std::uint64_t>(signature.op) << 24 |
      static_cast<std::uint64_t>(signature.order) << 30 | static_cast<std::uint64_t>(signature.accumulate) << 31 |
      static_cast<std::uint64_t>(static_cast<std::uint32_t>(signature.root)) << 32;
  // Independent products, so that only the last mix is on the critical path.
  const std::uint64_t counts = signature.counts_hash * 0x9e3779b97f4a7c15u ^ signature.count * 0xc2b2ae3d27d4eb4fu;
  signature.identity = mix(mix(what, counts + signature.buffers), signature.name_hash);
  if (signature.coding != 0) seal_coding(signature);
}

bool same_operation(const Signature& a, const Signature& b) {
  return a.identity == b.identity && a.sequence == b.sequence;
}

std::string describe(const Signature& given) {
  Signature signature = given;
  if (const WholeCall& whole = given.whole; given.coding != 0 && whole.step != 0) {
    signature.kind = whole.kind, signature.dtype = whole.dtype, signature.out_dtype = whole.out_dtype;
    signature.op = whole.op, signature.accumulate = whole.accumulate, signature.buffers = whole.buffers;
    signature.count = whole.count, signature.counts_hash = whole.counts_hash;
    std::copy_n(whole.counts, Signature::kShownCounts, signature.counts);
  }
  std::ostringstream out;
  const OpKind kind = signature.kind;
  out << name_of(kind);
  if (moves_data(kind)) {
    out << ' ' << name_of(signature.dtype);
    if (signature.out_dtype != signature.dtype) out << " -> " << name_of(signature.out_dtype);
    if (reduces(kind)) out << ' ' << name_of(signature.op);
    if (signature.order == ReduceOrder::rank) out << " in rank order";
    if (signature.accumulate) out << " accumulate";
    if (signature.coding != 0) out << " codec=" << coding_name(signature.coding);
    if (has_root(kind)) out << " root=" << signature.root;
    if (kind != OpKind::all_to_all) out << " count=" << signature.count;
    if (signature.buffers != 1 && kind != OpKind::all_to_all) {
      out << " in " << signature.buffers << " buffers [";
      const std::size_t shown = std::min<std::size_t>(signature.buffers, Signature::kShownCounts);
      for (std::size_t i = 0; i < shown; ++i) out << (i == 0 ? "" : ", ") << signature.counts[i];
      if (signature.buffers > shown) out << ", ...; layout " << std::hex << (signature.counts_hash >> 32) << std::dec;
      out << ']';
    }
  } else if (kind == OpKind::allocate || kind == OpKind::allocate_shared) {
    out << " nbytes=" << signature.count;
  }
  if (signature.name[0] != '\0') out << " '" << signature.name << '\'';
  if (signature.site[0] != '\0') out << " at " << signature.site;
  return out.str();
}

void require_same(int world_size, const std::function<const Signature&(int rank)>& signature_of,
                  std::span<const int> names) {
  bool same = true;
  for (int rank = 1; rank < world_size; ++rank) same &= same_operation(signature_of(0), signature_of(rank));
  if (same) return;

  std::vector<std::pair<const Signature*, std::string>> sides;  // one per distinct signature, with its ranks
  for (int rank = 0; rank < world_size; ++rank) {
    const Signature& signature = signature_of(rank);
    const int name = names.empty() ? rank : names[static_cast<std::size_t>(rank)];
    const auto side =
        std::find_if(sides.begin(), sides.end(), [&](const auto& s) { return same_operation(*s.first, signature); });
    if (side == sides.end())
      sides.emplace_back(&signature, text("rank ", name));
    else
      side->second += text(", ", name);
  }
  std::string message = text("ranks called different operations as number ", signature_of(0).sequence, ": ");
  for (std::size_t i = 0; i < sides.size(); ++i)
    message += text(i == 0 ? "" : "; ", sides[i].second, ": ", describe(*sides[i].first));
  throw CollectiveMismatch(message);
}

}  // namespace zcomm::coll
