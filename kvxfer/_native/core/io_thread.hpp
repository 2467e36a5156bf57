// The one thread of a core: waits for sockets and deadlines, feeds the endpoint, performs its effects. It takes turns in
// bounded portions, so that a long copy or a fast peer delays nobody's verdict, and sleeps without a timer where nothing
// is due.
#pragma once

#include <unordered_map>

#include "connection.hpp"

namespace kvxfer {

class IoThread {
 public:
  // `unix_listener` may be empty: nobody can map our pools then.
  IoThread(SharedEndpoint& shared, Statistics& statistics, EndpointLimits limits, Fd tcp_listener, Fd unix_listener);

  // Returns when the endpoint was shut, every connection closed and every read reported over. An internal error shuts it.
  void run() noexcept;

 private:
  struct Dialing {
    Fd fd;
    AgentRef peer;
    SessionKind kind;
    Nanos deadline;
  };
  using Key = uint64_t;  // what epoll tells of a socket; never used twice

  void loop();
  void wait(bool must_return, Nanos until);
  void on_ready(Key key, uint32_t events);
  void close_all();

  void accept(Fd& listener, Key key, SessionKind kind);
  void open(Fd fd, SessionKind kind, std::optional<AgentRef> dialed);
  void start_dial(const Dial& dial);
  void finish_dial(Key key);
  void dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text);

  void perform_now();  // what is asked for so far
  void perform(Effect& effect);
  void perform(const Hangup& effect);
  void perform(const SendMap& effect);
  void perform(SendData& effect);
  void perform(ReadBlocks& effect);
  void stop_reads(const TransferId& id);
  void stop_copy(const CopyJob& copy, Code code, const std::string& text);
  void copy_some();
  bool warm_some();  // true: there is more

  Connection* find(SessionId session);
  void touch(Key key) { touched_.push_back(key); }
  void flush_touched();
  void watch(Key key, Connection& connection);
  void lose(Key key, const Error& error);
  void close(Key key, Code code, const std::string& text);
  void remove(Key key);
  void tick_own(Nanos now);
  Nanos next_own_deadline() const;
  void poll(int operation, int fd, uint32_t events, Key key);

  SharedEndpoint& shared_;
  Statistics& statistics_;
  const EndpointLimits limits_;
  Fd epoll_, tcp_listener_, unix_listener_;
  std::unordered_map<Key, std::unique_ptr<Connection>> connections_;
  std::unordered_map<SessionId, Key> by_session_;
  std::unordered_map<Key, Dialing> dialing_;
  std::deque<std::unique_ptr<CopyJob>> copies_;
  std::deque<std::weak_ptr<Mapping>> warming_;
  std::vector<Key> touched_;
  Key next_key_ = 16;
  Nanos accept_again_at_ = kNever;  // listeners rest while there are no descriptors left
  size_t closing_ = 0;
};

}  // namespace kvxfer
