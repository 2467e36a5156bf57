// What the lanes tell Python beside the core: checksums, and what stands in the way of a lane on this host.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_casters.hpp"
#include "lanes/cma.hpp"
#include "lanes/crc32c.hpp"
#include "lanes/openssl_api.hpp"

namespace kvxfer {
namespace {

// The bytes of any contiguous buffer, held for as long as they are looked at.
class HeldBuffer {
 public:
  explicit HeldBuffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  ~HeldBuffer() { PyBuffer_Release(&view_); }
  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

uint32_t run(uint32_t (*method)(const void*, size_t, uint32_t, const void*), nb::handle buffer, uint32_t value) {
  const HeldBuffer held(buffer);
  nb::gil_scoped_release release;
  return method(held.data(), held.size(), value, nullptr);
}

}  // namespace

void bind_lanes(nb::module_& m) {
  m.def("crc32c", [](nb::handle buffer, uint32_t value) { return run(crc32c, buffer, value); }, nb::arg("buffer"), nb::arg("value") = 0,
        "CRC-32C (Castagnoli, RFC 3720) of a contiguous buffer, continuing from `value`, the checksum of the bytes before it.");
  m.def("crc32c_methods",
        [] {
          std::vector<std::string> names;
          for (const Crc32cMethod& method : crc32c_methods()) names.emplace_back(method.name);
          return names;
        },
        "The CRC32C methods of this CPU, the one in use first, `portable` last.");
  m.def("crc32c_by",
        [](const std::string& name, nb::handle buffer, uint32_t value) {
          for (const Crc32cMethod& method : crc32c_methods()) {
            if (method.name == name) return run(method.run, buffer, value);
          }
          throw Error(Code::invalid_argument, "unknown CRC32C method '" + name + "'");
        },
        nb::arg("name"), nb::arg("buffer"), nb::arg("value") = 0, "crc32c() by one of crc32c_methods(), to compare them.");
  m.def("cma_obstacle",
        [](int pid) {
          nb::gil_scoped_release release;
          return cma_obstacle(pid);
        },
        nb::arg("pid") = 0,
        "Why this process can read no other process of its user by the `cma` lane, or not be read, and what to do about it; empty: it can.\n"
        "With a process id: why it cannot read that process.");
  m.def("openssl_version", [](const std::string& path) { return openssl::load(path).version; }, nb::arg("path") = "",
        "Loads OpenSSL 3 into this process, permanently, and returns its version. `path`: libssl; empty: as the loader finds it. A later call gets\n"
        "the library that is loaded. Raises LaneUnavailableError if it cannot be used.");
  m.def("cma_missing_calls", &cma_missing_calls,
        "Why this process cannot make the system calls of the `cma` lane (process_vm_readv, pidfd_open); empty: it can.");
}

}  // namespace kvxfer
