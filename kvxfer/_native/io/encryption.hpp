// Which sessions are encrypted, and with which OpenSSL: decided by this agent alone. What a peer asks for never makes a session plain
// that this agent wants encrypted. Knows no socket and no key.
#pragma once

#include <cstdint>
#include <string>

#include "lanes/openssl_api.hpp"

namespace kvxfer {

enum class EncryptionMode : uint8_t { Never, BetweenHosts, Always };

struct EncryptionOptions {
  EncryptionMode mode = EncryptionMode::BetweenHosts;
  std::string library_path;         // empty: libssl.so.3, as the loader finds it
  bool is_plain_tolerated = false;  // between hosts, where OpenSSL cannot be loaded
  // A key encrypts so many records at most; then the next one follows (KeyUpdate). RFC 8446, 5.5: AES-GCM is good for 2^24.5.
  uint64_t records_per_key = uint64_t{1} << 22;
};

class Encryption {
 public:
  explicit Encryption(EncryptionOptions options) : options_(std::move(options)) {}

  // Whether a TCP session must be encrypted. `is_local`: both ends are on this host.
  bool is_wanted(bool is_local) const;
  // Whether this agent takes an encrypted session that it does not insist on.
  bool is_possible() const { return options_.mode != EncryptionMode::Never; }
  // Throws Error(no_lane) with what to do about it.
  const openssl::Library& library() const;
  uint64_t records_per_key() const { return options_.records_per_key; }

 private:
  const EncryptionOptions options_;
};

}  // namespace kvxfer
