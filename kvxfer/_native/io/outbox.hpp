// The queue of one connection, first in, first out: frames, frames with a descriptor, frames with blocks.
//
// Blocks are read only while their grant is alive, which is checked before every system call. If the grant ended meanwhile, the
// rest of its frame goes out as zeros: the header promised so many bytes, and they are never confirmed. Zero-copy blocks go out as
// references to their pages (lanes/splice.hpp).
#pragma once

#include <sys/uio.h>

#include <deque>

#include "lanes/splice.hpp"
#include "lanes/stream.hpp"
#include "shared_endpoint.hpp"
#include "statistics.hpp"
#include "tls_channel.hpp"

namespace kvxfer {

// The kernel took the last byte of it.
struct Sent {
  Data frame;
  uint64_t serial;  // of the grant
};

// A payload with memory that is gone. Zeros replace the rest of it, and it must never be confirmed.
struct Unreadable {
  TransferId id;
  uint64_t serial;
  std::string text;
};

class Outbox {
 public:
  Outbox(Statistics& statistics, SplicePipes& pipes) : statistics_(statistics), pipes_(pipes) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  ~Outbox() { pipes_.give_back(std::move(pipe_)); }

  void push(const Frame& frame);
  void push_map(const Map& map, std::shared_ptr<Region> region);  // `region`: of the descriptor beside it, or none
  void push_data(SendData send, OwnMemory memory, Staging& staging);
  // From now on everything goes through `tls`, which outlives this or is replaced by null. Nothing was sent yet.
  void set_tls(TlsChannel* tls) { tls_ = tls; }
  // Nothing goes out any more.
  void mute() { is_mute_ = true; }
  bool is_empty() const { return is_mute_ || (items_.empty() && !(tls_ && tls_->has_unsent())); }
  // Whether the kernel's readiness is waited for.
  bool wants_out() const { return !is_empty() && ((tls_ && tls_->has_unsent()) || (!items_.empty() && !is_waiting_ && (!tls_ || tls_->is_up()))); }
  bool is_waiting() const { return is_waiting_; }  // for bytes of a device, which the kernel cannot read
  size_t frame_bytes() const { return frame_bytes_; }  // queued, without payload
  // Drops frames with blocks that have not begun. A frame that has begun continues: while its grant is alive, the reader may get it
  // confirmed over another session, and then counts the received bytes as the blocks.
  void abandon_data();

  void withdraw(SharedEndpoint& shared);  // some memory is no longer registered

  // One system call. Returns whether the kernel may take more now; appends to `finished` the payloads whose last byte it took.
  // `may_cork`: over TCP, the kernel may hold back the end of a payload (MSG_MORE) to send it with the next frame, usually the
  // verdict. See is_corked(). Throws Error(transport).
  bool send(int fd, SharedEndpoint& shared, std::vector<Sent>& finished, bool may_cork);
  // Payloads that turned out unreadable since the last call. The caller reports them before all other events about them.
  std::vector<Unreadable> take_unreadable() { return std::exchange(unreadable_, {}); }
  size_t sent_last() const { return sent_last_; }
  bool is_corked() const { return is_corked_; }  // the kernel has all bytes, and holds the last ones back
  void uncork() { is_corked_ = false; }          // it was told to send

 private:
  struct Item {
    std::string bytes;
    size_t begin = 0;
    std::shared_ptr<Region> region;             // its descriptor goes with the first byte
    std::unique_ptr<OutgoingBlocks> payload;
  };

  // outbox_tls.cpp
  bool send_sealed(SharedEndpoint& shared, std::vector<Sent>& finished, bool may_cork);
  bool copy_foreign(OutgoingBlocks& payload, iovec* vectors, size_t& count, size_t begin, size_t bytes);
  void settle(std::vector<Sent>& finished);

  bool is_spliced(const OutgoingBlocks& payload) const;
  bool fill_pipe(const OutgoingBlocks& payload);
  bool send_spliced(int fd, SharedEndpoint& shared, std::vector<Sent>& finished, bool may_cork);
  bool took(ssize_t sent, int error, size_t bytes, bool is_corked, std::vector<Sent>& finished);
  void gather(Item& item, Sending& sending, iovec* vectors, size_t& count, size_t& bytes, size_t bytes_max);
  void abandon(OutgoingBlocks& payload, const std::string& text);
  void consume(size_t bytes, std::vector<Sent>& finished);

  Statistics& statistics_;
  std::deque<Item> items_;
  size_t frame_bytes_ = 0;
  size_t sent_last_ = 0;
  bool is_waiting_ = false, is_corked_ = false, is_mute_ = false;
  SplicePipes& pipes_;
  std::vector<Unreadable> unreadable_;
  TlsChannel* tls_ = nullptr;
  std::deque<std::pair<uint64_t, Sent>> sealed_;  // encrypted to the end, and finished once so much ciphertext was sent
  std::unique_ptr<SplicePipe> pipe_;  // holds the next bytes of the first item's payload, or null
};

}  // namespace kvxfer
