#include "owner_queue.hpp"

#include <sys/eventfd.h>

namespace kvxfer {
namespace {

constexpr Nanos kProgressPeriod = 5 * kMillisecond;
constexpr size_t kNotificationEventBytes = 1024;  // so that empty notifications are bounded too
constexpr size_t kRefusalsMax = 1024;             // anybody can cause them; they are counted elsewhere

}  // namespace

OwnerQueue::OwnerQueue() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_) fail_errno(Code::limit_exceeded, "eventfd");
}

bool OwnerQueue::push(OwnerEvent event, Nanos now) {
  bool is_urgent = true;
  if (const auto* progress = std::get_if<TransferProgress>(&event)) {
    is_urgent = now >= progress_signalled_at_ + kProgressPeriod;
    const auto [at, is_new] = progress_.emplace(progress->id, events_.size());
    if (is_new) {
      events_.push_back(std::move(event));
    } else {
      events_[at->second] = std::move(event);
    }
    if (is_urgent && !is_signalled_) progress_signalled_at_ = now;
  } else {
    if (const auto* notif = std::get_if<NotifReceived>(&event)) notification_bytes_ += notif->payload.size() + kNotificationEventBytes;
    if (std::holds_alternative<SessionRefused>(event) && ++refusals_ > kRefusalsMax) return false;
    events_.push_back(std::move(event));
  }
  if (is_signalled_) return false;
  if (!is_urgent) {
    due_ = progress_signalled_at_ + kProgressPeriod;
    return false;
  }
  due_ = kNever;
  return is_signalled_ = true;
}

bool OwnerQueue::is_due(Nanos now) {
  if (now < due_) return false;
  due_ = kNever;
  progress_signalled_at_ = now;
  return is_signalled_ = true;
}

void OwnerQueue::signal() { ::eventfd_write(fd_.get(), 1); }

std::vector<OwnerEvent> OwnerQueue::take() {
  eventfd_t ignored;
  ::eventfd_read(fd_.get(), &ignored);
  progress_.clear();
  notification_bytes_ = refusals_ = 0;
  is_signalled_ = false;
  due_ = kNever;
  return std::exchange(events_, {});
}

}  // namespace kvxfer
