#include "tls_channel.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memory/fd.hpp"

namespace kvxfer {
namespace {

// Both have SHA-256, the hash that the secret is bound to.
constexpr const char* kSuites = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char kFirstSuite[] = {0x13, 0x01};
constexpr size_t kReadBytes = 64 * 1024;            // taken from the socket at once
constexpr size_t kTurnBytes = 2 * kReadBytes;       // taken in a turn that gives nothing out: more than OpenSSL reads ahead
constexpr size_t kOverheadPart = 64;                // one part in so many of what is given out: a full record has 22 bytes more than its 16 KiB
constexpr size_t kUnsentMax = 4 << 20;              // of a peer that asks and never reads
constexpr size_t kSentMax = 1 << 20;                // kept of what the kernel has taken, while other bytes wait behind it
constexpr int kSelf = 0;                            // index of the application's pointer in a connection

}  // namespace

const TlsChannel::Contexts& TlsChannel::contexts(const openssl::Library& l) {
  using namespace openssl;
  static const Contexts* const made = [&l] {
    auto* contexts = new Contexts;
    const auto make = [&l] {
      Context* const context = l.context_new(l.tls_method());
      if (context == nullptr) throw Error(Code::no_lane, "OpenSSL cannot be used: " + take_reason(l));
      l.context_control(context, kControlMinVersion, kVersion13, nullptr);
      l.context_control(context, kControlMaxVersion, kVersion13, nullptr);
      l.context_control(context, kControlMode, kModePartialMovingWrite, nullptr);
      l.context_control(context, kControlCacheMode, 0, nullptr);
      l.context_control(context, kControlReadAhead, 1, nullptr);
      l.context_set_read_buffer(context, kReadBytes);
      l.context_set_options(context, kOptionNoTicket | kOptionNoRenegotiation);
      l.context_set_num_tickets(context, 0);
      if (l.context_set_ciphersuites(context, kSuites) != 1) throw Error(Code::no_lane, "OpenSSL cannot be used: " + take_reason(l));
      return context;
    };
    contexts->dialer = make();
    // A certificate is never trusted, since no authority is known: only the secret lets a handshake succeed.
    l.context_set_verify(contexts->dialer, kVerifyPeer, nullptr);
    l.context_set_use_session(contexts->dialer, &TlsChannel::on_use);
    contexts->acceptor = make();
    l.context_set_verify(contexts->acceptor, kVerifyNone, nullptr);
    l.context_set_find_session(contexts->acceptor, &TlsChannel::on_find);
    contexts->bio = l.bio_method_new(l.bio_index() | kBioSourceSink, "kvxfer");
    if (contexts->bio == nullptr) throw Error(Code::no_lane, "OpenSSL cannot be used: " + take_reason(l));
    l.bio_method_set_write(contexts->bio, &TlsChannel::on_write);
    l.bio_method_set_read(contexts->bio, &TlsChannel::on_read);
    l.bio_method_set_control(contexts->bio, [](Bio*, int command, long, void*) -> long { return command == kBioFlush ? 1 : 0; });
    return contexts;
  }();
  return *made;
}

TlsChannel::TlsChannel(int fd, const Encryption& encryption, TlsBuffers& buffers, Statistics& statistics, bool is_dialer)
    : fd_(fd), ssl_(encryption.library()), buffers_(buffers), statistics_(statistics), records_per_key_(encryption.records_per_key()), is_started_(!is_dialer) {
  const Contexts& all = contexts(ssl_);
  ssl_.clear_errors();
  connection_ = ssl_.connection_new(is_dialer ? all.dialer : all.acceptor);
  openssl::Bio* const bio = connection_ == nullptr ? nullptr : ssl_.bio_new(all.bio);
  if (bio == nullptr) {
    ssl_.connection_free(connection_);
    throw Error(Code::limit_exceeded, "OpenSSL cannot open a connection: " + openssl::take_reason(ssl_));
  }
  ssl_.bio_set_data(bio, this);
  ssl_.bio_set_init(bio, 1);
  ssl_.set_bio(connection_, bio, bio);
  ssl_.set_ex_data(connection_, kSelf, this);
  is_dialer ? ssl_.set_connect_state(connection_) : ssl_.set_accept_state(connection_);
}

TlsChannel::TlsChannel(int fd, const Encryption& encryption, TlsBuffers& buffers, Statistics& statistics, std::string identity, const Bytes32& secret)
    : TlsChannel(fd, encryption, buffers, statistics, true) {
  identity_ = std::move(identity);
  secret_ = secret;
}

TlsChannel::TlsChannel(int fd, const Encryption& encryption, TlsBuffers& buffers, Statistics& statistics, FindSecret find)
    : TlsChannel(fd, encryption, buffers, statistics, false) {
  find_ = std::move(find);
}

TlsChannel::~TlsChannel() {
  ssl_.connection_free(connection_);
  ssl_.clear_errors();
}

// --- what OpenSSL calls ---

openssl::Session* TlsChannel::make_session(const Bytes32& secret) const {
  openssl::Session* const session = ssl_.session_new();
  const openssl::Cipher* const cipher = ssl_.find_cipher(connection_, kFirstSuite);
  const bool is_made = session != nullptr && cipher != nullptr && ssl_.session_set_key(session, secret.data(), secret.size()) == 1 &&
                       ssl_.session_set_cipher(session, cipher) == 1 && ssl_.session_set_version(session, openssl::kVersion13) == 1;
  if (is_made) return session;
  ssl_.session_free(session);
  return nullptr;
}

int TlsChannel::on_use(openssl::Connection* connection, const openssl::Digest*, const unsigned char** identity, size_t* size, openssl::Session** session) {
  // The library is the one that is loaded: it called us.
  auto* const self = static_cast<TlsChannel*>(openssl::load({}).get_ex_data(connection, kSelf));
  *session = self->make_session(self->secret_);
  *identity = reinterpret_cast<const unsigned char*>(self->identity_.data());
  *size = self->identity_.size();
  return *session != nullptr;
}

int TlsChannel::on_find(openssl::Connection* connection, const unsigned char* identity, size_t size, openssl::Session** session) {
  auto* const self = static_cast<TlsChannel*>(openssl::load({}).get_ex_data(connection, kSelf));
  *session = nullptr;
  try {
    *session = self->make_session(self->find_({reinterpret_cast<const char*>(identity), size}));
    self->is_found_ = true;
  } catch (const Error& error) {  // no exception may pass through OpenSSL
    self->refusal_ = error;
    return 0;
  } catch (const std::exception& error) {
    self->refusal_ = Error(Code::limit_exceeded, error.what());
    return 0;
  }
  return *session != nullptr;
}

int TlsChannel::on_write(openssl::Bio* bio, const char* data, int size) {
  auto* const self = static_cast<TlsChannel*>(openssl::load({}).bio_get_data(bio));
  if (self->sealed_ - self->sent_ + static_cast<size_t>(size) > kUnsentMax) return -1;
  try {
    self->buffers_.sealed.append(data, static_cast<size_t>(size));
  } catch (const std::exception&) {
    return -1;
  }
  self->sealed_ += static_cast<uint64_t>(size);
  return size;
}

int TlsChannel::on_read(openssl::Bio* bio, char* data, int size) {
  const openssl::Library& l = openssl::load({});
  auto* const self = static_cast<TlsChannel*>(l.bio_get_data(bio));
  l.bio_clear_flags(bio, openssl::kBioFlagsAllRetry);
  if (!self->find_ && !self->has_spoken_) {  // a dialer speaks first: what is here now is no answer to it
    l.bio_set_flags(bio, openssl::kBioFlagsRetryRead);
    return -1;
  }
  if (self->allowance_ == 0) {
    l.bio_set_flags(bio, openssl::kBioFlagsRetryRead);
    return -1;
  }
  const ssize_t got = ::recv(self->fd_, data, std::min(static_cast<size_t>(size), self->allowance_), MSG_DONTWAIT);
  if (got > 0) {
    self->allowance_ -= static_cast<size_t>(got);
    return static_cast<int>(got);
  }
  if (got == 0) {
    self->is_at_end_ = true;
  } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
    l.bio_set_flags(bio, openssl::kBioFlagsRetryRead);
  } else {
    self->read_error_ = errno;
  }
  return got == 0 ? 0 : -1;
}

// --- in ---

void TlsChannel::start() {
  if (std::exchange(is_started_, true)) return;
  ssl_.clear_errors();
  if (const int result = ssl_.do_handshake(connection_); result != 1) on_error(result);
}

void TlsChannel::check_up() {
  keep_unsent();
  if (is_up_ || ssl_.is_init_finished(connection_) != 1) return;
  // OpenSSL calls it a reused session where both ends used the secret. Nothing else makes a session here.
  if (ssl_.session_reused(connection_) != 1) fail("the peer did not prove the session's key");
  is_up_ = true;
}

void TlsChannel::begin_turn() { allowance_ = kTurnBytes; }

ssize_t TlsChannel::read(const iovec* vectors, size_t count) {
  if (failure_) throw Error(*failure_);
  ssl_.clear_errors();
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    for (size_t at = 0; at < vectors[i].iov_len;) {
      size_t got = 0;
      const int result = ssl_.read(connection_, static_cast<uint8_t*>(vectors[i].iov_base) + at, vectors[i].iov_len - at, &got);
      if (result != 1) {
        if (taken == 0) return on_error(result);
        try {
          on_error(result);
        } catch (const Error&) {  // failure_ has it, for the next call; the bytes so far are the peer's
        }
        return static_cast<ssize_t>(taken);
      }
      at += got;
      taken += got;
      allowance_ += got + got / kOverheadPart;
      is_drained_ = false;
      if (!is_up_) check_up();
    }
  }
  keep_unsent();
  return static_cast<ssize_t>(taken);
}

bool TlsChannel::has_buffered() const { return !is_drained_ && !failure_ && ssl_.has_pending(connection_) == 1; }

// Called after a call that did not succeed: as read() returns.
ssize_t TlsChannel::on_error(int result) {
  const int error = ssl_.get_error(connection_, result);
  keep_unsent();
  if (error == openssl::kErrorWantRead) {
    is_drained_ = true;
    check_up();
    errno = EAGAIN;
    return -1;
  }
  if (error == openssl::kErrorZeroReturn || is_at_end_) {
    ssl_.clear_errors();
    is_drained_ = true;
    return 0;
  }
  if (read_error_ != 0) {
    ssl_.clear_errors();
    errno = read_error_;
    return -1;
  }
  fail(openssl::take_reason(ssl_));
}

void TlsChannel::fail(const std::string& what) {
  keep_unsent();
  if (refusal_) {
    failure_ = refusal_;
  } else if (!is_up_ && is_found_) {
    failure_ = Error(Code::unauthenticated, "the session proof is wrong (TLS: " + what + ")");
  } else if (!is_up_) {
    failure_ = Error(find_ ? Code::protocol : Code::transport, "the TLS handshake failed: " + what);
  } else {
    failure_ = Error(Code::transport, "an encrypted session broke: " + what);
    statistics_.tls_failures.add();
  }
  if (has_spoken()) {  // the alert: the peer need not get it
    const size_t left = unsent_.size() - begin_;
    static_cast<void>(::send(fd_, unsent_.data() + begin_, left, MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  sent_ = sealed_;
  throw Error(*failure_);
}

// --- out ---

void TlsChannel::write(const uint8_t* data, size_t bytes) {
  const uint64_t records = (bytes + kTlsRecordBytes - 1) / kTlsRecordBytes;
  if (records_ + records > records_per_key_) {
    if (ssl_.key_update(connection_, openssl::kKeyUpdateNotRequested) != 1) fail(openssl::take_reason(ssl_));
    records_ = 0;
    statistics_.tls_key_updates.add();
  }
  records_ += records;
  for (size_t at = 0; at < bytes;) {
    size_t written = 0;
    if (ssl_.write(connection_, data + at, bytes - at, &written) != 1) fail(openssl::take_reason(ssl_));
    at += written;
  }
}

// Full records as far as possible: pieces shorter than one are gathered, a longer piece is encrypted from where it is.
void TlsChannel::seal(const iovec* vectors, size_t count) {
  if (failure_) throw Error(*failure_);
  ssl_.clear_errors();
  uint8_t* const record = buffers_.record.get();
  size_t gathered = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto* data = static_cast<const uint8_t*>(vectors[i].iov_base);
    size_t left = vectors[i].iov_len;
    while (left != 0) {
      if (gathered == 0 && left >= kTlsRecordBytes) {
        const size_t whole = left - left % kTlsRecordBytes;
        write(data, whole);
        data += whole;
        left -= whole;
        continue;
      }
      const size_t part = std::min(left, kTlsRecordBytes - gathered);
      std::memcpy(record + gathered, data, part);
      gathered += part;
      data += part;
      left -= part;
      if (gathered != kTlsRecordBytes) continue;
      write(record, gathered);
      gathered = 0;
    }
  }
  if (gathered != 0) write(record, gathered);
}

// What this call encrypted and the kernel did not take waits behind what earlier calls left.
void TlsChannel::keep_unsent() {
  if (buffers_.sealed.empty()) return;
  if (begin_ == unsent_.size()) {
    unsent_.clear();
    begin_ = 0;
  } else if (begin_ > kSentMax) {  // a peer that reads slowly never lets it become empty
    unsent_.erase(0, begin_);
    begin_ = 0;
  }
  unsent_.append(buffers_.sealed);
  buffers_.sealed.clear();
}

bool TlsChannel::flush(bool is_more) {
  if (begin_ != unsent_.size()) keep_unsent();
  std::string& from = begin_ != unsent_.size() ? unsent_ : buffers_.sealed;
  const size_t begin = &from == &unsent_ ? begin_ : 0;
  const size_t bytes = from.size() - begin;
  if (bytes == 0) return true;
  const ssize_t sent = ::send(fd_, from.data() + begin, bytes, MSG_NOSIGNAL | MSG_DONTWAIT | (is_more ? MSG_MORE : 0));
  const int error = errno;
  if (sent > 0) {
    has_spoken_ = true;
    sent_ += static_cast<uint64_t>(sent);
    if (&from == &unsent_) {
      begin_ += static_cast<size_t>(sent);
    } else {
      unsent_.assign(from, static_cast<size_t>(sent));
      begin_ = 0;
      from.clear();
    }
  }
  keep_unsent();
  if (sent < 0 && error != EAGAIN && error != EWOULDBLOCK && error != ENOBUFS && error != EINTR) {
    throw Error(Code::transport, errno_text("sending failed", error));
  }
  return sent_ == sealed_;
}

void TlsChannel::end() {
  if (!is_up_ || failure_) return;
  ssl_.clear_errors();
  ssl_.shutdown(connection_);
  ssl_.clear_errors();
  keep_unsent();
}

}  // namespace kvxfer
