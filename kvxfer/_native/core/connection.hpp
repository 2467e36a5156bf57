// One connection: its socket, what waits to go out, what comes in, and the mappings its peer gave. The IO thread alone
// touches it. It turns bytes into events of the endpoint; what follows from them is the IO thread's to perform.
//
// While blocks come in, each read from the socket is vectored into the blocks themselves with room behind them for the
// header of the frame that follows, so that a chunk costs no extra call.
#pragma once

#include <map>

#include "lanes/mapped.hpp"
#include "outbox.hpp"

namespace kvxfer {

class Connection {
 public:
  Connection(Fd fd, SessionKind kind, SharedEndpoint& shared, Statistics& statistics);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  int fd() const { return fd_.get(); }
  SessionKind kind() const { return kind_; }
  bool is_up() const { return is_up_; }
  bool is_closing() const { return close_at_ != 0; }
  Nanos close_at() const { return close_at_; }
  Outbox& outbox() { return outbox_; }

  // Reads what is there, within a budget. Throws Error: transport where the connection is lost, protocol or overloaded
  // where the peer is at fault.
  void receive();
  // Writes what the kernel takes, within a budget. Throws Error(transport).
  void flush();
  // Sends `map` once a session, with the descriptor of its pool.
  void send_map(const Pool& pool);
  // A mapping that came and was not yet taken from here, or nothing.
  std::shared_ptr<Mapping> take_new_mapping();
  // The pool that the peer gave as `pool`; throws Error(no_lane) with the reason why there is none.
  std::shared_ptr<const Mapping> mapping(uint32_t pool) const;
  // No byte goes into the blocks of the read under way any more; with an id, only where it is of that transfer.
  void stop_landing(Code code, const std::string& text, const TransferId* only = nullptr);
  // The session is over: sends what was queued, takes nothing more, waits for the peer to hang up until `close_at`.
  void begin_close(Nanos close_at);

  SessionId session = 0;  // 0: none any more
  std::optional<AgentRef> dialed;
  uint32_t interest = 0;  // what epoll was last asked to watch

 private:
  size_t read_frames();   // into the decoder; returns the bytes that came
  size_t read_payload();  // into blocks, or away
  size_t read_away();
  size_t check_read(ssize_t got) const;
  ssize_t read_with_descriptors(uint8_t* to, size_t size);
  void take_frames();
  void take_buffered_payload();
  void on_frame(const Frame& frame);
  void on_map(const Map& map);
  bool may_land();
  void finish_payload();

  struct MappingSlot {
    std::shared_ptr<const Mapping> mapping;
    std::string refusal;
  };

  Fd fd_;
  const SessionKind kind_;
  SharedEndpoint& shared_;
  Statistics& statistics_;
  Decoder decoder_;
  Outbox outbox_;
  std::unique_ptr<IncomingBlocks> landing_;
  std::deque<Fd> descriptors_;
  std::vector<std::shared_ptr<Mapping>> new_mappings_;
  std::map<uint32_t, MappingSlot> mappings_;  // by the peer's pool id
  std::map<uint32_t, uint64_t> maps_sent_;    // own pool id to the serial of the pool that was sent
  bool is_up_ = false;
  bool is_shut_down_ = false;
  Nanos close_at_ = 0;
};

}  // namespace kvxfer
