#include "ucx_api.hpp"

#include <dlfcn.h>
#include <signal.h>

#include <array>
#include <cstdarg>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "machines/codes.hpp"

namespace kvxfer::ucp {

namespace {
thread_local Quiet* quiet = nullptr;
}

struct Log {
  // ucs_log_func_t. Returns 0: handled, 1: on to the next handler.
  static int handle(const char*, unsigned, const char*, int level, const void*, const char* format, va_list arguments) {
    constexpr int kFatal = 0, kError = 1;
    if (quiet == nullptr || level == kFatal) return 1;
    if (level == kError) {
      std::array<char, 512> text;
      va_list copy;
      va_copy(copy, arguments);
      if (std::vsnprintf(text.data(), text.size(), format, copy) > 0) quiet->said_ = text.data();
      va_end(copy);
    }
    static const bool is_wanted = std::getenv("UCX_LOG_LEVEL") != nullptr || std::getenv("UCX_LOG_FILE") != nullptr;
    return is_wanted ? 1 : 0;
  }
};

Quiet::Quiet() : outer_(quiet) { quiet = this; }
Quiet::~Quiet() { quiet = outer_; }

void Quiet::fail(const UcxLibrary& ucx, const std::string& what, Status status) const {
  throw Error(Code::no_lane, what + ": " + ucx.status_string(status) + (said_.empty() ? "" : " (" + said_ + ")"));
}

namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(Code::no_lane, text); }

template <class Function>
void find(void* library, const char* name, Function& to) {
  to = reinterpret_cast<Function>(::dlsym(library, name));  // looks into its dependencies too
  if (to == nullptr) refuse(std::string("the UCX library has no ") + name);
}

// UCX installs its debugger's handler for SIGHUP when it is loaded, and for more signals if configured; those signals belong to the
// process.
class SignalsKept {
 public:
  SignalsKept() {
    for (size_t i = 0; i < before_.size(); ++i) ::sigaction(static_cast<int>(i) + 1, nullptr, &before_[i]);
  }
  ~SignalsKept() {
    for (size_t i = 0; i < before_.size(); ++i) {
      struct sigaction now {};
      if (::sigaction(static_cast<int>(i) + 1, nullptr, &now) == 0 && now.sa_handler != before_[i].sa_handler) {
        ::sigaction(static_cast<int>(i) + 1, &before_[i], nullptr);
      }
    }
  }

 private:
  std::array<struct sigaction, 31> before_{};
};

// UCX reads its global settings while it is loaded, from the environment or a file of the operator's. A value in the environment
// stays. Threads that read the environment at that moment take the usual risk of a setenv().
class SettingForLoad {
 public:
  SettingForLoad(const char* name, const char* value) : name_(std::getenv(name) == nullptr ? name : nullptr) {
    if (name_ != nullptr) ::setenv(name_, value, 1);
  }
  SettingForLoad(const SettingForLoad&) = delete;
  SettingForLoad& operator=(const SettingForLoad&) = delete;
  ~SettingForLoad() {
    if (name_ != nullptr) ::unsetenv(name_);
  }

 private:
  const char* const name_;
};

// Otherwise UCX would patch the process's mmap, munmap and the like, while other threads run them, to learn when memory goes that
// it has registered by itself. All memory that we name is registered with it, and deregistered before it goes.
void* open_without_memory_events(const std::string& path) {
  if (void* const there = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return there;  // another user of this process has loaded it
  const SettingForLoad setting("UCX_MEM_EVENTS", "n");
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::unique_ptr<UcxLibrary> open(const std::string& path) {
  const SignalsKept signals;
  void* const handle = open_without_memory_events(path);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    refuse("cannot load UCX: " + std::string(why == nullptr ? path : why));
  }
  auto library = std::make_unique<UcxLibrary>();
  library->path = path;
  void (*get_version)(unsigned*, unsigned*, unsigned*) = nullptr;
  find(handle, "ucp_get_version", get_version);
  unsigned release = 0;
  get_version(&library->major, &library->minor, &release);
  library->version = std::to_string(library->major) + "." + std::to_string(library->minor) + "." + std::to_string(release);
  if (library->major != 1 || library->minor < kApiMinor) refuse("UCX " + library->version + " is not 1." + std::to_string(kApiMinor) + " or a later 1.x");

  UcxLibrary& l = *library;
  find(handle, "ucs_status_string", l.status_string);
  find(handle, "ucp_config_read", l.config_read);
  find(handle, "ucp_config_release", l.config_release);
  find(handle, "ucp_config_modify", l.config_modify);
  find(handle, "ucp_init_version", l.init_version);
  find(handle, "ucp_cleanup", l.cleanup);
  find(handle, "ucp_context_query", l.context_query);
  find(handle, "ucp_context_print_info", l.context_print_info);
  find(handle, "ucp_worker_create", l.worker_create);
  find(handle, "ucp_worker_destroy", l.worker_destroy);
  find(handle, "ucp_worker_query", l.worker_query);
  find(handle, "ucp_worker_release_address", l.worker_release_address);
  find(handle, "ucp_worker_progress", l.worker_progress);
  find(handle, "ucp_worker_get_efd", l.worker_get_efd);
  find(handle, "ucp_worker_arm", l.worker_arm);
  find(handle, "ucp_worker_flush_nbx", l.worker_flush_nbx);
  find(handle, "ucp_ep_create", l.ep_create);
  find(handle, "ucp_ep_close_nbx", l.ep_close_nbx);
  find(handle, "ucp_ep_flush_nbx", l.ep_flush_nbx);
  find(handle, "ucp_ep_print_info", l.ep_print_info);
  find(handle, "ucp_ep_rkey_unpack", l.ep_rkey_unpack);
  find(handle, "ucp_rkey_destroy", l.rkey_destroy);
  find(handle, "ucp_mem_map", l.mem_map);
  find(handle, "ucp_mem_unmap", l.mem_unmap);
  find(handle, "ucp_mem_query", l.mem_query);
  find(handle, "ucp_rkey_pack", l.rkey_pack);
  find(handle, "ucp_rkey_buffer_release", l.rkey_buffer_release);
  find(handle, "ucp_get_nbx", l.get_nbx);
  find(handle, "ucp_request_check_status", l.request_check_status);
  find(handle, "ucp_request_free", l.request_free);
  if (void* push = ::dlsym(handle, "ucs_log_push_handler")) reinterpret_cast<void (*)(decltype(&Log::handle))>(push)(&Log::handle);
  return library;
}

}  // namespace

const UcxLibrary& load(const std::string& path) {
  static std::mutex mutex;
  static const UcxLibrary* loaded = nullptr;  // never freed: its users may outlive this file's objects
  std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = open(path).release();
  return *loaded;
}

}  // namespace kvxfer::ucp
