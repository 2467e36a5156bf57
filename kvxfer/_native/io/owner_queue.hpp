// What the owner of a core is told, in order, through one eventfd. Not thread-safe: the shared endpoint's mutex guards it,
// but for signal(), which is called once the mutex was let go, so that the thread that wakes up does not run into it.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "memory/fd.hpp"
#include "machines/effects.hpp"

namespace kvxfer {

struct SessionRefused {  // a session that never came up
  std::optional<AgentRef> peer;  // unknown where the connection ended before its HELLO
  SessionKind kind;
  Code code;
  std::string text;
};
struct CoreFailed {  // the IO thread is gone
  std::string text;
};

using OwnerEvent = std::variant<GrantEnded, TransferProgress, TransferGranted, TransferFinal, TransferDrained, OfferEnded, NotifReceived, NotifDelivered,
                                NotifFailed, SessionUp, SessionRefused, CoreFailed>;

class OwnerQueue {
 public:
  OwnerQueue();

  int fd() const { return fd_.get(); }
  // Returns whether the owner is to be signalled now. Of a transfer's progress only the newest is kept, and where nothing
  // else is there its signal waits until due(): an owner woken for every chunk takes the processor that moves the bytes, and of
  // a short transfer it hears only the end. Of a transfer that is final no progress is taken: its end says more. Of ended
  // offers, which peers cause and no thread waits for, the oldest of too many are dropped.
  bool push(OwnerEvent event, Nanos now);
  Nanos due() const { return due_; }
  bool is_due(Nanos now);  // true once
  void signal();
  std::vector<OwnerEvent> take();
  // Events that were taken are yet to be signalled: take() once more then.
  bool owes_signal() const { return signals_owed_ != 0; }
  // The bytes of notifications that wait here: their payload, and a little for each.
  size_t notification_bytes() const { return notification_bytes_; }

 private:
  void drop_offers();

  Fd fd_;
  std::vector<OwnerEvent> events_;
  std::unordered_map<TransferId, size_t, TransferIdHash> progress_;  // where in events_
  std::unordered_set<TransferId, TransferIdHash> outrun_;            // final, with progress still in events_
  size_t notification_bytes_ = 0, refusals_ = 0, offers_ = 0;
  bool is_signalled_ = false;
  Nanos due_ = kNever;
  uint64_t signals_owed_ = 0;  // decided, and not yet read from the eventfd: perhaps not even written
};

}  // namespace kvxfer
