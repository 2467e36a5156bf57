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

// No delay, and on one host a window small enough that what was sent is still in the cache when it is received.
void tune_tcp(int fd);
// The user on the other end of a Unix socket is ours.
bool is_same_user(int fd);

}  // namespace kvxfer
