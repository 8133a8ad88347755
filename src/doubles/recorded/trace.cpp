// Recording, and describing races (doubles/recorded/trace.hpp).
#include "doubles/recorded/trace.hpp"

#include <algorithm>
#include <atomic>
#include <sstream>
#include <utility>

#include "base/error.hpp"

namespace zcomm::device {

namespace {

constexpr std::size_t kMostRaces = 1000;

void put_range(std::ostream& out, const ByteRange& range) {
  out << "[0x" << std::hex << range.begin << ", 0x" << range.end << std::dec << ")";
}

void put_side(std::ostream& out, const Race::Side& side) {
  out << side.actor << (side.is_write ? " writes " : " reads ");
  put_range(out, side.range);
  out << " in '" << side.label << "' (operation " << side.operation << ")";
}

}  // namespace

std::string Race::describe() const {
  std::ostringstream out;
  out << "race on " << overlap.end - overlap.begin << " bytes ";
  put_range(out, overlap);
  out << ": ";
  put_side(out, first);
  out << "; ";
  put_side(out, second);
  out << "; nothing orders them: " << remedy;
  return out.str();
}

Trace::Trace()
    : finder_(
          [this](std::uint32_t earlier, std::uint32_t later, ByteRange overlap) { found(earlier, later, overlap); }) {}

Trace::Actor Trace::add(std::string name, bool is_host) {
  participants_.push_back({std::move(name), is_host});
  return finder_.add_actor();
}

Trace::Host& Trace::this_host() {
  static std::atomic<std::uint64_t> threads{0};
  thread_local const std::uint64_t number = threads.fetch_add(1);
  Host& host = hosts_[number];
  if (host.actor < 0) host.actor = add(hosts_.size() == 1 ? "the host" : text("host thread ", hosts_.size()), true);
  return host;
}

Trace::Actor Trace::host() {
  const std::lock_guard lock(mutex_);
  return this_host().actor;
}

void Trace::set_subject(const std::string& subject) {
  const std::lock_guard lock(mutex_);
  this_host().subject = subject;
}

Trace::Actor Trace::queue(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto [place, is_new] = queues_.try_emplace(name, -1);
  if (is_new) place->second = add(name, false);
  return place->second;
}

Trace::Actor Trace::add_stream(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return add(name, false);
}

void Trace::rename(Actor actor, const std::string& name) {
  const std::lock_guard lock(mutex_);
  participants_.at(static_cast<std::size_t>(actor)).name = name;
}

/// An operation of a stream or queue follows all earlier operations of the thread that queues it.
void Trace::begin(Actor actor, const std::string& label) {
  const auto& [caller, subject] = this_host();
  if (actor != caller) finder_.join(actor, finder_.clock(caller));
  finder_.tick(actor);
  operations_.push_back({actor, subject.empty() ? label : text(label, ", ", subject)});
  found_before_ = found_.size();
}

void Trace::add_access(Actor actor, ByteRange range, bool is_write) {
  const auto number = static_cast<std::uint32_t>(accesses_.size());
  accesses_.push_back({static_cast<std::uint32_t>(operations_.size() - 1), range, is_write});
  if (is_write)
    finder_.write(actor, range, number);
  else
    finder_.read(actor, range, number);
}

void Trace::touch(Actor actor, const Footprint& footprint, const std::string& label) {
  const std::lock_guard lock(mutex_);
  begin(actor, label);
  for (const ByteRange& range : footprint.reads) add_access(actor, range, false);
  for (const ByteRange& range : footprint.writes) add_access(actor, range, true);
}

void Trace::free(ByteRange range) {
  const std::lock_guard lock(mutex_);
  const Actor caller = this_host().actor;
  begin(caller, "free");
  add_access(caller, range, true);
  finder_.forget(range);
}

Trace::Point Trace::mark(Actor actor) {
  const std::lock_guard lock(mutex_);
  const Actor caller = this_host().actor;
  if (actor != caller) finder_.join(actor, finder_.clock(caller));
  return std::make_shared<const RaceFinder::Clock>(finder_.clock(actor));
}

void Trace::order(const Point& before, Actor after) {
  if (!before) return;
  const std::lock_guard lock(mutex_);
  finder_.join(after, *before);
}

/// Reports one race, not several, for accesses that meet in several intervals and for memory both read and written.
void Trace::found(std::uint32_t earlier, std::uint32_t later, ByteRange overlap) {
  const auto same = [this](std::uint32_t a, std::uint32_t b) {
    const Access &x = accesses_[a], &y = accesses_[b];
    return x.operation == y.operation && x.range.begin == y.range.begin && x.range.end == y.range.end;
  };
  for (std::size_t i = found_before_; i < found_.size(); ++i) {
    Found& known = found_[i];
    if (!same(known.earlier, earlier) || !same(known.later, later)) continue;
    known.overlap.begin = std::min(known.overlap.begin, overlap.begin);
    known.overlap.end = std::max(known.overlap.end, overlap.end);
    if (accesses_[earlier].is_write) known.earlier = earlier;
    if (accesses_[later].is_write) known.later = later;
    return;
  }
  ++race_count_;
  if (found_.size() < kMostRaces) found_.push_back({earlier, later, overlap});
}

Race::Side Trace::side(std::uint32_t access) const {
  const Access& known = accesses_[access];
  const Operation& operation = operations_[known.operation];
  return {participants_[static_cast<std::size_t>(operation.actor)].name, operation.label, known.operation, known.range,
          known.is_write};
}

std::string Trace::remedy(Actor first, const Race& race, Actor second) const {
  const auto is_host = [&](Actor actor) { return participants_[static_cast<std::size_t>(actor)].is_host; };
  if (is_host(first))
    return text("if ", race.first.actor, " hands the memory on (by a lock, a queue, a Work), tell the trace by ",
                "order(); else let it do so before '", race.second.label, "' is called");
  if (is_host(second))
    return text("let ", race.second.actor, " synchronize an event recorded on ", race.first.actor, " after '",
                race.first.label, "' before '", race.second.label, "'");
  return text("record an event on ", race.first.actor, " after '", race.first.label, "' and let ", race.second.actor,
              " wait for it before '", race.second.label, "'");
}

std::vector<Race> Trace::races() const {
  const std::lock_guard lock(mutex_);
  std::vector<Race> all;
  for (const Found& each : found_) {
    Race race{side(each.earlier), side(each.later), each.overlap, ""};
    race.remedy = remedy(operations_[accesses_[each.earlier].operation].actor, race,
                         operations_[accesses_[each.later].operation].actor);
    all.push_back(std::move(race));
  }
  return all;
}

std::size_t Trace::operations() const {
  const std::lock_guard lock(mutex_);
  return operations_.size();
}

std::size_t Trace::race_count() const {
  const std::lock_guard lock(mutex_);
  return race_count_;
}

}  // namespace zcomm::device
