// The events for the owner of a core, in order, with one eventfd. Not thread-safe: the shared endpoint's mutex guards it, except
// for signal(), which is called after the mutex was released, so that the woken thread finds it free.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "memory/fd.hpp"
#include "machines/effects.hpp"

namespace kvxfer {

struct SessionRefused {  // a session that never came up
  std::optional<AgentRef> peer;  // unknown if the connection ended before its HELLO
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
  // Returns whether to signal the owner now. Only the newest progress of a transfer is kept, and progress alone is signalled only
  // at due(): waking the owner for every chunk would take the processor that moves the bytes, and for a short transfer the owner
  // needs only the end. Progress of a final transfer is dropped. Of ended offers, which peers cause and no thread waits for, the
  // oldest beyond a limit are dropped.
  bool push(OwnerEvent event, Nanos now);
  Nanos due() const { return due_; }
  bool is_due(Nanos now);  // true once
  void signal();
  std::vector<OwnerEvent> take();
  // Some taken events are still to be signalled: then call take() once more.
  bool owes_signal() const { return signals_owed_ != 0; }
  // The bytes of notifications in this queue: their payload, and a little for each.
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
  uint64_t signals_owed_ = 0;  // decided on, and not yet read from the eventfd, perhaps not yet written
};

}  // namespace kvxfer
