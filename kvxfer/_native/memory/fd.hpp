// A file descriptor with one owner, and what went wrong with a system call in words.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "machines/codes.hpp"

namespace kvxfer {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

inline std::string errno_text(const std::string& what, int error = errno) {
  return what + ": " + std::generic_category().message(error);
}

[[noreturn]] inline void fail_errno(Code code, const std::string& what) { throw Error(code, errno_text(what)); }

}  // namespace kvxfer
