// The event loop of a core: it waits for sockets and deadlines, feeds the endpoint, and performs the endpoint's effects. It
// works in bounded portions, so that a long copy or a fast peer does not delay the verdict for another peer, and it sleeps
// without a timer where nothing is due.
//
// One mutex guards everything here, and the thread that holds it runs the loop. The IO thread runs it in run(), and gives the
// mutex up while it sleeps. A thread of the program may run the loop in its place, if it gets the mutex at once: progress_until()
// runs the loop as long as that caller waits, and progress() is one round. Nothing depends on whether a caller comes back,
// because each of them leaves by hand_over(), which wakes the IO thread if it would sleep past what is due next.
#pragma once

#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "connection.hpp"
#include "poller.hpp"
#include "reads.hpp"

namespace kvxfer {

class EventLoop {
 public:
  // `unix_listener` may be empty: then no peer can map our pools. `mutex` outlives the loop.
  EventLoop(SharedEndpoint& shared, Statistics& statistics, EndpointLimits limits, LaneTools tools, std::mutex& mutex, Fd tcp_listener,
            Fd unix_listener);

  // The IO thread's body. Returns when the endpoint was shut, every connection is closed and the end of every read is reported.
  // An internal error shuts the endpoint. What does not end within a bound is kept for ever, with the memory that it may touch.
  void run() noexcept;
  // One round on the calling thread, which holds the mutex: a small portion of the work that is due; with `looks`, what is
  // ready on the sockets comes first. Never sleeps. Returns false, and does nothing, where the endpoint was shut.
  bool progress(bool looks) noexcept;
  // Runs the loop on the calling thread, which holds the mutex, until the owner has news, a signal came or it is `until`.
  // Returns false, and does nothing, where another caller does so already.
  bool progress_until(std::unique_lock<std::mutex>& lock, Nanos until) noexcept;

 private:
  struct Dialing {
    Fd fd;
    AgentRef peer;
    SessionKind kind;
    Nanos deadline;
  };
  static constexpr size_t kPortion = 4 << 20;  // bytes of a connection, and of all one-sided reads, in one round
  using Key = Poller::Key;  // a socket's is never used twice
  static constexpr Key kWakeKey = 0, kTcpKey = 1, kUnixKey = 2, kUcxKey = 3, kStagingKey = 4;

  Nanos round();
  bool sleep(std::unique_lock<std::mutex>& lock, Nanos until, Poller::Sleeper sleeper);
  bool look();
  void dispatch(const epoll_event* events, int count);
  Nanos with_ucx(Nanos until);
  void hand_over(Nanos next);
  void tell_caller();
  void fail(const std::exception& error) noexcept;
  void on_ready(Key key, uint32_t events);

  // event_loop_sockets.cpp: connections come and go
  void accept(Fd& listener, Key key, SessionKind kind);
  void open(Fd fd, SessionKind kind, std::optional<AgentRef> dialed);
  void start_dial(const Dial& dial);
  void finish_dial(Key key);
  void dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text);
  void lose(Key key, const Error& error);
  void close(Key key, Code code, const std::string& text);
  void remove(Key key);
  void tick_own(Nanos now);
  Nanos next_own_deadline() const;

  // event_loop_effects.cpp
  void perform_now();  // the effects that there are so far
  void perform(Effect& effect);
  void perform(const Hangup& effect);
  void perform(const SendMap& effect);
  void perform(SendData& effect);
  void perform(ReadBlocks& effect);
  void withdraw(const std::vector<Withdrawn>& gone);
  void stop_reads(const TransferId& id);
  Connection* find(SessionId session);
  void touch(Key key) { touched_.push_back(key); }
  void flush_touched();
  void uncork();
  void watch(Key key, Connection& connection);
  bool prefault_some();  // true: there is more

  // event_loop_end.cpp
  void settle_copies();
  void finish_copies(Nanos until);
  void finish_reads(Nanos until);
  void close_all();
  void end() noexcept;
  void report_copies(const std::vector<uint64_t>& gathers);

  SharedEndpoint& shared_;
  Statistics& statistics_;
  const EndpointLimits limits_;
  LaneTools tools_;  // outlives what uses it
  std::mutex& mutex_;
  Fd tcp_listener_, unix_listener_;
  Poller poller_;
  std::unordered_map<Key, std::unique_ptr<Connection>> connections_;
  std::unordered_map<SessionId, Key> by_session_;
  std::unordered_map<Key, Dialing> dialing_;
  Reads reads_;
  std::deque<std::weak_ptr<RemoteMemory>> prefaulting_;
  std::vector<Key> touched_;  // connections that may have something to send, or to be watched for
  std::vector<Key> buffered_;  // connections with bytes to read that epoll does not report
  std::vector<Key> corked_;   // connections whose last bytes the kernel holds back
  Key next_key_ = kStagingKey + 1;
  Nanos accept_again_at_ = kNever;  // listeners rest while there are no descriptors left
  size_t closing_ = 0;
  size_t portion_ = kPortion;  // of the thread that holds the mutex
  Nanos tick_at_ = 0;
  Nanos thread_sleeps_until_ = 0;  // the IO thread; 0: it is awake, and does a round before it sleeps
  Nanos thread_alarm_ = 0;         // until when it slept last, at most
  bool has_caller_ = false;        // inside progress_until()
  std::condition_variable caller_left_;
};

}  // namespace kvxfer
