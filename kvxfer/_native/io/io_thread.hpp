// The loop of a core: waits for sockets and deadlines, feeds the endpoint, performs its effects. It takes turns in bounded
// portions, so that a long copy or a fast peer delays nobody's verdict, and sleeps without a timer where nothing is due.
//
// A thread of its own runs it. But everything here is guarded by one mutex, the turn, which that thread lets go while it
// waits; and a thread that has just posted something, or polls for its end, may take the turn and do what is to be done
// itself. That saves two wakeups of a thread, which is more than a small read costs. While somebody polls without pause,
// the thread leaves the sockets to it and only looks now and then whether it still does; for an answer to a small post it is not
// even woken (poller.hpp). A caller that has nothing to do but wait drives the loop itself, reads of much included, and the
// thread rests meanwhile.
#pragma once

#include <condition_variable>

#include <unordered_map>

#include "connection.hpp"
#include "poller.hpp"
#include "lanes/processors.hpp"
#include "reads.hpp"

namespace kvxfer {

// Guards the loop. Who has it does the loop's work.
struct LoopTurn {
  std::mutex mutex;
  std::atomic<uint32_t> drivers{0};    // callers that drive the loop, or want to: the thread lets them
  std::atomic<bool> is_driven{false};  // by one of them; written by who has the turn
};

class IoThread {
 public:
  // `unix_listener` may be empty: nobody can map our pools then.
  IoThread(SharedEndpoint& shared, Statistics& statistics, EndpointLimits limits, LaneTools tools, LoopTurn& turn, Fd tcp_listener,
           Fd unix_listener);

  // Returns when the endpoint was shut, every connection closed and every read reported over. An internal error shuts it.
  // What does not end within a bound is kept for ever, with the memory that it may touch.
  void run() noexcept;
  // Does on the caller's thread, which has the turn, a small portion of what is to be done. `is_polling`: looks at the
  // sockets too. What is left is done by the thread. Returns false where nothing was done: others are at it.
  bool help(bool is_polling) noexcept;
  // Runs the loop on the caller's thread, which has the turn and counts as a driver, until the owner has news to take, a
  // signal came or it is `until`. Returns false, and at once, where another caller does so already. It is no driver any more
  // afterwards.
  bool drive(std::unique_lock<std::mutex>& turn, Nanos until) noexcept;

  static constexpr Nanos kPollPause = 100'000;  // whoever polls more often than this polls without a pause

 private:
  struct Dialing {
    Fd fd;
    AgentRef peer;
    SessionKind kind;
    Nanos deadline;
  };
  static constexpr size_t kPortion = 4 << 20;  // of a connection, and of all one-sided reads, in one round
  using Key = Poller::Key;  // a socket's is never used twice

  Nanos work();
  void fail(const std::exception& error) noexcept;
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
  void withdraw(const std::vector<Withdrawn>& gone);
  // io_turns.cpp
  bool wait(std::unique_lock<std::mutex>& turn, Nanos until, bool is_driver);  // false: a signal came
  struct Begin {  // of a wait
    Nanos spin = 0;         // without sleep
    bool is_full = false;   // for room in a Unix socket
    bool moves = false;     // to another processor first
    Nanos away = 0;         // written by the wait: as long others had the processor
  };
  Begin begin_wait(bool is_driver, Nanos now);
  int wait_unlocked(epoll_event* events, int size, Nanos until, bool is_driver, bool is_polled, Begin& begin);
  void answered();
  void set_timer(Nanos at, bool is_followed = false);
  void leave();
  Nanos left_to_wait_for(Nanos until);
  bool is_polled_still(Nanos now) const;
  void rest(std::unique_lock<std::mutex>& turn);  // while others drive
  void let_drive();                               // the thread waits, without the turn, while others drive and are awake
  void hand_over(Nanos until, bool is_followed = false);
  void tell_first();
  // io_copies.cpp
  void settle_copies();
  void finish_copies(Nanos until);
  void finish_reads(Nanos until);
  void end() noexcept;
  void report_copies(const std::vector<uint64_t>& gathers);
  void stop_reads(const TransferId& id);
  bool warm_some();  // true: there is more

  Connection* find(SessionId session);
  void touch(Key key) { touched_.push_back(key); }
  void flush_touched(bool is_amid = false);
  void let_go();
  void watch(Key key, Connection& connection);
  void lose(Key key, const Error& error);
  void close(Key key, Code code, const std::string& text);
  void remove(Key key);
  void tick_own(Nanos now);
  Nanos next_own_deadline() const;

  SharedEndpoint& shared_;
  Statistics& statistics_;
  const EndpointLimits limits_;
  LaneTools tools_;  // outlives what uses it
  LoopTurn& turn_;
  Fd tcp_listener_, unix_listener_;
  Poller poller_;           // its timer wakes who sleeps earlier than he meant to
  std::unordered_map<Key, std::unique_ptr<Connection>> connections_;
  std::unordered_map<SessionId, Key> by_session_;
  std::unordered_map<Key, Dialing> dialing_;
  Reads reads_;
  std::deque<std::weak_ptr<RemoteMemory>> warming_;
  std::vector<Key> touched_;
  std::vector<Key> held_;
  Key next_key_ = 16;
  Nanos accept_again_at_ = kNever;  // listeners rest while there are no descriptors left
  size_t closing_ = 0;
  bool has_read_ = false;   // the last one-sided read has just ended, and is to be confirmed
  size_t portion_;          // of bytes, for whoever has the turn
  bool is_bulk_ = false;  // more is to be read than one portion
  Nanos worked_at_ = 0, tick_at_ = 0;
  Nanos sleeps_until_ = 0;  // of the thread; 0: it does not
  bool is_told_first_ = false;  // the timer is for what whoever polled or waited left
  bool is_napping_ = false;  // because another thread polls
  std::atomic<Nanos> polled_at_{0};  // by another thread, read without the turn; how often without a pause
  uint32_t polls_ = 0;
  Nanos helped_at_ = 0;     // last small post of a caller that was not answered yet; 0: they were
  bool has_polled_ = false;   // a poll that came soon after one brought news, and none has been late since
  bool has_waited_ = false;   // while much was to be read somebody came to drive, and did not fail to since
  bool is_followed_ = false;  // the timer is for the case that he does
  uint32_t quick_ = 0;      // waits in a row that were over almost at once
  uint32_t slowly_ = 0;     // full Unix sockets in a row that were emptied slowly
  Key full_ = 0;            // this socket took not all: it has more to say than its peer; 0: none since the last wait
  Key landing_ = 0;         // blocks came in from under this kernel; 0: none since the last wait
  Spinning spinning_;
  KeepOff keep_off_;        // the thread
  bool is_resting_ = false;  // the thread, while others drive
  std::condition_variable undriven_;
  std::atomic<bool> is_driver_asleep_{false}, is_letting_{false};  // the thread waits for let_, and has no turn
  std::mutex letting_;                                             // nothing is locked under it
  std::condition_variable let_;
};

}  // namespace kvxfer
