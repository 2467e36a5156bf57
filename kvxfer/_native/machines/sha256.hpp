// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the session proof only: a core that depends on no crypto library builds
// anywhere. Tested against hashlib. Not made for bulk data.
#pragma once

#include <string_view>

#include "ids.hpp"

namespace kvxfer {

Bytes32 sha256(std::string_view message);
Bytes32 hmac_sha256(std::string_view key, std::string_view message);
inline Bytes32 hmac_sha256(const Bytes32& key, std::string_view message) {
  return hmac_sha256({reinterpret_cast<const char*>(key.data()), key.size()}, message);
}
// Compares in a time that does not depend on where the two differ.
bool is_equal_constant_time(const Bytes32& a, const Bytes32& b);

}  // namespace kvxfer
