// What `doctor` asks of a UCX library: whether it loads, and what it can do on this host. Loading one stays for the lifetime of
// the process, so this is called only once the operator allowed the lane.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_casters.hpp"
#include "lanes/ucx.hpp"

namespace kvxfer {
namespace {

struct UcxProbe {
  std::string obstacle, version, path;
  std::vector<std::string> transports;
  bool has_rdma = false, has_cuda = false;
};

UcxProbe probe_ucx(const std::string& path, const std::string& tls) {
  UcxProbe probe;
  try {
    const ucp::UcxLibrary& library = ucp::load(path);
    probe.version = library.version;
    probe.path = library.path;
    const UcxContext context({path, tls});
    probe.transports = context.transports();
    probe.has_rdma = context.has_rdma();
    probe.has_cuda = context.has_cuda();
  } catch (const Error& error) {
    if (error.code() != Code::no_lane) throw;
    probe.obstacle = error.what();
  }
  return probe;
}

}  // namespace

void bind_ucx(nb::module_& m) {
  nb::class_<UcxProbe>(m, "UcxProbe", "What a UCX library can do on this host.")
      .def_ro("obstacle", &UcxProbe::obstacle, "Why it cannot be used; empty: it can.")
      .def_ro("version", &UcxProbe::version, "Empty if it could not be loaded.")
      .def_ro("path", &UcxProbe::path, "The path of the loaded library, which is the first that this process asked for.")
      .def_ro("transports", &UcxProbe::transports, "UCX's names of our context's transports.")
      .def_ro("has_rdma", &UcxProbe::has_rdma)
      .def_ro("has_cuda", &UcxProbe::has_cuda, "It recognises device memory.");
  m.def("probe_ucx",
        [](const std::string& path, const std::string& tls) {
          nb::gil_scoped_release release;
          return probe_ucx(path, tls);
        },
        nb::arg("path"), nb::kw_only(), nb::arg("tls") = "",
        "Loads the libucp at `path` into this process, permanently, and queries it. `tls`: as UCX_TLS; empty: a core's default.");
}

}  // namespace kvxfer
