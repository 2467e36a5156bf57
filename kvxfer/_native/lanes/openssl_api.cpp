#include "openssl_api.hpp"

#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "machines/codes.hpp"

namespace kvxfer::openssl {
namespace {

constexpr const char* kDefault = "libssl.so.3";
constexpr unsigned kMajor = 3;

[[noreturn]] void refuse(const std::string& text) { throw Error(Code::no_lane, "OpenSSL cannot be used: " + text); }

template <class Function>
void find(void* library, const char* name, Function& to) {
  to = reinterpret_cast<Function>(::dlsym(library, name));  // looks into libcrypto too
  if (to == nullptr) refuse(std::string("it has no ") + name);
}

std::unique_ptr<Library> open(const std::string& path) {
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    refuse(why == nullptr ? path : why);
  }
  unsigned (*major)() = nullptr;
  const char* (*version)(int) = nullptr;
  find(handle, "OPENSSL_version_major", major);
  find(handle, "OpenSSL_version", version);
  if (major() != kMajor) refuse(std::string(version(0)) + " is not OpenSSL 3");

  auto made = std::make_unique<Library>();
  Library& l = *made;
  l.path = path;
  l.version = version(0);
  find(handle, "TLS_method", l.tls_method);
  find(handle, "SSL_CTX_new", l.context_new);
  find(handle, "SSL_CTX_free", l.context_free);
  find(handle, "SSL_CTX_ctrl", l.context_control);
  find(handle, "SSL_CTX_set_options", l.context_set_options);
  find(handle, "SSL_CTX_set_ciphersuites", l.context_set_ciphersuites);
  find(handle, "SSL_CTX_set_num_tickets", l.context_set_num_tickets);
  find(handle, "SSL_CTX_set_verify", l.context_set_verify);
  find(handle, "SSL_CTX_set_default_read_buffer_len", l.context_set_read_buffer);
  find(handle, "SSL_CTX_set_psk_use_session_callback", l.context_set_use_session);
  find(handle, "SSL_CTX_set_psk_find_session_callback", l.context_set_find_session);
  find(handle, "SSL_new", l.connection_new);
  find(handle, "SSL_free", l.connection_free);
  find(handle, "SSL_set_bio", l.set_bio);
  find(handle, "SSL_set_connect_state", l.set_connect_state);
  find(handle, "SSL_set_accept_state", l.set_accept_state);
  find(handle, "SSL_set_ex_data", l.set_ex_data);
  find(handle, "SSL_get_ex_data", l.get_ex_data);
  find(handle, "SSL_do_handshake", l.do_handshake);
  find(handle, "SSL_is_init_finished", l.is_init_finished);
  find(handle, "SSL_session_reused", l.session_reused);
  find(handle, "SSL_read_ex", l.read);
  find(handle, "SSL_write_ex", l.write);
  find(handle, "SSL_has_pending", l.has_pending);
  find(handle, "SSL_key_update", l.key_update);
  find(handle, "SSL_shutdown", l.shutdown);
  find(handle, "SSL_get_error", l.get_error);
  find(handle, "SSL_CIPHER_find", l.find_cipher);
  find(handle, "SSL_SESSION_new", l.session_new);
  find(handle, "SSL_SESSION_free", l.session_free);
  find(handle, "SSL_SESSION_set1_master_key", l.session_set_key);
  find(handle, "SSL_SESSION_set_cipher", l.session_set_cipher);
  find(handle, "SSL_SESSION_set_protocol_version", l.session_set_version);
  find(handle, "BIO_get_new_index", l.bio_index);
  find(handle, "BIO_meth_new", l.bio_method_new);
  find(handle, "BIO_meth_set_write", l.bio_method_set_write);
  find(handle, "BIO_meth_set_read", l.bio_method_set_read);
  find(handle, "BIO_meth_set_ctrl", l.bio_method_set_control);
  find(handle, "BIO_new", l.bio_new);
  find(handle, "BIO_set_data", l.bio_set_data);
  find(handle, "BIO_get_data", l.bio_get_data);
  find(handle, "BIO_set_init", l.bio_set_init);
  find(handle, "BIO_set_flags", l.bio_set_flags);
  find(handle, "BIO_clear_flags", l.bio_clear_flags);
  find(handle, "ERR_get_error", l.next_error);
  find(handle, "ERR_clear_error", l.clear_errors);
  find(handle, "ERR_reason_error_string", l.reason);
  return made;
}

}  // namespace

const Library& load(const std::string& path) {
  static std::mutex mutex;
  static const Library* loaded = nullptr;  // never freed: its users may outlive this file's objects
  std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = open(path.empty() ? kDefault : path).release();
  return *loaded;
}

std::string take_reason(const Library& library) {
  const unsigned long error = library.next_error();
  library.clear_errors();
  const char* const reason = error == 0 ? nullptr : library.reason(error);
  return reason == nullptr ? "no reason is known" : reason;
}

}  // namespace kvxfer::openssl
