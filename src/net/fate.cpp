// See fate.hpp.
#include "net/fate.hpp"

#include "base/error.hpp"

namespace zcomm::net {

std::string describe(const Loss& loss) {
  return loss.fate == Fate::died ? text("rank ", loss.rank, " died")
                                 : text("rank ", loss.rank, " left (closed its communicator or said goodbye)");
}

void throw_cause(Cause cause, int rank, const std::string& message, const std::string& during) {
  const std::string cut_short = during.empty() ? "" : text("; ", during, " cannot finish");
  switch (cause) {
    case Cause::died:
      throw PeerLost(rank, describe(Loss{rank, Fate::died}) + cut_short);
    case Cause::left:
      throw PeerLost(rank, text(describe(Loss{rank, Fate::left}), " while others needed it", cut_short));
    case Cause::late:
      throw Timeout(message);
    case Cause::mismatch:
      throw CollectiveMismatch(message);
    case Cause::none:
    case Cause::failed:
      break;
  }
  throw Error(text("rank ", rank, " failed: ", message));
}

}  // namespace zcomm::net
