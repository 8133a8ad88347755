// Fate: the state of a rank to the others. Cause: why a group of ranks cannot continue. All engines use both from here.
//
// [Note: fates] A rank died if its process or its sockets ended without a goodbye. It left if it said goodbye, or if it
// closed its communicator while it lives. Anything else is alive, however late: a deadline decides when a late rank
// becomes a Cause. All ranks of a group report one Cause, the first failure.
// Invariant: a fate changes once, from alive. Thread rule: pure functions.
#pragma once

#include <cstdint>
#include <string>

namespace zcomm::net {

enum class Fate : std::uint8_t { alive, died, left };

/// A rank that can no longer be reached.
struct Loss {
  int rank;
  Fate fate;  ///< died or left
};

/// The fate of a rank that the mesh knows as `known`. has_closed: its communicator is closed.
constexpr Fate fate_of(Fate known, bool has_closed) { return known == Fate::alive && has_closed ? Fate::left : known; }

/// Ranks send each other the values.
enum class Cause : std::uint32_t { none, died, left, late, failed, mismatch };

/// For a rank that others wait for: if it is alive, it has closed its communicator.
constexpr Cause cause_of(Fate fate) { return fate == Fate::died ? Cause::died : Cause::left; }

/// Each rank has its own text for died and left; for other causes the rank that noticed sends the text to all.
constexpr bool has_message(Cause cause) { return cause != Cause::died && cause != Cause::left; }

/// "rank 3 died" or "rank 3 left (closed its communicator or said goodbye)".
std::string describe(const Loss& loss);

/// Throws the error that all ranks of a group report: PeerLost of `rank` (died, left), Timeout (late),
/// CollectiveMismatch, or Error (failed). message: has_message(cause). during: the operation of this rank, or "".
[[noreturn]] void throw_cause(Cause cause, int rank, const std::string& message, const std::string& during);

}  // namespace zcomm::net
