// Sockets as a core wants them: non-blocking, closed on exec, without delay. Knows addresses, and nothing of who is behind.
#pragma once

#include "memory/fd.hpp"

namespace kvxfer {

// Numeric hosts only. Each throws Error(transport) or Error(invalid_argument).
Fd listen_tcp(const std::string& host, uint16_t port, uint16_t& bound_port);
// Replaces a socket file that nobody listens on any more; refuses one that somebody does.
Fd listen_unix(const std::string& path);
// Begun, perhaps not yet connected: wait for it to be writable, then ask connect_error().
Fd dial_tcp(const std::string& host, uint16_t port);
Fd dial_unix(const std::string& path);
int connect_error(int fd);  // 0: connected

// Both ends are on this host.
bool is_local(int fd);
// No delay; and what MSG_MORE had the kernel hold goes out now.
void send_at_once(int fd);
// No delay, and on loopback what suits memory that only looks like a network.
void tune_tcp(int fd);
// The kernel's own congestion control from now on, where a descriptor is to be had. A connection does not begin with BBR, as
// some systems would have it: a socket that ever had it is paced by the kernel for good, whatever control follows. That is a
// timer for each segment, and half of the speed of memory that only looks like a network. Peers elsewhere get it back.
void give_back_control(int fd) noexcept;
// The way to a peer under the same kernel: whether no network card lies between, as between two network namespaces, is known
// by the round trip. There, as on loopback, the send buffer is bounded: most of it is under way at once, sent by
// the call that brought it.
//
// The first round trips are of a connection that is being made, and a busy machine answers late. So congestion control goes
// by losses until more is known.
//
// A window can be less than that buffer all the same: segments were overtaken while it opened. What it holds back goes
// out on the processor that works on the acknowledgement, overtakes what the caller's sends, and is sent again for lost: it
// never grows. So the buffer follows such a window, down to a least size, and is a little more than that, for it to grow.
class HostPath {
 public:
  explicit HostPath(int fd);
  // Before blocks are sent. True once, when it has turned out that nothing lies between.
  bool is_found_short(int fd);
  // So many more bytes went out.
  void sent(int fd, size_t bytes);

 private:
  enum class Stage : uint8_t { Unknown, Long, Short };

  Stage stage_ = Stage::Unknown;
  size_t unlooked_ = 0;     // bytes since the window was looked at
  int send_bytes_ = 0;      // the buffer
};

// The user on the other end of a Unix socket is ours.
bool is_same_user(int fd);

}  // namespace kvxfer
