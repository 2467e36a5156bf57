// What the source's engine reported: prompts that have no grant yet, and its own heartbeats.
//
// An id is *expected* from the moment the engine accepts its prompt until its grant is made or aborted. The engine *pulses* with
// each step, and once more when it goes idle. A pulse also says whether the engine has taken in everything that had reached it by
// its last such pulse. So the source can answer a pull that came before its grant: whether the prompt is known, how many prompts
// are ahead of it, and how long ago the engine pulsed. An id that is not expected may still be on its way to the engine: it counts
// as unknown only after the pull has waited while the engine took in its queue twice, or was idle.
#pragma once

#include <algorithm>
#include <map>
#include <unordered_map>

#include "codes.hpp"
#include "ids.hpp"

namespace kvxfer {

class Intake {
 public:
  Intake(size_t max, Nanos unknown_wait_ns) : max_(max), unknown_wait_ns_(unknown_wait_ns) {}

  // No effect if repeated. Throws Error(limit_exceeded).
  void expect(const TransferId& id) {
    if (order_of_.count(id) != 0) return;
    if (order_of_.size() >= max_) throw Error(Code::limit_exceeded, "grants_max (" + std::to_string(max_) + ") prompts are accepted and have no grant");
    order_of_[id] = next_;
    by_order_[next_++] = id;
  }
  void forget(const TransferId& id) {
    const auto found = order_of_.find(id);
    if (found == order_of_.end()) return;
    by_order_.erase(found->second);
    order_of_.erase(found);
  }
  bool expects(const TransferId& id) const { return order_of_.count(id) != 0; }
  size_t size() const { return order_of_.size(); }
  // An upper bound of the prompts that were accepted earlier and still wait: it counts aborted ones among them too.
  uint32_t position(const TransferId& id) const {
    return static_cast<uint32_t>(std::min<uint64_t>(order_of_.at(id) - by_order_.begin()->first, UINT32_MAX - 1));
  }

  void pulse(bool has_work, bool took_in, Nanos now) {
    if (!has_work && (has_work_ || !has_engine_)) idle_since_ = now;
    has_engine_ = true;
    has_work_ = has_work;
    pulsed_at_ = now;
    if (took_in) ++rounds_;
  }
  uint64_t rounds() const { return rounds_; }
  // An accepted prompt counts as work, whatever the engine's last pulse said: the engine may have stopped before taking it in.
  bool has_work() const { return has_work_ || (has_engine_ && !order_of_.empty()); }
  // The age to report to a pull that came at `came_at`: time since the engine's last heartbeat; 0 for an idle engine.
  Nanos age(Nanos came_at, Nanos now) const {
    if (!has_work()) return 0;
    return std::max<Nanos>(now - (has_work_ ? pulsed_at_ : std::max(pulsed_at_, came_at)), 0);
  }
  // Whether a pull that came at `came_at`, after `rounds_before`, means a prompt that never reached this engine. Always false if no
  // engine pulses.
  bool is_unknown(const TransferId& id, Nanos came_at, uint64_t rounds_before, Nanos now) const {
    if (!has_engine_ || expects(id) || now - came_at < unknown_wait_ns_) return false;
    return rounds_ - rounds_before >= 2 || (!has_work_ && now - idle_since_ >= unknown_wait_ns_);
  }

 private:
  size_t max_;
  Nanos unknown_wait_ns_;
  std::unordered_map<TransferId, uint64_t, TransferIdHash> order_of_;
  std::map<uint64_t, TransferId> by_order_;
  uint64_t next_ = 0, rounds_ = 0;
  bool has_engine_ = false, has_work_ = false;
  Nanos pulsed_at_ = 0, idle_since_ = 0;
};

}  // namespace kvxfer
