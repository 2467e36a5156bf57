// The real CUDA driver, with its copies counted and, if so told, without its batches: what is asked for by name is found here
// first, all else in the libcuda.so.1 that this is linked with.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>

namespace {

using Copy = int (*)(unsigned long long, unsigned long long, size_t, void*);
using Batch = int (*)(unsigned long long*, unsigned long long*, size_t*, size_t, void*, size_t*, size_t, size_t*, void*);

constexpr int kNotSupported = 801;
std::atomic<long> batches{0}, copies{0}, failures{0};

template <class Function>
Function real(const char* name) {
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function>(::dlsym(library, name));
}

int counted(int result) {
  if (result != 0) ++failures;
  return result;
}

}  // namespace

extern "C" {

long counted_batches() { return batches; }
long counted_copies() { return copies; }
long counted_failures() { return failures; }

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  ++copies;
  return counted(real<Copy>("cuMemcpyAsync")(to, from, bytes, stream));
}

int cuMemcpyBatchAsync(unsigned long long* to, unsigned long long* from, size_t* sizes, size_t count, void* attributes, size_t* indices,
                       size_t attribute_count, size_t* failed, void* stream) {
  static const bool is_refused = std::getenv("COUNTING_CUDA_HAS_NO_BATCH") != nullptr;
  const auto batch = real<Batch>("cuMemcpyBatchAsync");
  if (is_refused || batch == nullptr) return kNotSupported;
  ++batches;
  return counted(batch(to, from, sizes, count, attributes, indices, attribute_count, failed, stream));
}
}
