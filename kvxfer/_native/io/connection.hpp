// One connection: its socket, its queue of outgoing frames, the payload that comes in, and the memory that its peer lets us read.
// Only the thread that runs the event loop touches it. It turns bytes into events of the endpoint; the event loop performs the
// effects.
//
// While blocks come in, each read from the socket is vectored into the blocks themselves with room behind them for the
// header of the frame that follows, so that a chunk costs no extra call.
//
// A TCP session may go through TLS (tls_channel.hpp). Each end decides by its own Encryption whether it must: the dialer when it
// begins, the acceptor when it sees the first byte or, without TLS, the first HELLO. An end that cannot agree says so in a frame without TLS, and hangs up.
#pragma once

#include <map>

#include "lane_tools.hpp"
#include "lanes/cma.hpp"
#include "lanes/read_job.hpp"
#include "outbox.hpp"
#include "sockets.hpp"

namespace kvxfer {

class Connection {
 public:
  Connection(Fd fd, SessionKind kind, SharedEndpoint& shared, Statistics& statistics, LaneTools& tools);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  int fd() const { return fd_.get(); }
  SessionKind kind() const { return kind_; }
  bool is_up() const { return is_up_; }
  bool is_closing() const { return close_at_ != 0; }
  Nanos close_at() const { return close_at_; }
  Outbox& outbox() { return outbox_; }

  // Call once, when `session` and `dialed` are set. Decides whether a session that we dial is encrypted.
  void begin();
  // Reads about `budget` bytes of what is there. Throws Error: transport if the connection is lost, protocol or overloaded if the
  // peer is at fault.
  void receive(size_t budget);
  // Whether it stops reading from the socket until a device has taken the bytes that came for it.
  bool is_paused() const { return is_paused_; }
  // Whether TLS refused what came: its reason is worth telling.
  bool is_tampered() const { return tls_ && tls_->is_broken(); }
  // Whether TLS has bytes that receive() has not read: the socket need not become readable for them.
  bool has_buffered() const { return tls_ && !is_paused_ && !is_closing() && tls_->has_buffered(); }
  // Writes what the kernel takes, about `budget` bytes. Throws Error(transport).
  void flush(size_t budget);
  bool is_corked() const { return outbox_.is_corked(); }
  // Makes the kernel send the bytes that it holds back.
  void uncork();
  // Sends the MAP that lets the peer read our pool or region `id` by `lane`, or that says why it cannot. A repeated call does
  // nothing, unless a new pool has taken the id.
  void send_map(uint32_t id, Lane lane);
  void send_data(SendData data, OwnMemory memory);
  // Our pools or regions are gone. Tells a peer that can read one, so that it unmaps it; bytes that come in for one no longer land,
  // and queued frames keep none of them alive. A newer pool under the same id stays.
  void withdraw(const std::vector<Withdrawn>& gone);
  // Memory of the peer that a MAP brought since the last call, or null.
  std::shared_ptr<RemoteMemory> take_new_remote();
  // The memory that the peer gave as its pool or region `id` by `lane`. Throws Error with the reason if there is none: transport if
  // the peer took it back, else no_lane.
  std::shared_ptr<const RemoteMemory> remote(uint32_t id, Lane lane) const;
  // No further byte goes into the blocks of the current read; with an id, only if that read belongs to the transfer.
  void stop_landing(Code code, const std::string& text, const TransferId* only = nullptr);
  // The session has ended: sends the queued frames, accepts no more, and waits until `close_at` for the peer to hang up.
  void begin_close(Nanos close_at);

  SessionId session = 0;  // 0: none left
  std::optional<AgentRef> dialed;
  uint32_t interest = 0;  // the events that epoll watches now

 private:
  void withdraw_maps(const Withdrawn& gone);
  // connection_wire.cpp: what the bytes go through
  bool has_decided();
  bool decide(bool is_record);
  ssize_t read_tls(const iovec* vectors, size_t count);
  void become_plain();
  bool is_near_to(const AgentRef& peer) const;
  Bytes32 secret_of(std::string_view identity);
  bool is_refusal(const Frame& frame);
  void refuse(const Error& error);
  size_t read_copied();   // as read_payload(), through TLS into memory that may be gone

  size_t read_frames();   // into the decoder; returns the bytes that came
  size_t read_payload();  // into blocks, or thrown away
  size_t read_away();     // thrown away: the session is closing
  size_t check_read(ssize_t got) const;
  ssize_t read_some(iovec* vectors, size_t count);
  void take_frames();
  void take_buffered_payload();
  void land(std::string_view bytes);
  size_t put_into(const iovec* runs, size_t count, const uint8_t* from, size_t bytes) const;
  void on_frame(const Frame& frame);
  void on_up(const AgentRef& peer);
  void on_map(const Map& map);
  bool refuses(const Frame& frame);
  std::shared_ptr<RemoteMemory> open_remote(const Map& map, Fd descriptor);
  Map describe(uint32_t id, Lane lane, std::shared_ptr<Region>& region, uint64_t& serial) const;
  bool may_send_zero_copy(const SendData& data, const OwnMemory& memory) const;
  bool may_land();
  bool must_wait();
  void finish_payload();

  struct RemoteSlot {
    std::shared_ptr<const RemoteMemory> memory;
    std::string refusal;
    bool is_withdrawn = false;  // the peer took the memory back
    size_t bytes = 0;           // what this slot keeps of its MAP
  };
  using MapKey = std::pair<uint32_t, Lane>;

  const Counted counted_;  // first member, so that it is destroyed last
  Fd fd_;
  const SessionKind kind_;
  SharedEndpoint& shared_;
  Statistics& statistics_;
  LaneTools& tools_;
  // Plain: as the frames are. Accepted, Dialed (by TLS): nothing has come yet. Refused: the peer answers to TLS without it.
  enum class Wire : uint8_t { Plain, Accepted, Dialed, Tls, Refused };
  Wire wire_ = Wire::Plain;
  std::unique_ptr<TlsChannel> tls_;
  AgentRef tls_peer_;                       // whose secret an accepted session proved
  Decoder decoder_;
  Outbox outbox_;
  std::unique_ptr<IncomingBlocks> landing_;
  std::deque<Fd> descriptors_;
  std::vector<std::shared_ptr<RemoteMemory>> new_remotes_;
  std::map<MapKey, RemoteSlot> remotes_;    // by the peer's ids
  size_t remote_bytes_ = 0;                 // the sum of RemoteSlot::bytes
  std::shared_ptr<CmaPeer> cma_peer_;       // made by the first MAP of that lane
  Bytes16 peer_nonce_{};                    // of a session that is up: the proven peer's
  std::map<MapKey, uint64_t> maps_sent_;    // by own ids: the serial of what was sent
  bool is_up_ = false;
  bool is_shut_down_ = false;
  bool is_paused_ = false;
  bool is_near_ = false;                    // the peer runs under the same kernel: zero-copy payloads are possible
  Nanos close_at_ = 0;
};

}  // namespace kvxfer
