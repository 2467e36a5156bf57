// One TLS 1.3 connection over one socket: plaintext on one side, what the socket carries on the other. The two ends prove to each
// other that they have the same secret (PSK) and agree on fresh keys (ECDHE); there are no certificates, tickets or early data.
//
// Bytes come out of it only once their record's tag was right. Bytes that go in are encrypted at once, so their memory may change
// afterwards; `sealed` and `sent` count the ciphertext, by which the caller knows when the kernel has taken it.
// Only the thread that runs the event loop touches it. It knows no frame, and of the peer nothing but the secret.
#pragma once

#include <sys/uio.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "encryption.hpp"
#include "machines/codes.hpp"
#include "machines/ids.hpp"
#include "statistics.hpp"

namespace kvxfer {

constexpr size_t kTlsRecordBytes = 16 * 1024;  // plaintext of a full record

// Working memory of all channels of one event loop.
struct TlsBuffers {
  std::string sealed;                                                         // ciphertext of the call that is running
  std::unique_ptr<uint8_t[]> record{new uint8_t[kTlsRecordBytes]};            // plaintext that is gathered into one record
};

class TlsChannel {
 public:
  // The secret of the peer that names itself by `identity`. May throw Error: it becomes the reason of the refusal.
  using FindSecret = std::function<Bytes32(std::string_view identity)>;

  // Whether a peer's first byte begins a TLS record. No frame begins with such a byte.
  static bool begins_record(uint8_t first) { return first >= 0x14 && first <= 0x17; }

  // The dialer's side. Each throws Error(no_lane).
  TlsChannel(int fd, const Encryption& encryption, TlsBuffers& buffers, Statistics& statistics, std::string identity, const Bytes32& secret);
  // The acceptor's side.
  TlsChannel(int fd, const Encryption& encryption, TlsBuffers& buffers, Statistics& statistics, FindSecret find);
  TlsChannel(const TlsChannel&) = delete;
  TlsChannel& operator=(const TlsChannel&) = delete;
  ~TlsChannel();

  // The handshake is over and the peer has proven the secret.
  bool is_up() const { return is_up_; }
  // The dialer's first message. Does nothing for the acceptor, or if it was called before. Throws Error(transport).
  void start();
  // Begins a turn of the event loop. The reads of one turn take a bounded number of bytes from the socket beyond those that they give
  // out: records without plaintext of the peer, such as a key update, would else hold the thread as long as the peer sends them.
  void begin_turn();
  // As readv(): bytes, 0 if the peer closed, or -1 and errno. EAGAIN also says that the turn's bytes are used up: then the socket still
  // reports the rest. Throws Error: before it is up, unauthenticated or what `find` threw, or transport; afterwards transport, for a
  // record that was not the peer's.
  ssize_t read(const iovec* vectors, size_t count);
  // Whether bytes were taken from the socket that read() has not given out: the socket may not report them any more.
  bool has_buffered() const;
  // Encrypts all bytes of these vectors. Throws Error(transport).
  void seal(const iovec* vectors, size_t count);
  // Gives the kernel what it takes, in one call. Returns whether it has everything. `is_more`: it may hold back the end. Throws
  // Error(transport).
  bool flush(bool is_more = false);
  bool has_unsent() const { return sent_ != sealed_; }
  bool has_spoken() const { return has_spoken_; }  // the peer may have got bytes
  bool is_broken() const { return failure_.has_value(); }
  uint64_t sealed() const { return sealed_; }
  uint64_t sent() const { return sent_; }
  // Says that no more follows.
  void end();

 private:
  // One context a side, for the lifetime of the process: they hold settings, and nothing of a peer.
  struct Contexts {
    openssl::Context* dialer = nullptr;
    openssl::Context* acceptor = nullptr;
    openssl::BioMethod* bio = nullptr;
  };
  static const Contexts& contexts(const openssl::Library& library);
  static int on_use(openssl::Connection* connection, const openssl::Digest*, const unsigned char** identity, size_t* size, openssl::Session** session);
  static int on_find(openssl::Connection* connection, const unsigned char* identity, size_t size, openssl::Session** session);
  static int on_write(openssl::Bio* bio, const char* data, int size);
  static int on_read(openssl::Bio* bio, char* data, int size);

  TlsChannel(int fd, const Encryption& encryption, TlsBuffers& buffers, Statistics& statistics, bool is_dialer);
  openssl::Session* make_session(const Bytes32& secret) const;
  void write(const uint8_t* data, size_t bytes);
  void keep_unsent();
  void check_up();
  ssize_t on_error(int result);
  [[noreturn]] void fail(const std::string& what);

  const int fd_;
  const openssl::Library& ssl_;
  TlsBuffers& buffers_;
  Statistics& statistics_;
  const uint64_t records_per_key_;
  openssl::Connection* connection_ = nullptr;
  std::string identity_;
  Bytes32 secret_{};
  FindSecret find_;
  std::optional<Error> refusal_, failure_;
  std::string unsent_;       // ciphertext of earlier calls that the kernel has not taken, from `begin_` on
  size_t begin_ = 0;
  uint64_t sealed_ = 0, sent_ = 0, records_ = 0;
  size_t allowance_ = 0;     // bytes that this turn may still take from the socket
  int read_error_ = 0;       // of the socket; 0: none
  bool is_up_ = false, is_drained_ = true, is_at_end_ = false, is_found_ = false, has_spoken_ = false, is_started_;
};

}  // namespace kvxfer
