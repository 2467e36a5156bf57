// RELEASE and REVOKE frames that the peer may not have received. A reader sends RELEASE once when it no longer needs a grant; a writer
// sends REVOKE once when the peer must stop reading for a write. If the connection breaks after that frame, or none was up to send it
// over, the source would keep its grant until it expires, and the destination would go on filling memory that the writer reuses. So
// the frame is sent again, before all others, over the next session to the same incarnation, whichever side dials that session. No
// session is dialed for it: otherwise expiry and deadline end the grant and the write.
#pragma once

#include <deque>
#include <utility>

#include "ids.hpp"

namespace kvxfer {

struct UnackedEnd {
  TransferId id;
  Nanos until = 0;  // every grant has ended by then
  bool is_of_push = false;  // send REVOKE, else RELEASE
};

// Oldest first; beyond kMax the oldest are dropped.
class UnackedEnds {
 public:
  static constexpr size_t kMax = 1024;

  void add(const UnackedEnd& end) {
    if (ends_.size() == kMax) ends_.pop_front();
    ends_.push_back(end);
  }
  // Empties the list; the caller sends those again whose `until` has not passed.
  std::deque<UnackedEnd> take() { return std::exchange(ends_, {}); }

 private:
  std::deque<UnackedEnd> ends_;
};

}  // namespace kvxfer
