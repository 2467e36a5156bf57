// The part of OpenSSL 3 that encrypted sessions call, declared here so that building needs no OpenSSL, and bound at run time so that
// a process without them never loads it. This file knows the library's ABI, and nothing of sessions.
//
// Source of the signatures: openssl/ssl.h, bio.h and err.h of OpenSSL 3.0; 3.x keeps them. Everything here is per context, per
// connection or per thread: another user of the same library in this process, such as Python's `ssl`, is not affected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvxfer::openssl {

struct Method;       // SSL_METHOD
struct Context;      // SSL_CTX
struct Connection;   // SSL
struct Session;      // SSL_SESSION
struct Cipher;       // SSL_CIPHER
struct Digest;       // EVP_MD
struct Bio;          // BIO
struct BioMethod;    // BIO_METHOD

constexpr int kVersion13 = 0x0304;
constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorZeroReturn = 6;
constexpr int kBioFlagsRetryRead = 0x01 | 0x08, kBioFlagsAllRetry = 0x0f, kBioSourceSink = 0x0400, kBioFlush = 11;
constexpr int kControlMode = 33, kControlReadAhead = 41, kControlCacheMode = 44, kControlMinVersion = 123, kControlMaxVersion = 124;
constexpr long kModePartialMovingWrite = 0x1 | 0x2 | 0x4;  // SSL_MODE_ENABLE_PARTIAL_WRITE, ACCEPT_MOVING_WRITE_BUFFER, AUTO_RETRY
constexpr uint64_t kOptionNoTicket = 1u << 14, kOptionNoRenegotiation = 1u << 30;
constexpr int kVerifyNone = 0, kVerifyPeer = 1;
constexpr int kKeyUpdateNotRequested = 0;

using UseSession = int (*)(Connection*, const Digest*, const unsigned char** identity, size_t* size, Session**);
using FindSession = int (*)(Connection*, const unsigned char* identity, size_t size, Session**);

// A loaded libssl with its libcrypto. Stays loaded for the lifetime of the process.
struct Library {
  std::string path, version;

  const Method* (*tls_method)() = nullptr;
  Context* (*context_new)(const Method*) = nullptr;
  void (*context_free)(Context*) = nullptr;
  long (*context_control)(Context*, int command, long number, void* pointer) = nullptr;
  uint64_t (*context_set_options)(Context*, uint64_t) = nullptr;
  int (*context_set_ciphersuites)(Context*, const char*) = nullptr;
  int (*context_set_num_tickets)(Context*, size_t) = nullptr;
  void (*context_set_verify)(Context*, int mode, void* callback) = nullptr;
  void (*context_set_read_buffer)(Context*, size_t) = nullptr;
  void (*context_set_use_session)(Context*, UseSession) = nullptr;
  void (*context_set_find_session)(Context*, FindSession) = nullptr;

  Connection* (*connection_new)(Context*) = nullptr;
  void (*connection_free)(Connection*) = nullptr;
  void (*set_bio)(Connection*, Bio* read, Bio* write) = nullptr;
  void (*set_connect_state)(Connection*) = nullptr;
  void (*set_accept_state)(Connection*) = nullptr;
  int (*set_ex_data)(Connection*, int index, void*) = nullptr;
  void* (*get_ex_data)(const Connection*, int index) = nullptr;
  int (*do_handshake)(Connection*) = nullptr;
  int (*is_init_finished)(const Connection*) = nullptr;
  int (*session_reused)(const Connection*) = nullptr;
  int (*read)(Connection*, void*, size_t, size_t* got) = nullptr;
  int (*write)(Connection*, const void*, size_t, size_t* written) = nullptr;
  int (*has_pending)(const Connection*) = nullptr;
  int (*key_update)(Connection*, int type) = nullptr;
  int (*shutdown)(Connection*) = nullptr;
  int (*get_error)(const Connection*, int result) = nullptr;
  const Cipher* (*find_cipher)(Connection*, const unsigned char* id) = nullptr;

  Session* (*session_new)() = nullptr;
  void (*session_free)(Session*) = nullptr;
  int (*session_set_key)(Session*, const unsigned char*, size_t) = nullptr;
  int (*session_set_cipher)(Session*, const Cipher*) = nullptr;
  int (*session_set_version)(Session*, int) = nullptr;

  int (*bio_index)() = nullptr;
  BioMethod* (*bio_method_new)(int type, const char* name) = nullptr;
  int (*bio_method_set_write)(BioMethod*, int (*)(Bio*, const char*, int)) = nullptr;
  int (*bio_method_set_read)(BioMethod*, int (*)(Bio*, char*, int)) = nullptr;
  int (*bio_method_set_control)(BioMethod*, long (*)(Bio*, int, long, void*)) = nullptr;
  Bio* (*bio_new)(const BioMethod*) = nullptr;
  void (*bio_set_data)(Bio*, void*) = nullptr;
  void* (*bio_get_data)(Bio*) = nullptr;
  void (*bio_set_init)(Bio*, int) = nullptr;
  void (*bio_set_flags)(Bio*, int) = nullptr;
  void (*bio_clear_flags)(Bio*, int) = nullptr;

  unsigned long (*next_error)() = nullptr;
  void (*clear_errors)() = nullptr;
  const char* (*reason)(unsigned long) = nullptr;
};

// Loads `path` (a file, or a name for the loader; empty: libssl.so.3) once a process. A later call gets the library that is loaded,
// whatever it names; after a failure the next call tries again. Throws Error(no_lane): it cannot be loaded, it is not OpenSSL 3, a
// function is missing.
const Library& load(const std::string& path);

// The reason of this thread's oldest error, and clears all of them: they would be taken for those of the next caller.
std::string take_reason(const Library& library);

}  // namespace kvxfer::openssl
