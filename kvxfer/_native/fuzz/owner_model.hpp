// A model of an endpoint's owner: each grant, transfer and offer ends once, no event is out of order, and no commit comes without a
// peer's confirmation.
#pragma once

#include <set>
#include <utility>

#include "input.hpp"
#include "machines/effects.hpp"

namespace kvxfer::fuzz {

class OwnerModel {
 public:
  void granted(const TransferId& id) { begin(id, granted_, ended_, ended_, "an id is granted again whose grant is not over"); }
  void posted(const TransferId& id) { begin(id, posted_, final_, drained_, "an id is posted again that is not over"); }
  // A frame of a peer, before the endpoint gets it.
  void heard(const Frame& frame) {
    if (const auto* verdict = std::get_if<Verdict>(&frame); verdict != nullptr && verdict->code == Code::ok) oks_.insert(verdict->id);
    if (const auto* done = std::get_if<Done>(&frame); done != nullptr && done->code == Code::ok) oks_.insert(done->id);
  }
  // A read into its memory begins, and ends.
  void begin_landing(const TransferId& id) { check(landing_.insert(id).second, "two reads of one transfer at once"); }
  void end_landing(const TransferId& id) { landing_.erase(id); }

  void told(const GrantEnded& e) { check(granted_.count(e.id) != 0 && ended_.insert(e.id).second, "the end of a grant is told twice, or of none"); }
  void told(const TransferProgress& e) {
    check(posted_.count(e.id) != 0 && final_.count(e.id) == 0 && e.done <= e.total, "progress of nothing");
  }
  void told(const TransferFinal& e) {
    check(is_final(e.state) && posted_.count(e.id) != 0 && final_.insert(e.id).second, "a transfer is final twice, or was never asked for");
    if (e.state == TransferState::Committed) check(was_confirmed(e.id) && landing_.count(e.id) == 0, "a transfer committed without a confirmation");
  }
  void told(const TransferDrained& e) {
    check(final_.count(e.id) != 0 && drained_.insert(e.id).second, "a transfer drained before it was final, or twice");
    check(landing_.count(e.id) == 0, "blocks are given back that are still being filled");
  }
  // A push's notification comes just before the report that its bytes are there.
  void told(const NotifReceived& e) {
    if (e.seq == 0) pushed_by_ = e.from;
  }
  void told(const OfferEnded& e) {
    if (const auto from = std::exchange(pushed_by_, std::nullopt)) check(*from == e.from && e.state == TransferState::Committed, "a push is told of that is not committed");
    if (e.state == TransferState::Committed) check(was_confirmed(e.id) && landing_.count(e.id) == 0, "an offer committed without a confirmation");
  }
  template <class T>
  void told(const T&) {}

  void check_over() const {
    check(!pushed_by_, "a push is told of that was never over");
    for (const TransferId& id : granted_) check(ended_.count(id) != 0, "a grant was never said to be over");
    for (const TransferId& id : posted_) check(final_.count(id) != 0, "a transfer was never said to be final");
    for (const TransferId& id : final_) check(drained_.count(id) != 0, "a final transfer never drained");
    check(landing_.empty(), "a read was never said to be over");
  }

 private:
  // An id begins. An endpoint remembers only its latest ends (finished_max, tombstones_max), so an id may begin again, but only if it
  // is in `over`. `ended` is then cleared for the new use.
  static void begin(const TransferId& id, std::set<TransferId>& begun, std::set<TransferId>& ended, std::set<TransferId>& over, const char* rule) {
    if (!begun.insert(id).second) check(over.erase(id) != 0, rule);
    ended.erase(id);
  }
  bool was_confirmed(const TransferId& id) const { return oks_.count(id) != 0; }

  std::optional<AgentRef> pushed_by_;  // the sender of a push's notification, until the OfferEnded of that push
  std::set<TransferId> granted_, ended_, posted_, final_, drained_, landing_;
  std::set<TransferId> oks_;  // ids for which a peer has sent a VERDICT or DONE with code ok
};

}  // namespace kvxfer::fuzz
