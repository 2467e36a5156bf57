// What a plain TLS socket moves on this host: two processes over loopback, TLS 1.3 with TLS_AES_128_GCM_SHA256 and a secret of both
// (PSK), records of 16 KiB, out of and into memory that is as large as what is moved. benchmarks/stream_tls.py builds and runs it.
//
//   tls_limit BYTES ROUNDS      prints GB/s of each round, from the first byte sent to the last byte read
//
// Of OpenSSL only what is used is declared: a host with the library need not have its headers.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct SSL_SESSION;
struct SSL_CIPHER;
struct EVP_MD;
const SSL_METHOD* TLS_method();
SSL_CTX* SSL_CTX_new(const SSL_METHOD*);
long SSL_CTX_ctrl(SSL_CTX*, int, long, void*);
int SSL_CTX_set_ciphersuites(SSL_CTX*, const char*);
int SSL_CTX_set_num_tickets(SSL_CTX*, size_t);
void SSL_CTX_set_psk_use_session_callback(SSL_CTX*, int (*)(SSL*, const EVP_MD*, const unsigned char**, size_t*, SSL_SESSION**));
void SSL_CTX_set_psk_find_session_callback(SSL_CTX*, int (*)(SSL*, const unsigned char*, size_t, SSL_SESSION**));
SSL* SSL_new(SSL_CTX*);
int SSL_set_fd(SSL*, int);
int SSL_connect(SSL*);
int SSL_accept(SSL*);
int SSL_read(SSL*, void*, int);
int SSL_write(SSL*, const void*, int);
SSL_SESSION* SSL_SESSION_new();
int SSL_SESSION_set1_master_key(SSL_SESSION*, const unsigned char*, size_t);
int SSL_SESSION_set_cipher(SSL_SESSION*, const SSL_CIPHER*);
int SSL_SESSION_set_protocol_version(SSL_SESSION*, int);
const SSL_CIPHER* SSL_CIPHER_find(SSL*, const unsigned char*);
}

namespace {

constexpr int kWriteBytes = 1 << 20;

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

SSL_SESSION* session(SSL* ssl) {
  const unsigned char suite[] = {0x13, 0x01}, secret[32] = {7};
  SSL_SESSION* made = SSL_SESSION_new();
  SSL_SESSION_set1_master_key(made, secret, sizeof secret);
  SSL_SESSION_set_cipher(made, SSL_CIPHER_find(ssl, suite));
  SSL_SESSION_set_protocol_version(made, 0x0304);
  return made;
}

int use(SSL* ssl, const EVP_MD*, const unsigned char** name, size_t* size, SSL_SESSION** out) {
  *name = reinterpret_cast<const unsigned char*>("x");
  *size = 1;
  *out = session(ssl);
  return 1;
}

int find(SSL* ssl, const unsigned char*, size_t, SSL_SESSION** out) {
  *out = session(ssl);
  return 1;
}

SSL* open(int fd, bool is_client) {
  SSL_CTX* context = SSL_CTX_new(TLS_method());
  SSL_CTX_ctrl(context, 123, 0x0304, nullptr);  // TLS 1.3 and no other
  SSL_CTX_ctrl(context, 41, 1, nullptr);        // read ahead: fewer system calls
  SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256");
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_psk_use_session_callback(context, use);
  SSL_CTX_set_psk_find_session_callback(context, find);
  SSL* ssl = SSL_new(context);
  SSL_set_fd(ssl, fd);
  if ((is_client ? SSL_connect(ssl) : SSL_accept(ssl)) != 1) fail("handshake");
  return ssl;
}

char* memory(size_t bytes, int value) {
  void* made = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) fail("mmap");
  return static_cast<char*>(std::memset(made, value, bytes));
}

void put(SSL* ssl, const char* from, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const int sent = SSL_write(ssl, from + at, static_cast<int>(bytes - at < kWriteBytes ? bytes - at : kWriteBytes));
    if (sent <= 0) fail("SSL_write");
    at += static_cast<size_t>(sent);
  }
}

void take(SSL* ssl, char* to, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const int got = SSL_read(ssl, to + at, static_cast<int>(bytes - at < kWriteBytes ? bytes - at : kWriteBytes));
    if (got <= 0) fail("SSL_read");
    at += static_cast<size_t>(got);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  const size_t bytes = std::strtoull(words[1], nullptr, 10);
  const int rounds = std::atoi(words[2]);
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener, 1) != 0) fail("listen");
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const int on = 1;
  if (::fork() == 0) {
    const int fd = ::accept(listener, nullptr, nullptr);
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    SSL* ssl = open(fd, false);
    const char* from = memory(bytes, 1);
    char go;
    for (int i = 0; i < rounds; ++i) {
      take(ssl, &go, 1);
      put(ssl, from, bytes);
    }
    return 0;
  }
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), size) != 0) fail("connect");
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  SSL* ssl = open(fd, true);
  char* to = memory(bytes, 2);
  for (int i = 0; i < rounds; ++i) {
    const auto began = std::chrono::steady_clock::now();
    put(ssl, "g", 1);
    take(ssl, to, bytes);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::printf("%.4f\n", static_cast<double>(bytes) / seconds / 1e9);
  }
  return ::wait(nullptr) < 0;
}
