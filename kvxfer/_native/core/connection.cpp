#include "connection.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

namespace kvxfer {
namespace {

constexpr size_t kStagingBytes = 32 * 1024;
constexpr size_t kTailBytes = 45;  // a DATA header, as it most often follows a payload
constexpr size_t kIovecsMax = 1024;
constexpr size_t kReadBytesMax = 1 << 20;
constexpr size_t kBudgetBytes = 4 << 20;  // of one connection in one round
constexpr size_t kDescriptorsMax = 8;     // received and not yet claimed by a MAP
constexpr size_t kMappingsMax = 64;
constexpr size_t kUnprovenBytesMax = 4096;  // kept of a peer that has not proven itself: a HELLO has a few hundred

uint8_t* scratch() {  // the IO thread's; what is read into it is never looked at again
  static thread_local uint8_t bytes[256 * 1024];
  return bytes;
}
constexpr size_t kScratchBytes = 256 * 1024;

}  // namespace

Connection::Connection(Fd fd, SessionKind kind, SharedEndpoint& shared, Statistics& statistics)
    : fd_(std::move(fd)), kind_(kind), shared_(shared), statistics_(statistics), outbox_(statistics) {
  statistics_.connections.add();
}

Connection::~Connection() {
  statistics_.connections.subtract();
  if (is_up_) (kind_ == SessionKind::Unix ? statistics_.sessions_unix : statistics_.sessions_tcp).subtract();
}

// --- in ---

void Connection::receive() {
  for (size_t budget = kBudgetBytes; budget != 0;) {
    const size_t got = is_closing() ? read_away() : decoder_.payload_pending() != 0 ? read_payload() : read_frames();
    if (got == 0) return;
    budget -= std::min(budget, got);
    if (shared_.is_backed_up()) return;
  }
}

// Returns 0 where nothing is there just now.
size_t Connection::check_read(ssize_t got) const {
  if (got > 0) return static_cast<size_t>(got);
  if (got == 0) throw Error(Code::transport, "the peer closed the connection");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  fail_errno(Code::transport, "receiving failed");
}

size_t Connection::read_away() { return check_read(::recv(fd_.get(), scratch(), kScratchBytes, MSG_DONTWAIT)); }

size_t Connection::read_frames() {
  uint8_t* const staging = scratch();
  const size_t got = check_read(kind_ == SessionKind::Unix ? read_with_descriptors(staging, kStagingBytes)
                                                           : ::recv(fd_.get(), staging, kStagingBytes, MSG_DONTWAIT));
  if (got == 0) return 0;
  decoder_.feed({reinterpret_cast<const char*>(staging), got});
  take_frames();
  if (!is_up_ && decoder_.buffered() > kUnprovenBytesMax) throw Error(Code::protocol, "more than a HELLO before the session was proven");
  return got;
}

ssize_t Connection::read_with_descriptors(uint8_t* to, size_t size) {
  iovec vector{to, size};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return got;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      descriptors_.emplace_back(fd);
    }
  }
  const bool is_surplus = (message.msg_flags & MSG_CTRUNC) != 0 || descriptors_.size() > kDescriptorsMax || (!is_up_ && !descriptors_.empty());
  if (is_surplus) {
    descriptors_.clear();
    throw Error(Code::protocol, "descriptors that no MAP asked for");
  }
  return got;
}

void Connection::take_frames() {
  for (;;) {
    if (decoder_.payload_pending() != 0) {
      take_buffered_payload();
      if (decoder_.payload_pending() != 0) return;
    }
    const std::optional<Frame> frame = decoder_.next();
    if (!frame) return;
    statistics_.frames_in.add();
    on_frame(*frame);
    if (decoder_.payload_pending() == 0) finish_payload();  // a DATA frame may announce nothing at all
  }
}

void Connection::on_frame(const Frame& frame) {
  if (const auto* notif = std::get_if<Notif>(&frame)) {
    if (!shared_.can_take_notification(notif->payload.size())) throw Error(Code::overloaded, "the owner takes no notifications at the moment");
  }
  const auto* data = std::get_if<Data>(&frame);
  const bool was_up = is_up_;
  Landing landing = shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
    endpoint.on_frame(session, frame, now, out);
    for (const Effect& effect : out) {
      if (const auto* up = std::get_if<SessionUp>(&effect); up != nullptr && up->session == session) is_up_ = true;
    }
    return data != nullptr ? endpoint.data_arrives(session, *data, now) : Landing{};
  });
  if (is_up_ && !was_up) (kind_ == SessionKind::Unix ? statistics_.sessions_unix : statistics_.sessions_tcp).add();
  if (const auto* map = std::get_if<Map>(&frame); map != nullptr && is_up_) on_map(*map);
  if (landing.token == 0) return;
  const std::shared_ptr<const Pool> pool = shared_.pool(landing.pool);
  if (!pool) throw Error(Code::internal, "a landing in a pool that is not there");
  landing_ = std::make_unique<IncomingBlocks>(data->id, std::move(landing), pool);
}

bool Connection::may_land() {
  if (!landing_) return false;
  if (shared_.may_land(session, landing_->id, landing_->token)) return true;
  stop_landing(Code::cancelled, "the transfer is over");
  return false;
}

void Connection::take_buffered_payload() {
  const bool is_wanted = may_land();
  for (;;) {
    const std::string_view bytes = decoder_.take_payload(kStagingBytes);
    if (bytes.empty()) break;
    if (!is_wanted) {
      statistics_.bytes_discarded.add(bytes.size());
      continue;
    }
    for (size_t at = 0; at < bytes.size();) {
      const BlockWalk::Span span = landing_->walk.peek(bytes.size() - at);
      std::memcpy(span.data, bytes.data() + at, span.size);
      landing_->walk.advance(span.size);
      at += span.size;
    }
    statistics_.bytes_streamed_in.add(bytes.size());
  }
  if (decoder_.payload_pending() == 0) finish_payload();
}

size_t Connection::read_payload() {
  const uint64_t pending = decoder_.payload_pending();
  const bool is_wanted = may_land();
  uint8_t tail[kTailBytes];
  iovec vectors[kIovecsMax];
  size_t count = 0, bytes = 0;
  if (is_wanted) {
    count = landing_->walk.gather(vectors, kIovecsMax - 1, static_cast<size_t>(std::min<uint64_t>(pending, kReadBytesMax)), bytes);
  } else {
    bytes = static_cast<size_t>(std::min<uint64_t>(pending, kScratchBytes));
    vectors[count++] = {scratch(), bytes};
  }
  if (bytes == pending) vectors[count++] = {tail, sizeof tail};
  const size_t got = check_read(::readv(fd_.get(), vectors, static_cast<int>(count)));
  if (got == 0) return 0;
  const size_t payload = std::min(got, bytes);
  decoder_.skip_payload(payload);
  if (is_wanted) {
    landing_->walk.advance(payload);
    statistics_.bytes_streamed_in.add(payload);
  } else {
    statistics_.bytes_discarded.add(payload);
    shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects&) { endpoint.heard(session, now); });
  }
  if (decoder_.payload_pending() == 0) finish_payload();
  if (got > payload) {
    decoder_.feed({reinterpret_cast<const char*>(tail), got - payload});
    take_frames();
  }
  return got;
}

void Connection::finish_payload() {
  if (!landing_) return;
  const std::unique_ptr<IncomingBlocks> landed = std::move(landing_);
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_landed(landed->id, landed->token, now, out); });
}

void Connection::stop_landing(Code code, const std::string& text, const TransferId* only) {
  if (!landing_ || (only != nullptr && landing_->id != *only)) return;
  const std::unique_ptr<IncomingBlocks> stopped = std::move(landing_);
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_stopped(stopped->id, stopped->token, code, text, now, out); });
}

void Connection::on_map(const Map& map) {
  Fd descriptor;
  if (!descriptors_.empty()) {
    descriptor = std::move(descriptors_.front());
    descriptors_.pop_front();
  }
  MappingSlot slot;
  try {
    if (kind_ != SessionKind::Unix) throw Error(Code::no_lane, "memory can be mapped over a Unix socket only");
    if (mappings_.size() >= kMappingsMax && mappings_.count(map.pool) == 0) throw Error(Code::no_lane, "the source maps too many pools");
    new_mappings_.push_back(std::make_shared<Mapping>(map, std::move(descriptor)));
    slot.mapping = new_mappings_.back();
    statistics_.mappings.add();
  } catch (const Error& error) {
    slot.refusal = error.what();
    statistics_.mappings_refused.add();
    if (mappings_.size() >= kMappingsMax) return;
  }
  mappings_[map.pool] = std::move(slot);
}

std::shared_ptr<Mapping> Connection::take_new_mapping() {
  if (new_mappings_.empty()) return nullptr;
  const std::shared_ptr<Mapping> mapping = std::move(new_mappings_.back());
  new_mappings_.pop_back();
  return mapping;
}

std::shared_ptr<const Mapping> Connection::mapping(uint32_t pool) const {
  const auto found = mappings_.find(pool);
  if (found == mappings_.end()) throw Error(Code::no_lane, "the source did not let its pool be mapped");
  if (!found->second.mapping) throw Error(Code::no_lane, found->second.refusal);
  return found->second.mapping;
}

// --- out ---

void Connection::send_map(const Pool& pool) {
  if (!pool.region) throw Error(Code::internal, "a pool of foreign memory cannot be mapped");
  uint64_t& serial = maps_sent_[pool.info.id];
  if (serial == pool.serial) return;
  serial = pool.serial;
  outbox_.push_map(Map{pool.info.id, pool.region_bytes, pool.info.block_count, pool.layout.segments}, pool.region);
}

void Connection::flush() {
  std::vector<Data> finished;
  for (size_t budget = kBudgetBytes; budget != 0;) {
    const bool can_more = outbox_.send(fd_.get(), shared_, finished);
    if (!finished.empty() && session != 0) {
      shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
        for (const Data& data : finished) endpoint.data_sent(session, data.id, data.attempt, data.count, now, out);
      });
      finished.clear();
    }
    if (!can_more) break;
    budget -= std::min(budget, outbox_.sent_last());
  }
  if (is_closing() && outbox_.is_empty() && !is_shut_down_) {
    is_shut_down_ = true;
    ::shutdown(fd_.get(), SHUT_WR);
  }
}

void Connection::begin_close(Nanos close_at) {
  stop_landing(Code::transport, "the session ended");
  outbox_.abandon_data();
  mappings_.clear();
  new_mappings_.clear();
  close_at_ = close_at;
  session = 0;
}

}  // namespace kvxfer
