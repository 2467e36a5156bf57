#include "ucx.hpp"

#include <algorithm>
#include <cstdlib>

#include "machines/codes.hpp"

namespace kvxfer {
namespace {

// Keeps the operator's value if the environment has one.
void set_default(const ucp::UcxLibrary& ucx, ucp::Config* config, const char* name, const char* value) {
  if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr) static_cast<void>(ucx.config_modify(config, name, value));
}

bool names_tcp(const std::string& tls) {
  if (tls.empty() || tls[0] == '^') return false;
  for (size_t at = 0; at <= tls.size();) {
    const size_t end = std::min(tls.find(',', at), tls.size());
    if (tls.compare(at, end - at, "tcp") == 0) return true;
    at = end + 1;
  }
  return false;
}

// The transports that UCX found, by the text that UCX prints about its context, because UCP has no query for them. A line about one
// contains " resource " and ends with `name/device`, such as `rc_mlx5/mlx5_0:1`.
std::vector<std::string> list_transports(const ucp::UcxLibrary& ucx, ucp::Context* context) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const stream = ::open_memstream(&text, &size);
  if (stream == nullptr) return {};
  ucx.context_print_info(context, stream);
  std::fclose(stream);
  const std::string info(text, size);
  std::free(text);
  std::vector<std::string> names;
  for (size_t at = 0; at < info.size();) {
    const size_t end = std::min(info.find('\n', at), info.size());
    const std::string line = info.substr(at, end - at);
    at = end + 1;
    const size_t space = line.rfind(' '), slash = line.rfind('/');
    if (line.find(" resource ") == std::string::npos || space == std::string::npos || slash == std::string::npos || slash < space) continue;
    std::string name = line.substr(space + 1, slash - space - 1);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace

UcxContext::UcxContext(const UcxOptions& options) : library_(ucp::load(options.library_path)) {
  const ucp::UcxLibrary& ucx = library_;
  const ucp::Quiet quiet;
  ucp::Config* config = nullptr;
  if (const ucp::Status s = ucx.config_read(nullptr, nullptr, &config); s != ucp::kOk) quiet.fail(ucx, "UCX cannot read its configuration", s);
  const std::unique_ptr<ucp::Config, void (*)(ucp::Config*)> release(config, ucx.config_release);
  const char* const environment = std::getenv("UCX_TLS");
  const std::string tls = !options.tls.empty() ? options.tls : environment != nullptr ? environment : "^tcp";
  if (const ucp::Status s = ucx.config_modify(config, "TLS", tls.c_str()); s != ucp::kOk) quiet.fail(ucx, "UCX rejects the transports " + tls, s);
  if (!names_tcp(tls)) set_default(ucx, config, "PROTO_EMULATION_ENABLE", "n");  // tcp has only emulated gets
  // These three allow an endpoint on one host in peer error mode: see docs/ucx.md.
  set_default(ucx, config, "RNDV_THRESH", "inf");
  set_default(ucx, config, "POSIX_ERROR_HANDLING", "y");
  set_default(ucx, config, "SYSV_ERROR_HANDLING", "y");
  set_default(ucx, config, "MAX_RMA_RAILS", "2");
  set_default(ucx, config, "IB_PCI_RELAXED_ORDERING", "try");
  set_default(ucx, config, "CUDA_IPC_ENABLE_GET_ZCOPY", "on");  // by default only with NVLink: then no read works on one GPU

  ucp::Params params{};
  params.field_mask = ucp::kParamFeatures | ucp::kParamMtWorkersShared | ucp::kParamName;
  params.features = ucp::kFeatureRma | ucp::kFeatureWakeup;
  params.mt_workers_shared = 1;  // other threads register memory beside the worker's thread
  params.name = "kvxfer";
  if (const ucp::Status s = ucx.init_version(1, ucp::kApiMinor, &params, config, &handle_); s != ucp::kOk) {
    quiet.fail(ucx, "UCX finds no transport among " + tls, s);
  }
  transports_ = list_transports(ucx, handle_);
  ucp::ContextAttributes attributes{};
  attributes.field_mask = ucp::kContextMemoryTypes;
  has_cuda_ = ucx.context_query(handle_, &attributes) == ucp::kOk && (attributes.memory_types >> ucp::kCudaMemory & 1) != 0;
}

UcxContext::~UcxContext() {
  if (is_mine()) library_.cleanup(handle_);
}

bool UcxContext::has_rdma() const {
  return std::any_of(transports_.begin(), transports_.end(), [](const std::string& name) {
    return name.rfind("rc_", 0) == 0 || name.rfind("dc_", 0) == 0 || name.rfind("ud_", 0) == 0 || name == "srd" || name == "gga_mlx5";
  });
}

std::shared_ptr<UcxMemory> UcxContext::add_memory(uint8_t* address, uint64_t bytes, bool is_readable, bool is_device) {
  if (address == nullptr || bytes == 0) throw Error(Code::no_lane, "UCX cannot register empty memory");
  const ucp::Quiet quiet;
  ucp::MapParams params{};
  params.field_mask = ucp::kMapAddress | ucp::kMapLength | ucp::kMapProtection;
  params.address = address;
  params.length = bytes;
  params.prot = ucp::kLocalRead | ucp::kLocalWrite | (is_readable ? ucp::kRemoteRead : 0u);
  ucp::Memory* handle = nullptr;
  if (const ucp::Status s = library_.mem_map(handle_, &params, &handle); s != ucp::kOk) {
    quiet.fail(library_, "UCX cannot register " + std::to_string(bytes) + " bytes", s);
  }
  ucp::MemoryAttributes attributes{};
  attributes.field_mask = ucp::kMemoryType;
  const bool is_host = library_.mem_query(handle, &attributes) != ucp::kOk || attributes.memory_type == ucp::kHostMemory;
  std::shared_ptr<UcxMemory> memory(new UcxMemory(shared_from_this(), address, bytes, is_readable, !is_host, handle));
  if (is_device && is_host) throw Error(Code::no_lane, "this UCX does not know device memory: it has no CUDA transport");
  return memory;
}

UcxMemory::~UcxMemory() {
  if (!context_->is_mine()) return;
  const ucp::Quiet quiet;
  static_cast<void>(context_->library().mem_unmap(context_->handle(), handle_));
}

}  // namespace kvxfer
