#include "connection.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

#include "lanes/owner_memory.hpp"

namespace kvxfer {
namespace {

constexpr size_t kStagingBytes = 32 * 1024;
constexpr size_t kTailBytes = 46;  // a DATA header, the usual frame after a payload
constexpr size_t kIovecsMax = 1024;
constexpr size_t kLandedRuns = 64;         // of payload that came with its header, at a time
constexpr size_t kReadBytesMax = 1 << 20;
constexpr uint64_t kZeroCopyMin = 768 * 1024;  // bytes of a DATA frame; fewer are copied sooner than the reader's question for a verdict takes
constexpr size_t kZeroCopyRuns = 64;           // runs of it that are examined; the rest usually has the same sizes
constexpr size_t kDescriptorsMax = 8;     // received and not yet claimed by a MAP
constexpr size_t kUnprovenBytesMax = 4096;  // buffered of a peer without a proof; a HELLO has a few hundred

}  // namespace

Connection::Connection(Fd fd, SessionKind kind, SharedEndpoint& shared, Statistics& statistics, LaneTools& tools)
    : counted_(statistics.connections),
      fd_(std::move(fd)),
      kind_(kind),
      shared_(shared),
      statistics_(statistics),
      tools_(tools),
      outbox_(statistics, tools.pipes) {}

Connection::~Connection() {
  if (is_up_ && tls_) statistics_.sessions_tls.subtract();
  if (is_up_) (kind_ == SessionKind::Unix ? statistics_.sessions_unix : statistics_.sessions_tcp).subtract();
}

// --- in ---

void Connection::receive(size_t budget) {
  if ((wire_ == Wire::Accepted || wire_ == Wire::Dialed) && !is_closing() && !has_decided()) return;
  if (tls_) tls_->begin_turn();
  if (is_paused_ && !must_wait()) take_frames();
  while (budget != 0 && !must_wait()) {
    const bool is_frames = !is_closing() && decoder_.payload_pending() == 0;
    const size_t got = is_closing() ? read_away() : is_frames ? read_frames() : read_payload();
    if (got == 0) return;
    if (is_frames && !tls_ && got < kStagingBytes && decoder_.payload_pending() == 0) return;  // nothing is left: epoll reports when more comes
    budget -= std::min(budget, got);
    if (shared_.is_backed_up()) return;
  }
}

// Whether bytes that came are still on their way to a device. If that device failed, the landing is stopped here.
bool Connection::must_wait() {
  is_paused_ = false;
  try {
    is_paused_ = landing_ && landing_->must_wait(decoder_.payload_pending() == 0);
  } catch (const Error& error) {
    if (error.code() != Code::memory_gone) throw;
    stop_landing(error.code(), error.what());
  }
  return is_paused_;
}

// Returns 0 if there is nothing to read now.
size_t Connection::check_read(ssize_t got) const {
  if (got > 0) return static_cast<size_t>(got);
  if (got == 0) throw Error(Code::transport, "the peer closed the connection");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  fail_errno(Code::transport, "receiving failed");
}

size_t Connection::read_away() { return check_read(::recv(fd_.get(), tools_.scratch.get(), kScratchBytes, MSG_DONTWAIT)); }

size_t Connection::read_frames() {
  uint8_t* const staging = tools_.scratch.get();
  iovec vector{staging, kStagingBytes};
  const size_t got = check_read(read_some(&vector, 1));
  if (got == 0) return 0;
  decoder_.feed({reinterpret_cast<const char*>(staging), got});
  take_frames();
  if (!is_up_ && decoder_.buffered() > kUnprovenBytesMax) throw Error(Code::protocol, "more than a HELLO before the session was proven");
  return got;
}

// Any read from a Unix socket may bring descriptors; without room for them the kernel would drop them.
ssize_t Connection::read_some(iovec* vectors, size_t count) {
  if (tls_) return read_tls(vectors, count);
  if (kind_ != SessionKind::Unix) {
    return count == 1 ? ::recv(fd_.get(), vectors->iov_base, vectors->iov_len, MSG_DONTWAIT) : ::readv(fd_.get(), vectors, static_cast<int>(count));
  }
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = count;
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
    throw Error(Code::protocol, "descriptors without a MAP");
  }
  return got;
}

void Connection::take_frames() {
  for (;;) {
    if (decoder_.payload_pending() != 0) {
      take_buffered_payload();
      if (decoder_.payload_pending() != 0) return;
    }
    if (landing_) finish_payload();
    if (landing_) return;
    const std::optional<Frame> frame = decoder_.next();
    if (!frame) return;
    statistics_.frames_in.add();
    on_frame(*frame);
    if (decoder_.payload_pending() == 0) finish_payload();  // a DATA frame may have no payload
  }
}

void Connection::on_frame(const Frame& frame) {
  if (kind_ == SessionKind::Tcp && !is_up_ && is_refusal(frame)) return;
  if (refuses(frame)) return;
  const auto* data = std::get_if<Data>(&frame);
  std::optional<AgentRef> proven;
  Landing landing = shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
    endpoint.on_frame(session, frame, now, out);
    for (const Effect& effect : out) {
      const auto* up = std::get_if<SessionUp>(&effect);
      if (up == nullptr || up->session != session) continue;
      proven = up->peer;
    }
    return data != nullptr ? endpoint.data_arrives(session, *data, now) : Landing{};
  });
  if (proven) on_up(*proven);
  if (const auto* map = std::get_if<Map>(&frame); map != nullptr && is_up_) on_map(*map);
  if (landing.token == 0) return;
  OwnMemory memory = shared_.find(landing.to);
  if (!memory) throw Error(Code::internal, "a payload for missing memory");
  landing_ = std::make_unique<IncomingBlocks>(*data, std::move(landing), std::move(memory), *tools_.staging);
}

void Connection::on_up(const AgentRef& peer) {
  is_up_ = true;
  peer_nonce_ = peer.boot_nonce;
  (kind_ == SessionKind::Unix ? statistics_.sessions_unix : statistics_.sessions_tcp).add();
  if (tls_) statistics_.sessions_tls.add();
  is_near_ = !tls_ && is_near_to(peer);  // what is encrypted is copied
}

// Whether to drop a frame because it brings a notification while the owner takes none. A PUSH that is known already brings none.
bool Connection::refuses(const Frame& frame) {
  const char* const why = "the owner takes no notifications at the moment";
  if (const auto* notif = std::get_if<Notif>(&frame); notif != nullptr && notif->kind != NotifKind::Ack) {
    if (!is_up_ || shared_.can_take_notification(std::max<size_t>(notif->payload.size(), notif->total))) return false;
    // It gets no acknowledgement, so the peer sends it again; the session continues.
    shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects&) { endpoint.heard(session, now); });
    return true;
  }
  const auto* push = std::get_if<Push>(&frame);
  if (push == nullptr || !push->has_notification || !is_up_ || shared_.can_take_notification(push->notification.size())) return false;
  return shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
    endpoint.heard(session, now);
    const bool is_known = endpoint.has_met(push->id);
    if (!is_known) out.push_back(SendFrame{session, Done{push->id, Code::overloaded, why}});
    return !is_known;
  });
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
    if (is_wanted && must_wait()) return;
    if (is_wanted && !landing_) return take_buffered_payload();
    const std::string_view bytes = decoder_.take_payload(is_wanted ? landing_->room_for(kStagingBytes) : kStagingBytes);
    if (bytes.empty()) break;
    if (!is_wanted) {
      statistics_.bytes_discarded.add(bytes.size());
      continue;
    }
    const size_t blocks = static_cast<size_t>(std::min<uint64_t>(bytes.size(), landing_->left));
    try {
      land(bytes.substr(0, blocks));
    } catch (const Error& error) {
      if (error.code() != Code::memory_gone) throw;
      stop_landing(error.code(), error.what());
      return take_buffered_payload();
    }
    std::memcpy(landing_->trailer.data() + landing_->trailer_at, bytes.data() + blocks, bytes.size() - blocks);
    landing_->trailer_at += bytes.size() - blocks;
    statistics_.bytes_streamed_in.add(blocks);
  }
  if (decoder_.payload_pending() == 0) finish_payload();
}

void Connection::land(std::string_view bytes) {
  const auto* const from = reinterpret_cast<const uint8_t*>(bytes.data());
  if (landing_->scatter) {
    if (!bytes.empty()) std::memcpy(landing_->scatter->room(bytes.size()).iov_base, from, bytes.size());
  } else {
    BlockWalk walk = landing_->walk;
    iovec runs[kLandedRuns];
    for (size_t at = 0; at < bytes.size();) {
      size_t size = 0;
      const size_t count = walk.gather(runs, kLandedRuns, bytes.size() - at, size);
      if (size == 0) throw Error(Code::internal, "a payload longer than its blocks");
      if (const size_t put = put_into(runs, count, from + at, size); put != size) throw landing_->memory_gone(at + put);
      walk.advance(size);
      at += size;
    }
  }
  landing_->landed(bytes.size());
}

// Returns how many bytes had a target.
size_t Connection::put_into(const iovec* runs, size_t count, const uint8_t* from, size_t bytes) const {
  if (!landing_->memory.is_ours) return copy_to_owner(runs, count, from);
  for (size_t i = 0; i < count; from += runs[i++].iov_len) std::memcpy(runs[i].iov_base, from, runs[i].iov_len);
  return bytes;
}

size_t Connection::read_payload() {
  const uint64_t pending = decoder_.payload_pending();
  const bool is_wanted = may_land();
  if (is_wanted && tls_ && !landing_->memory.is_ours && !landing_->scatter) return read_copied();
  uint8_t tail[kTailBytes];
  iovec vectors[kIovecsMax];
  size_t count = 0, bytes = 0;
  if (is_wanted) {
    count = landing_->room(vectors, kIovecsMax - 2, static_cast<size_t>(std::min<uint64_t>(landing_->left, kReadBytesMax)), bytes);
    std::string& trailer = landing_->trailer;
    if (bytes == landing_->left && trailer.size() != landing_->trailer_at) {
      vectors[count++] = {trailer.data() + landing_->trailer_at, trailer.size() - landing_->trailer_at};
      bytes += trailer.size() - landing_->trailer_at;
    }
  } else {
    bytes = static_cast<size_t>(std::min<uint64_t>(pending, kScratchBytes));
    vectors[count++] = {tools_.scratch.get(), bytes};
  }
  if (bytes == pending) vectors[count++] = {tail, sizeof tail};
  const ssize_t read = read_some(vectors, count);
  // The bytes stay in the socket, to be thrown away with the rest of the payload.
  if (read < 0 && errno == EFAULT && is_wanted && !landing_->scatter) {
    const Error error = landing_->memory_gone(readable_bytes(vectors, count));
    stop_landing(error.code(), error.what());
    return read_payload();
  }
  const size_t got = check_read(read);
  if (got == 0) return 0;
  const size_t payload = std::min(got, bytes);
  decoder_.skip_payload(payload);
  if (is_wanted) {
    const size_t blocks = static_cast<size_t>(std::min<uint64_t>(payload, landing_->left));
    try {
      landing_->trailer_at += payload - blocks;
      landing_->landed(blocks);
    } catch (const Error& error) {
      if (error.code() != Code::memory_gone) throw;
      stop_landing(error.code(), error.what());
    }
    statistics_.bytes_streamed_in.add(blocks);
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
  if (must_wait() || !landing_) return;
  if (!landing_->is_intact()) {
    statistics_.checksum_failures.add();
    return stop_landing(Code::checksum, "the received blocks do not match their checksums");
  }
  const std::unique_ptr<IncomingBlocks> landed = std::move(landing_);
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_landed(landed->id, landed->token, now, out); });
}

void Connection::stop_landing(Code code, const std::string& text, const TransferId* only) {
  if (!landing_ || (only != nullptr && landing_->id != *only)) return;
  std::unique_ptr<IncomingBlocks> stopped = std::move(landing_);
  if (stopped->is_in_flight()) return tools_.staging->stop_later(std::move(stopped), code, text);
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_stopped(stopped->id, stopped->token, code, text, now, out); });
}

// --- out ---

// Whether these blocks go out zero-copy: the kernel then reads them when the peer does. The peer asks for its verdict afterwards,
// and may see later writes once the grant has ended. So zero-copy is only for memory that one-sided lanes may read too, and for
// frames so large that the question costs little.
bool Connection::may_send_zero_copy(const SendData& data, const OwnMemory& memory) const {
  if (!is_near_ || !memory.is_exposed || memory.device || data.frame.has_checksums || data.frame.payload_bytes < kZeroCopyMin) return false;
  if (kind_ == SessionKind::Unix && !SplicePipe::serves_unix()) return false;
  iovec runs[kZeroCopyRuns];
  size_t bytes = 0;
  const size_t count = BlockWalk(*memory.layout, data.from).gather(runs, kZeroCopyRuns, kZeroCopyMin, bytes);
  return SplicePipe::pays(runs, count);
}

void Connection::send_data(SendData data, OwnMemory memory) {
  data.frame.is_zero_copy = may_send_zero_copy(data, memory);
  outbox_.push_data(std::move(data), std::move(memory), *tools_.staging);
}

void Connection::withdraw(const std::vector<Withdrawn>& gone) {
  may_land();
  outbox_.withdraw(shared_);
  for (const Withdrawn& one : gone) withdraw_maps(one);
}

void Connection::flush(size_t budget) {
  std::vector<Sent> finished;
  while (budget != 0) {
    const bool can_more = outbox_.send(fd_.get(), shared_, finished, kind_ == SessionKind::Tcp);
    for (const Unreadable& one : outbox_.take_unreadable()) {
      shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.data_failed(one.id, one.serial, Code::memory_gone, one.text, now, out); });
    }
    if (!finished.empty() && session != 0) {
      shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
        for (const auto& [data, serial] : finished) endpoint.data_sent(session, data.id, data.attempt, data.count, data.is_zero_copy, now, out, serial);
      });
      finished.clear();
    }
    if (!can_more) break;
    budget -= std::min(budget, outbox_.sent_last());
  }
  if (is_closing() && outbox_.is_empty() && !is_shut_down_) {
    is_shut_down_ = true;
    if (tls_) {
      tls_->end();
      tls_->flush();
    }
    ::shutdown(fd_.get(), SHUT_WR);
  }
}

void Connection::uncork() {
  if (!outbox_.is_corked()) return;
  send_at_once(fd_.get());
  outbox_.uncork();
}

void Connection::begin_close(Nanos close_at) {
  stop_landing(Code::transport, "the session ended");
  outbox_.abandon_data();
  remotes_.clear();
  remote_bytes_ = 0;
  new_remotes_.clear();
  cma_peer_.reset();
  close_at_ = close_at;
  session = 0;
}

}  // namespace kvxfer
