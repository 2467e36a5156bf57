#include "sockets.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <string_view>

namespace kvxfer {
namespace {

constexpr int kBacklog = 512;
constexpr int kHostSendBytes = 2 << 20;
constexpr std::string_view kUnpaced = "reno";  // congestion control that every kernel has
constexpr int kKeepIdleS = 20, kKeepIntervalS = 5, kKeepCount = 3;  // a device that forgets idle connections usually waits longer

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address tcp_address(const std::string& host, uint16_t port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (::inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.size = sizeof *v4;
  } else if (::inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.size = sizeof *v6;
  } else {
    throw Error(Code::invalid_argument, "'" + host + "' is not a numeric address");
  }
  return address;
}

Address unix_address(const std::string& path) {
  Address address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
  if (path.empty() || path.size() >= sizeof un->sun_path || path.find('\0') != std::string::npos) {
    throw Error(Code::invalid_argument, "a Unix socket's path must have 1 to " + std::to_string(sizeof un->sun_path - 1) + " bytes: '" + path + "'");
  }
  un->sun_family = AF_UNIX;
  std::memcpy(un->sun_path, path.c_str(), path.size() + 1);
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  return address;
}

bool is_loopback(const Address& address) {
  if (address.storage.ss_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
  return address.storage.ss_family == AF_INET && ntohl(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr) >> 24 == 127;
}

// BBR, where it is the host's default, paces on loopback too, and costs a third of the throughput there. It cannot be changed once there
// is a connection: its pacing stays.
Fd make_socket(const Address& address) {
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) fail_errno(Code::transport, "socket");
  if (is_loopback(address)) ::setsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
  return fd;
}

Fd dial(const Address& address, const std::string& where) {
  Fd fd = make_socket(address);
  if (::connect(fd.get(), address.get(), address.size) != 0 && errno != EINPROGRESS) fail_errno(Code::transport, "cannot connect to " + where);
  return fd;
}

std::string show(const std::string& host, uint16_t port) {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

}  // namespace

Fd listen_tcp(const std::string& host, uint16_t port, uint16_t& bound_port) {
  const Address address = tcp_address(host, port);
  Fd fd = make_socket(address);
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), address.get(), address.size) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    fail_errno(Code::transport, "cannot listen on " + show(host, port));
  }
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) fail_errno(Code::transport, "getsockname");
  bound_port = ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&own)->sin_port : reinterpret_cast<sockaddr_in6*>(&own)->sin6_port);
  return fd;
}

Fd listen_unix(const std::string& path) {
  const Address address = unix_address(path);
  Fd fd = make_socket(address);
  if (::bind(fd.get(), address.get(), address.size) != 0) {
    if (errno != EADDRINUSE) fail_errno(Code::transport, "cannot listen on " + path);
    const Fd probe = make_socket(address);
    const bool is_dead = ::connect(probe.get(), address.get(), address.size) != 0 && errno == ECONNREFUSED;
    if (!is_dead) throw Error(Code::transport, "cannot listen on " + path + ": another process does");
    ::unlink(path.c_str());
    if (::bind(fd.get(), address.get(), address.size) != 0) fail_errno(Code::transport, "cannot listen on " + path);
  }
  if (::listen(fd.get(), kBacklog) != 0) fail_errno(Code::transport, "cannot listen on " + path);
  return fd;
}

Fd dial_tcp(const std::string& host, uint16_t port) { return dial(tcp_address(host, port), show(host, port)); }

Fd dial_unix(const std::string& path) { return dial(unix_address(path), path); }

int connect_error(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

bool is_local(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0) return false;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 || own.ss_family != peer.ss_family) return false;
  if (own.ss_family == AF_INET) {
    const in_addr a = reinterpret_cast<sockaddr_in*>(&own)->sin_addr, b = reinterpret_cast<sockaddr_in*>(&peer)->sin_addr;
    return a.s_addr == b.s_addr || (ntohl(b.s_addr) >> 24) == 127;
  }
  const in6_addr &a = reinterpret_cast<sockaddr_in6*>(&own)->sin6_addr, &b = reinterpret_cast<sockaddr_in6*>(&peer)->sin6_addr;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void send_at_once(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// The kernel probes: an idle session stays known to NATs on its path, and a session whose peer is gone ends within 35 s, without
// waking a process.
void keep_alive(int fd) {
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepIdleS, sizeof kKeepIdleS);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepIntervalS, sizeof kKeepIntervalS);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kKeepCount, sizeof kKeepCount);
}

void enlarge_send_buffer(int fd) { ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kHostSendBytes, sizeof kHostSendBytes); }

void tune_tcp(int fd) {
  send_at_once(fd);
  keep_alive(fd);
  if (is_local(fd)) enlarge_send_buffer(fd);
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

}  // namespace kvxfer
