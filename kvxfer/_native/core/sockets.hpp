// Sockets as a core wants them: non-blocking, closed on exec, without delay. Knows addresses, and nothing of who is behind.
#pragma once

#include "fd.hpp"

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
// The way to a peer under the same kernel: whether no network card lies between, as between two network namespaces, is known
// by the round trip. There, as on loopback, the send buffer is bounded: all of it is under way at once, sent by
// the call that brought it. With more, what the window held back goes out on the processor that works on the acknowledgement,
// overtakes what the caller's sends, and is sent again for lost; and what waits to be received is in no cache any more. And
// congestion control goes by losses, not by rates: BBR takes the time in which the next blocks are summed for a slow path.
//
// The first round trips are of a connection that is being made, and a busy machine answers late. So the first blocks go by
// losses, until more is known.
//
// A window can be less than that buffer all the same: segments were overtaken while it opened, or another control left its
// slow start threshold behind. From there it never grows: what it holds back is overtaken in its turn. So the buffer
// follows such a window, down to a least size, and is a little more than that, for it to grow.
class HostPath {
 public:
  // Before blocks are sent. True once, when it has turned out that nothing lies between.
  bool is_found_short(int fd);
  // So many more bytes went out.
  void sent(int fd, size_t bytes);

 private:
  enum class Stage : uint8_t { Unknown, ByLosses, GivenBack, Short };

  Stage stage_ = Stage::Unknown;
  std::string kernels_;     // its congestion control
  uint64_t went_ = 0;       // bytes, when we took that over
  size_t unlooked_ = 0;     // bytes since the window was looked at
  int send_bytes_ = 0;      // the buffer
};

// The user on the other end of a Unix socket is ours.
bool is_same_user(int fd);

}  // namespace kvxfer
