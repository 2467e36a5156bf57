#include "owner_queue.hpp"

#include <sys/eventfd.h>

#include <algorithm>

namespace kvxfer {
namespace {

constexpr Nanos kProgressPeriod = 5 * kMillisecond;
constexpr size_t kNotificationEventBytes = 1024;  // so that empty notifications are bounded too
constexpr size_t kOffersMax = 65536;
constexpr size_t kRefusalsMax = 1024;             // any peer can cause them; they are counted elsewhere

}  // namespace

OwnerQueue::OwnerQueue() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_) fail_errno(Code::limit_exceeded, "eventfd");
}

bool OwnerQueue::push(OwnerEvent event, Nanos now) {
  const auto* progress = std::get_if<TransferProgress>(&event);
  const bool is_progress = progress != nullptr;
  if (is_progress) {
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
  if (is_progress) {
    due_ = std::min(due_, now + kProgressPeriod);
    return false;
  }
  due_ = kNever;
  ++signals_owed_;
  return is_signalled_ = true;
}

// Half of them at once, so that the cost per event is small.
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
  if (!outrun_.empty()) {
    const auto is_outrun = [this](const OwnerEvent& event) {
      const auto* progress = std::get_if<TransferProgress>(&event);
      return progress != nullptr && outrun_.count(progress->id) != 0;
    };
    events_.erase(std::remove_if(events_.begin(), events_.end(), is_outrun), events_.end());
    outrun_.clear();
  }
  progress_.clear();
  notification_bytes_ = refusals_ = offers_ = 0;
  is_signalled_ = false;
  due_ = kNever;
  return std::exchange(events_, {});
}

}  // namespace kvxfer
