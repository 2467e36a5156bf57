#include "encryption.hpp"

#include "machines/codes.hpp"

namespace kvxfer {

bool Encryption::is_wanted(bool is_local) const {
  if (options_.mode == EncryptionMode::Always) return true;
  if (options_.mode == EncryptionMode::Never || is_local) return false;
  if (!options_.is_plain_tolerated) return true;
  try {
    openssl::load(options_.library_path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

const openssl::Library& Encryption::library() const {
  try {
    return openssl::load(options_.library_path);
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + "; sessions with other hosts are encrypted: install OpenSSL 3, or set insecure on a network that you trust");
  }
}

}  // namespace kvxfer
