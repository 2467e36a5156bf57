// Sockets as a core needs them: non-blocking, closed on exec, without delay. Knows addresses, and nothing of the peers.
#pragma once

#include "memory/fd.hpp"

namespace kvxfer {

// Numeric hosts only. Each throws Error(transport) or Error(invalid_argument).
Fd listen_tcp(const std::string& host, uint16_t port, uint16_t& bound_port);
// Replaces a socket file without a listening process; refuses one with such a process.
Fd listen_unix(const std::string& path);
// The connect has begun: wait for it to be writable, then call connect_error().
Fd dial_tcp(const std::string& host, uint16_t port);
Fd dial_unix(const std::string& path);
int connect_error(int fd);  // 0: connected

// Whether both ends are on this host.
bool is_local(int fd);
// Turns TCP_NODELAY on, which also makes the kernel send the bytes that MSG_MORE held back.
void send_at_once(int fd);
// For a socket between two processes of one host: with the kernel's default size the sender waits for the reader too often.
void enlarge_send_buffer(int fd);
// Turns TCP_NODELAY and keepalive on, and enlarges the send buffer of a local connection. The kernel decides about windows and
// congestion control.
void tune_tcp(int fd);

// Whether the process on the other end of a Unix socket runs as the same user.
bool is_same_user(int fd);

}  // namespace kvxfer
