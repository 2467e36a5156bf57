#include "outbox.hpp"

#include <sys/socket.h>

#include <algorithm>

#include "lanes/owner_memory.hpp"

namespace kvxfer {
namespace {

constexpr size_t kIovecsMax = 1024;  // IOV_MAX
constexpr size_t kSendBytesMax = 1 << 20;
constexpr size_t kChecksummedBytesMax = 256 * 1024;  // of a call whose bytes are checksummed first: they are still in the cache when it copies them
constexpr size_t kZerosBytes = 64 * 1024;
constexpr size_t kSpliceBytesMax = 256 * 1024;  // of a call
constexpr size_t kSpliceRunsMax = 256;
constexpr size_t kLookRuns = 256;  // to find the first unreadable byte

uint8_t* zeros() {
  static uint8_t bytes[kZerosBytes];
  return bytes;
}

}  // namespace

void Outbox::push(const Frame& frame) {
  Item item;
  item.bytes = encode(frame);
  frame_bytes_ += item.bytes.size();
  items_.push_back(std::move(item));
  statistics_.frames_out.add();
}

void Outbox::push_map(const Map& map, std::shared_ptr<Region> region) {
  push(map);
  items_.back().region = std::move(region);
}

void Outbox::push_data(SendData send, OwnMemory memory, Staging& staging) {
  push(send.frame);
  items_.back().payload = std::make_unique<OutgoingBlocks>(std::move(send), std::move(memory), staging);
}

void Outbox::abandon_data() {
  const auto is_unsent = [](const Item& item) { return item.payload && item.begin == 0; };
  items_.erase(std::remove_if(items_.begin(), items_.end(), is_unsent), items_.end());
}

// Queued payloads keep no memory alive whose grant has ended.
void Outbox::withdraw(SharedEndpoint& shared) {
  for (Item& item : items_) {
    if (!item.payload || item.payload->has_ended) continue;
    Sending sending(shared);
    const bool is_alive = sending.begin(item.payload->frame.id, item.payload->serial);
    sending.end();
    if (is_alive) continue;
    item.payload->end();
    if (&item == &items_.front()) pipe_.reset();
  }
}

bool Outbox::is_spliced(const OutgoingBlocks& payload) const { return payload.is_zero_copy && payload.left != 0; }

// Puts the next part of the payload into the pipe. False if it cannot be sent zero-copy.
bool Outbox::fill_pipe(const OutgoingBlocks& payload) {
  iovec runs[kSpliceRunsMax];
  size_t bytes = 0;
  const size_t max = static_cast<size_t>(std::min<uint64_t>(payload.left, kSpliceBytesMax));
  const size_t count = payload.walk.gather(runs, kSpliceRunsMax, max, bytes);
  if (!pipe_) pipe_ = pipes_.take();
  statistics_.runs_streamed_out.add(count);
  statistics_.calls_streamed_out.add();
  return pipe_ && pipe_->fill(runs, count);
}

// Adds the part of an item's payload that may go out now. For blocks, `sending` has begun.
void Outbox::gather(Item& item, Sending& sending, iovec* vectors, size_t& count, size_t& bytes, size_t bytes_max) {
  OutgoingBlocks& payload = *item.payload;
  uint64_t left = payload.left;
  if (payload.frame.has_checksums) bytes_max = std::min(bytes_max, kChecksummedBytesMax);
  std::pair<const uint8_t*, size_t> staged{nullptr, 0};
  if (payload.gather && left != 0 && !payload.has_ended) {
    payload.gather->fill([&] { return sending.shared().begin_gather(payload.frame.id, payload.serial); });
    is_waiting_ = payload.gather->is_waiting();
    if (is_waiting_) return;
    staged = payload.gather->front();
  }
  const bool is_looking = left != 0 && !payload.has_ended && sending.begin(payload.frame.id, payload.serial);
  if (is_looking && payload.is_staged) {
    const auto [data, size] = staged;
    const size_t looked = std::min(size, bytes_max);
    payload.add_checksums(data, looked);
    vectors[count++] = {const_cast<uint8_t*>(data), looked};
    bytes += looked;
    left -= looked;
  } else if (is_looking) {
    size_t looked = 0;
    const size_t used = payload.walk.gather(vectors + count, kIovecsMax - count, bytes_max, looked);
    if (payload.frame.has_checksums) payload.add_checksums(looked);
    count += used;
    bytes += looked;
    left -= looked;
    statistics_.runs_streamed_out.add(used);
    statistics_.calls_streamed_out.add();
  } else if (left != 0) {
    payload.end();
    const size_t zero_bytes = static_cast<size_t>(std::min<uint64_t>(left, kZerosBytes));
    vectors[count++] = {zeros(), zero_bytes};
    bytes += zero_bytes;
    left -= zero_bytes;
  }
  if (left == 0 && payload.trailer_left != 0 && count != kIovecsMax) {
    const auto [checksums, size] = payload.trailer();
    vectors[count++] = {const_cast<char*>(checksums), size};
    bytes += size;
  }
}

void Outbox::abandon(OutgoingBlocks& payload, const std::string& text) {
  payload.end();
  pipe_.reset();
  unreadable_.push_back({payload.frame.id, payload.serial, text});
}

// As send(), for the first item's payload, zero-copy. If its grant has ended, or its pages cannot be referenced, the rest goes out
// like other payloads.
bool Outbox::send_spliced(int fd, SharedEndpoint& shared, std::vector<Sent>& finished, bool may_cork) {
  OutgoingBlocks& payload = *items_.front().payload;
  Sending sending(shared);
  const bool is_looking = sending.begin(payload.frame.id, payload.serial);
  if (!is_looking || !(pipe_ || fill_pipe(payload))) {
    payload.is_zero_copy = false;
    pipe_.reset();  // with the references in it
    sending.end();
    return send(fd, shared, finished, may_cork);
  }
  const size_t bytes = pipe_->held();
  const ssize_t sent = pipe_->drain(fd, items_.size() > 1 && bytes == payload.left);  // a frame follows
  const int error = errno;
  sending.end();
  if (pipe_->held() == 0) pipes_.give_back(std::move(pipe_));
  if (sent > 0) statistics_.bytes_spliced_out.add(static_cast<size_t>(sent));
  return took(sent, error, bytes, false, finished);
}

bool Outbox::send(int fd, SharedEndpoint& shared, std::vector<Sent>& finished, bool may_cork) {
  sent_last_ = 0;
  is_waiting_ = false;
  if (is_mute_) return false;
  if (tls_) return send_sealed(shared, finished, may_cork);
  if (items_.empty()) return false;
  if (const Item& first = items_.front(); first.payload && first.begin == first.bytes.size() && is_spliced(*first.payload)) {
    return send_spliced(fd, shared, finished, may_cork);
  }
  iovec vectors[kIovecsMax];
  size_t count = 0, bytes = 0;
  bool is_more = false;  // a zero-copy payload follows
  OutgoingBlocks* looked = nullptr;
  Sending sending(shared);
  int passed_fd = -1;
  for (Item& item : items_) {
    if (count == kIovecsMax || bytes >= kSendBytesMax) break;
    if (item.region && item.begin == 0) {
      if (count != 0) break;  // a descriptor belongs to the first byte of a call
      passed_fd = item.region->fd();
    }
    if (const size_t left = item.bytes.size() - item.begin; left != 0) {
      vectors[count++] = {item.bytes.data() + item.begin, left};
      bytes += left;
    }
    if (passed_fd >= 0) break;
    if (!item.payload) continue;
    if ((is_more = is_spliced(*item.payload))) break;
    if (count == kIovecsMax) break;
    try {
      gather(item, sending, vectors, count, bytes, kSendBytesMax);
    } catch (const Error& error) {
      if (error.code() != Code::memory_gone) throw;
      abandon(*item.payload, error.what());
      return true;
    }
    looked = item.payload.get();
    break;
  }
  if (count == 0) return false;

  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = count;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (passed_fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &passed_fd, sizeof passed_fd);
  }
  const OutgoingBlocks* const last = items_.back().payload.get();
  may_cork = may_cork && last != nullptr && !last->frame.is_zero_copy && bytes == frame_bytes_ + last->left + last->trailer_left;
  const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT | (may_cork || is_more ? MSG_MORE : 0));
  const int error = errno;
  // The kernel takes the bytes before an unreadable one first: the payload continues at this byte.
  if (sent < 0 && error == EFAULT && looked != nullptr && !looked->has_ended) {
    iovec runs[kLookRuns];
    size_t next = 0;
    const size_t there = readable_bytes(runs, looked->walk.gather(runs, kLookRuns, kSendBytesMax, next));
    const uint64_t at = looked->payload_bytes() - looked->left + there;
    abandon(*looked, memory_gone("source", *looked->memory.layout, looked->extent, at).what());
    return true;
  }
  sending.end();
  return took(sent, error, bytes, may_cork, finished);
}

// Called after a system call for `bytes`. Returns whether the kernel may take more now.
bool Outbox::took(ssize_t sent, int error, size_t bytes, bool is_corked, std::vector<Sent>& finished) {
  if (sent < 0) {
    if (error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS) return false;
    if (error == EINTR) return true;
    throw Error(Code::transport, errno_text("sending failed", error));
  }
  sent_last_ = static_cast<size_t>(sent);
  is_corked_ = is_corked;
  consume(sent_last_, finished);
  return sent_last_ == bytes && !items_.empty();
}

void Outbox::consume(size_t bytes, std::vector<Sent>& finished) {
  while (!items_.empty()) {
    Item& item = items_.front();
    const size_t frame_part = std::min(bytes, item.bytes.size() - item.begin);
    item.begin += frame_part;
    bytes -= frame_part;
    frame_bytes_ -= frame_part;
    if (item.begin != item.bytes.size()) return;
    if (item.payload) {
      OutgoingBlocks& payload = *item.payload;
      const size_t part = static_cast<size_t>(std::min<uint64_t>(bytes, payload.left));
      payload.sent(part);
      bytes -= part;
      statistics_.bytes_streamed_out.add(part);
      const size_t checksums = std::min(bytes, payload.trailer_left);
      payload.trailer_left -= checksums;
      bytes -= checksums;
      if (!payload.is_done()) return;
      finished.push_back({payload.frame, payload.serial});
    }
    items_.pop_front();
  }
}

}  // namespace kvxfer
