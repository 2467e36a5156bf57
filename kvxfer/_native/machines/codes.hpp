// The stable error codes on the wire. Their names are the `code` of the exceptions in kvxfer/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvxfer {

enum class Code : uint16_t {
  ok = 0,
  internal,
  invalid_argument,
  blocks_busy,
  limit_exceeded,
  closed,
  incompatible,
  refused,
  unauthenticated,
  protocol,
  overloaded,
  transport,
  peer_gone,
  deadline,
  no_lane,
  grant_expired,
  grant_revoked,
  grant_released,
  grant_unknown,
  checksum,
  cancelled,
  memory_gone,
};
constexpr uint16_t kCodeCount = 22;

inline const char* name(Code code) {
  static const char* const names[kCodeCount] = {
      "ok",          "internal",   "invalid_argument", "blocks_busy",   "limit_exceeded", "closed",         "incompatible",
      "refused",     "unauthenticated", "protocol",    "overloaded",    "transport",      "peer_gone",      "deadline",
      "no_lane",     "grant_expired",   "grant_revoked", "grant_released", "grant_unknown", "checksum",     "cancelled",
      "memory_gone",
  };
  const auto index = static_cast<uint16_t>(code);
  return index < kCodeCount ? names[index] : "internal";
}

// The one error type of the native core; Python turns it into the exception of that code.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace kvxfer
