#include "owner_queue.hpp"

#include <sys/eventfd.h>

#include <algorithm>

namespace kvxfer {
namespace {

constexpr Nanos kProgressPeriod = 5 * kMillisecond;   // progress alone is signalled at most once in it
constexpr size_t kNotificationEventBytes = 1024;      // the charge beside the payload: it bounds empty notifications too
constexpr size_t kOffersMax = 65536;                  // OfferEnded events in the queue
constexpr size_t kRefusalsMax = 1024;                 // SessionRefused events: any peer can cause them; the statistics count all

}  // namespace

OwnerQueue::OwnerQueue() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_) fail_errno(Code::limit_exceeded, "eventfd");
}

bool OwnerQueue::push(OwnerEvent event, Nanos now) {
  const auto* progress = std::get_if<TransferProgress>(&event);
  const bool is_progress = progress != nullptr;
  if (is_progress) {  // a newer progress of one transfer takes the place of the older one
    const auto [at, is_new] = progress_.emplace(progress->id, events_.size());
    if (is_new) {
      events_.push_back(std::move(event));
    } else {
      events_[at->second] = std::move(event);
    }
  } else {
    if (const auto* notif = std::get_if<NotifReceived>(&event)) notification_bytes_ += notif->payload.size() + kNotificationEventBytes;
    if (const auto* final = std::get_if<TransferFinal>(&event); final != nullptr && progress_.count(final->id) != 0) outrun_.insert(final->id);
    if (std::holds_alternative<SessionRefused>(event) && ++refusals_ > kRefusalsMax) return false;
    if (std::holds_alternative<OfferEnded>(event) && ++offers_ > kOffersMax) drop_offers();
    events_.push_back(std::move(event));
  }
  if (is_signalled_) return false;
  if (is_progress) {  // the event loop signals it at due(), if no other event has been signalled before
    due_ = std::min(due_, now + kProgressPeriod);
    return false;
  }
  due_ = kNever;
  ++signals_owed_;
  return is_signalled_ = true;
}

// Drops the older half of the ended offers at once: one pass over the queue then pays for many events.
void OwnerQueue::drop_offers() {
  size_t drop = kOffersMax / 2, kept = 0;
  offers_ -= drop;
  for (OwnerEvent& event : events_) {
    if (drop != 0 && std::holds_alternative<OfferEnded>(event)) {
      --drop;
      continue;
    }
    if (const auto* progress = std::get_if<TransferProgress>(&event)) progress_[progress->id] = kept;
    if (&events_[kept] != &event) events_[kept] = std::move(event);
    ++kept;
  }
  events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(kept), events_.end());
}

bool OwnerQueue::is_due(Nanos now) {
  if (now < due_) return false;
  due_ = kNever;
  ++signals_owed_;
  return is_signalled_ = true;
}

void OwnerQueue::signal() { ::eventfd_write(fd_.get(), 1); }

std::vector<OwnerEvent> OwnerQueue::take() {
  eventfd_t written;
  if (signals_owed_ != 0 && ::eventfd_read(fd_.get(), &written) == 0) signals_owed_ -= written;
  if (!outrun_.empty()) {  // progress of transfers that are final now
    const auto is_stale = [this](const OwnerEvent& event) {
      const auto* progress = std::get_if<TransferProgress>(&event);
      return progress != nullptr && outrun_.count(progress->id) != 0;
    };
    events_.erase(std::remove_if(events_.begin(), events_.end(), is_stale), events_.end());
    outrun_.clear();
  }
  progress_.clear();
  notification_bytes_ = refusals_ = offers_ = 0;
  is_signalled_ = false;
  due_ = kNever;
  return std::exchange(events_, {});
}

}  // namespace kvxfer
