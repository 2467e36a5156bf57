// The core as Python sees it. Every call that may wait, or takes long, lets go of the GIL first; the owners of foreign memory are
// kept here, because nothing below may touch a Python object.
#include <nanobind/ndarray.h>

#include "bind_casters.hpp"
#include "io/core.hpp"

namespace kvxfer {
namespace {

using BlockArray = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Longer lists are looked at without the GIL.
constexpr size_t kSmallList = 256;

IdList to_ids(const BlockArray& array) {
  const auto copy = [&] { return std::make_shared<const std::vector<uint32_t>>(array.data(), array.data() + array.size()); };
  if (array.size() <= kSmallList) return copy();
  nb::gil_scoped_release release;
  return copy();
}

std::vector<uint32_t> to_blocks(const BlockArray& array) { return {array.data(), array.data() + array.size()}; }

template <class F>
auto without_gil(F&& call) {
  nb::gil_scoped_release release;
  return call();
}

class PyCore {
 public:
  PyCore(AgentRef self, EndpointLimits limits, CoreOptions options) : core_(std::move(self), limits, std::move(options)) {}
  ~PyCore() { close(); }

  Core& core() { return core_; }

  template <class F>
  auto act(F&& call) {
    return without_gil([&] { return core_.shared().act(std::forward<F>(call)); });
  }

  // What is asked of a peer: a post or a pull of so many elements, a notification. Where callers run the event loop, this call may
  // copy and send, and does it without the GIL. Otherwise a small one only enters the endpoint, which takes microseconds, and
  // keeps the GIL: to get it back from a thread that computes in Python can take 5 ms.
  template <class F>
  auto ask(size_t elements, F&& call) {
    return core_.is_run_by_callers() || elements > kSmallList ? without_gil(std::forward<F>(call)) : call();
  }

  void add_foreign_pool(const PoolInfo& info, uint64_t address, uint64_t bytes, nb::object owner, const std::vector<SegmentTuple>& segments,
                        int device) {
    without_gil([&] { core_.add_pool(info, reinterpret_cast<uint8_t*>(address), bytes, to_segments(segments), device); });
    owners_[info.id] = std::move(owner);
  }
  void set_digest(uint32_t pool, const Bytes32& digest) {
    without_gil([&] { core_.shared().set_digest(pool, digest); });
  }
  void remove_pool(uint32_t pool) {
    without_gil([&] { core_.shared().remove_pool(pool); });
    owners_.erase(pool);
  }
  void add_foreign_region(const RegionInfo& info, uint64_t address, uint64_t bytes, nb::object owner, int device) {
    if (info.bytes > bytes) throw Error(Code::invalid_argument, "a registered region is longer than its memory");
    without_gil([&] { core_.add_region(info, nullptr, reinterpret_cast<uint8_t*>(address), device); });
    region_owners_[info.id] = std::move(owner);
  }
  void remove_region(uint32_t region) {
    without_gil([&] { core_.shared().remove_region(region); });
    const auto found = region_owners_.find(region);
    if (found == region_owners_.end()) return;
    const nb::object owner = std::move(found->second);  // its end may run anything, which finds it gone
    region_owners_.erase(found);
  }
  void close() {
    without_gil([&] { core_.close(); });
    const std::map<uint32_t, nb::object> owners = std::exchange(owners_, {});  // whatever their end runs finds them gone
    const std::map<uint32_t, nb::object> region_owners = std::exchange(region_owners_, {});
    if (!core_.shared().keeps_memory()) return;
    new auto(owners);  // for ever: something may still write there
    new auto(region_owners);
  }

 private:
  Core core_;
  std::map<uint32_t, nb::object> owners_, region_owners_;
};

// Some elements of ranges, in order, as they are posted again and again: copied out of Python's arrays once.
struct PyElements {
  ElementList list;
};

void bind_elements(nb::module_& m) {
  nb::class_<PyElements>(m, "Elements", "A list of elements of registered memory: elements `ids` (uint32, shape [n]) of `ranges`, in this order.")
      .def("__init__",
           [](PyElements* self, const PyRanges& ranges, const BlockArray& ids) { new (self) PyElements{ElementList{ranges.ranges, to_ids(ids)}}; },
           nb::arg("ranges"), nb::arg("ids"))
      .def_prop_ro("ranges", [](const PyElements& self) { return PyRanges{self.list.ranges}; })
      .def_prop_ro("ids", [](const PyElements& self) {
        auto* kept = new IdList(self.list.ids);
        const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<IdList*>(p); });
        return nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>((*kept)->data(), {(*kept)->size()}, owner);
      }, nb::rv_policy::automatic, "uint32, shape [n], read-only.");
}

// A share of a region that can be dropped without the GIL, which nanobind's own shared pointers cannot.
struct PyRegion {
  std::shared_ptr<Region> region;
};

int region_buffer(PyObject* object, Py_buffer* view, int flags) {
  const Region& region = *nb::inst_ptr<PyRegion>(nb::handle(object))->region;
  return PyBuffer_FillInfo(view, object, region.address(), static_cast<Py_ssize_t>(region.bytes()), 0, flags);
}

PyType_Slot region_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(region_buffer)}, {0, nullptr}};

void bind_events(nb::module_& m) {
  nb::class_<SessionRefused>(m, "SessionRefused", "A session that never came up, and why; `peer` is None if the dialer was not yet known.")
      .def_ro("peer", &SessionRefused::peer).def_ro("kind", &SessionRefused::kind).def_ro("code", &SessionRefused::code)
      .def_ro("text", &SessionRefused::text);
  nb::class_<CoreFailed>(m, "CoreFailed", "The IO thread ended with an internal error: nothing is read or written any more, every call raises.")
      .def_ro("text", &CoreFailed::text);
}


struct CoreStatistics {
  uint64_t bytes_mapped, bytes_cma, bytes_ucx, bytes_streamed_in, bytes_streamed_out, bytes_spliced_out, bytes_discarded;
  uint64_t runs_mapped, runs_cma, calls_cma, gets_ucx, gets_ucx_most, runs_streamed_out, calls_streamed_out;
  uint64_t frames_in, frames_out, wakeups;
  uint64_t connections, sessions_tcp, sessions_unix, sessions_refused, sessions_ended, dials, dials_failed;
  uint64_t mappings, mappings_refused, checksum_failures;
  uint64_t sessions_tls, tls_failures, tls_key_updates;
};

void bind_statistics(nb::module_& m) {
  using S = CoreStatistics;
  nb::class_<S>(m, "CoreStatistics", "Counters of a core; `connections` and `sessions_*` (except refused) are current values, the others only grow.")
      .def_ro("bytes_mapped", &S::bytes_mapped, "Copied out of peers' mapped pools.")
      .def_ro("bytes_cma", &S::bytes_cma, "Copied out of peers' memory by the kernel.")
      .def_ro("bytes_ucx", &S::bytes_ucx)
      .def_ro("bytes_streamed_in", &S::bytes_streamed_in, "Over TCP and Unix sockets, into blocks and elements.")
      .def_ro("bytes_streamed_out", &S::bytes_streamed_out)
      .def_ro("bytes_spliced_out", &S::bytes_spliced_out, "Those sent zero-copy to peers under this kernel.")
      .def_ro("bytes_discarded", &S::bytes_discarded, "Payload for reads that had ended.")
      .def_ro("runs_mapped", &S::runs_mapped, "Contiguous runs of memory that were copied; `runs_cma` the same.")
      .def_ro("runs_cma", &S::runs_cma)
      .def_ro("calls_cma", &S::calls_cma, "Of process_vm_readv.")
      .def_ro("gets_ucx", &S::gets_ucx)
      .def_ro("gets_ucx_most", &S::gets_ucx_most, "The most gets of one read that were in flight at once.")
      .def_ro("runs_streamed_out", &S::runs_streamed_out, "Runs of blocks that were offered to the kernel, counted again if it did not take all.")
      .def_ro("calls_streamed_out", &S::calls_streamed_out, "System calls that offered them.")
      .def_ro("frames_in", &S::frames_in)
      .def_ro("frames_out", &S::frames_out)
      .def_ro("wakeups", &S::wakeups, "Times that the event loop polled its sockets, or slept on them.")
      .def_ro("connections", &S::connections)
      .def_ro("sessions_tcp", &S::sessions_tcp)
      .def_ro("sessions_unix", &S::sessions_unix)
      .def_ro("sessions_refused", &S::sessions_refused)
      .def_ro("sessions_ended", &S::sessions_ended, "Sessions that were up, and ended because one side sent a malformed frame or too many refused requests.")
      .def_ro("dials", &S::dials)
      .def_ro("dials_failed", &S::dials_failed)
      .def_ro("mappings", &S::mappings, "Pools and regions of peers that this agent may read by a one-sided lane.")
      .def_ro("mappings_refused", &S::mappings_refused)
      .def_ro("checksum_failures", &S::checksum_failures, "Reads thrown away because their bytes did not match the source's checksums.")
      .def_ro("sessions_tls", &S::sessions_tls, "Those of `sessions_tcp` that are encrypted.")
      .def_ro("tls_failures", &S::tls_failures, "Encrypted sessions that were up, and ended because a record was not the peer's.")
      .def_ro("tls_key_updates", &S::tls_key_updates, "Times that this agent changed the key that it sends by.");
}

CoreStatistics snapshot(PyCore& self) {
  const Statistics& s = self.core().statistics();
  return {s.bytes_mapped.get(),      s.bytes_cma.get(),   s.bytes_ucx.get(),     s.bytes_streamed_in.get(), s.bytes_streamed_out.get(),
          s.bytes_spliced_out.get(), s.bytes_discarded.get(),   s.runs_mapped.get(),
          s.runs_cma.get(),          s.calls_cma.get(),   s.gets_ucx.get(),      s.gets_ucx_most.get(),     s.runs_streamed_out.get(),
          s.calls_streamed_out.get(), s.frames_in.get(),   s.frames_out.get(),    s.wakeups.get(),
          s.connections.get(),       s.sessions_tcp.get(),      s.sessions_unix.get(), s.sessions_refused.get(), s.sessions_ended.get(), s.dials.get(),         s.dials_failed.get(),
          s.mappings.get(),          s.mappings_refused.get(), s.checksum_failures.get(),
          s.sessions_tls.get(),      s.tls_failures.get(), s.tls_key_updates.get()};
}

HugePages to_huge_pages(const std::string& word) {
  if (word == "auto") return HugePages::Auto;
  if (word == "never") return HugePages::Never;
  if (word == "require") return HugePages::Require;
  throw Error(Code::invalid_argument, "huge is \"auto\", \"never\" or \"require\", not \"" + word + "\"");
}

void bind_region(nb::module_& m) {
  nb::class_<PyRegion>(m, "Region", nb::type_slots(region_slots),
                     "Shared memory made by kvxfer: a sealed memfd, page aligned, zeroed. It stays mapped while this object, a view of its buffer or a\n"
                     "pool over it exists. `numpy.frombuffer(region, dtype=numpy.uint8)` is a writable view.")
      .def("__init__",
           [](PyRegion* self, uint64_t nbytes, bool populate, const std::string& huge) {
             new (self) PyRegion{without_gil([&] { return std::make_shared<Region>(nbytes, populate, to_huge_pages(huge)); })};
           },
           nb::arg("nbytes"), nb::kw_only(), nb::arg("populate") = true, nb::arg("huge") = "auto",
           "`populate` makes every page resident now, so that a lack of memory shows here. `huge` pages: \"auto\" (if the host has them),\n"
           "\"never\", \"require\" (raises LimitExceededError if it has none). Raises LaneUnavailableError if the host gives processes no sealed\n"
           "shared memory: memfd_create is forbidden, or the kernel is too old.")
      .def_prop_ro("page_bytes", [](const PyRegion& r) { return r.region->page_bytes(); }, "The size of most of its pages.")
      .def_prop_ro("address", [](const PyRegion& r) { return reinterpret_cast<uintptr_t>(r.region->address()); })
      .def_prop_ro("nbytes", [](const PyRegion& r) { return r.region->bytes(); })
      .def("fileno", [](const PyRegion& r) { return r.region->fd(); }, "The memfd, which the region owns: another process can map it.");
}

ProgressMode to_progress(const std::string& word) {
  if (word == "thread") return ProgressMode::Thread;
  if (word == "caller") return ProgressMode::Caller;
  throw Error(Code::invalid_argument, "progress is \"thread\" or \"caller\", not \"" + word + "\"");
}

EncryptionMode to_encryption(const std::string& word) {
  if (word == "auto") return EncryptionMode::BetweenHosts;
  if (word == "never") return EncryptionMode::Never;
  if (word == "always") return EncryptionMode::Always;
  throw Error(Code::invalid_argument, "encrypt is \"auto\", \"always\" or \"never\", not \"" + word + "\"");
}

// From now, at most an hour.
Nanos in_time(uint64_t timeout_ns) { return monotonic_now() + static_cast<Nanos>(std::min<uint64_t>(timeout_ns, 3'600'000'000'000)); }

// What many posts have in common; the core outlives it.
struct PyPreparedPost {
  PyCore& core;
  void (Core::*method)(PostSpec);
  PostSpec common;

  void start(const TransferId& id, Nanos timeout_ns, const std::optional<nb::bytes>& notification, bool wants_checksums) const {
    PostSpec spec = common;
    spec.id = id;
    spec.deadline = monotonic_now() + std::min(timeout_ns, kNever / 2);
    spec.wants_checksums = wants_checksums;
    if (notification) spec.notification = std::string(view(*notification));
    core.ask(common.local.count(), [&] { (core.core().*method)(std::move(spec)); });
  }
};

template <auto Method>
PyPreparedPost prepare(PyCore& self, const AgentRef& peer, const PyElements& local, const PyElements& remote, std::vector<Lane> lanes) {
  PyPreparedPost prepared{self, Method, {}};
  prepared.common.peer = peer;
  prepared.common.local = local.list;
  prepared.common.remote = remote.list;
  prepared.common.lanes = std::move(lanes);
  return prepared;
}

void bind_prepared_post(nb::module_& m) {
  nb::class_<PyPreparedPost>(m, "PreparedPost", "A read or write of a peer's elements that can be started again and again, by any thread: see Core.")
      .def("start", &PyPreparedPost::start, nb::arg("id"), nb::arg("timeout_ns"), nb::arg("notification") = nb::none(), nb::arg("wants_checksums") = false,
           "Start one transfer `id` (16 bytes never used before). It ends in TransferFinal and TransferDrained, after `timeout_ns` at the\n"
           "latest. `notification` goes to the peer once it is committed; `wants_checksums`: its bytes go with CRC-32Cs. Raises\n"
           "InvalidArgumentError, PeerGoneError, LimitExceededError, LaneUnavailableError.");
}

void bind_core_class(nb::module_& m) {
  nb::class_<PyCore>(m, "Core",
                     "One agent's sockets, mappings and machines, on one native thread that needs no GIL. Every method is thread-safe. Times are\n"
                     "nanoseconds of CLOCK_MONOTONIC (`time.monotonic_ns()`). Events come through `fileno()` and `drain()`.")
      .def("__init__",
           [](PyCore* self, AgentRef agent, EndpointLimits limits, std::string bind_host, uint16_t bind_port, std::string unix_path,
              std::string ucx_library, std::string ucx_tls, unsigned copy_threads, const std::string& progress,
              const std::string& encrypt, std::string openssl_library, bool tolerates_plain, uint64_t records_per_key) {
             CoreOptions options{std::move(bind_host), bind_port, std::move(unix_path), {std::move(ucx_library), std::move(ucx_tls)}, copy_threads, to_progress(progress),
                                 {to_encryption(encrypt), std::move(openssl_library), tolerates_plain, records_per_key}};
             without_gil([&] { new (self) PyCore(std::move(agent), limits, std::move(options)); });
           },
           nb::arg("agent"), nb::arg("limits"), nb::kw_only(), nb::arg("bind_host"), nb::arg("bind_port"), nb::arg("unix_path"),
           nb::arg("ucx_library") = "", nb::arg("ucx_tls") = "", nb::arg("copy_threads") = 0,
           nb::arg("progress") = "thread", nb::arg("encrypt") = "auto", nb::arg("openssl_library") = "", nb::arg("tolerates_plain") = false,
           nb::arg("records_per_key") = EncryptionOptions{}.records_per_key,
           "`bind_host` is a numeric address. `unix_path` empty: no Unix socket, so no peer can map our pools; its directory must be private (0700).\n"
           "`ucx_library`: path of libucp, loaded here; empty: no `ucx` lane. `ucx_tls`: its transports; empty: all but tcp. `copy_threads`: of\n"
           "`mapped` and `cma`, 0: as many as processors are idle. `progress`: which threads run the event loop: \"thread\", the core's own and\n"
           "one that waits; \"caller\", also one that posts or drains. `encrypt`: TCP sessions by TLS: \"auto\", those with other hosts; \"always\";\n"
           "\"never\". `openssl_library`: libssl of OpenSSL 3, loaded for the first such session; empty: as the loader finds it. `tolerates_plain`: \"auto\"\n"
           "is \"never\" where it cannot be loaded. `records_per_key`: a key encrypts at most so many records of 16 KiB.")
      .def("start", [](PyCore& self) { without_gil([&] { self.core().start(); }); }, "Listen and start the thread. Raises TransportError if a socket cannot be bound.")
      .def("close", &PyCore::close, "Drop every session and join the thread. Idempotent; afterwards only `drain` and reading methods may be called.")
      .def_prop_ro("agent", [](PyCore& self) { return self.core().shared().look([](const Endpoint& e) { return e.self(); }); })
      .def_prop_ro("tcp_port", [](PyCore& self) { return self.core().tcp_port(); }, "The port that the core listens on; 0 before start.")
      .def_prop_ro("unix_path", [](PyCore& self) { return self.core().unix_path(); })
      .def_prop_ro("ucx_obstacle", [](PyCore& self) { return self.core().ucx_obstacle(); }, "Why the `ucx` lane is off; empty: it is on.")
      .def("fileno", [](PyCore& self) { return self.core().shared().event_fd(); },
           "An eventfd, readable while `drain` has events. Valid as long as the object.")
      .def("drain",
           [](PyCore& self) -> std::vector<OwnerEvent> {
             self.core().shared().check_process();
             const bool runs_loop = self.core().is_run_by_callers() && !self.core().shared().has_events();
             return runs_loop ? without_gil([&] { return self.core().drain(); }) : self.core().drain();
           },
           "The events since the last call, in order; of a transfer's progress only the newest. Never blocks. With progress \"caller\", if there\n"
           "are none, the calling thread polls the sockets first.")
      .def("wait",
           [](PyCore& self, uint64_t timeout_ns) {
             self.core().shared().check_process();
             return without_gil([&] { return self.core().wait(in_time(timeout_ns)); });
           },
           nb::arg("timeout_ns"),
           "Wait up to `timeout_ns` until `drain` has events other than progress; returns whether it has any. A signal may end it early. The\n"
           "calling thread runs the event loop meanwhile, unless another one does, and the core's own thread is not woken by sockets.")
      .def("add_pool",
           [](PyCore& self, const PoolInfo& info, const PyRegion& region, const std::vector<SegmentTuple>& segments) {
             without_gil([&] { self.core().add_pool(info, region.region, to_segments(segments)); });
           },
           nb::arg("info"), nb::arg("region"), nb::arg("segments"),
           "Blocks in memory made by kvxfer. A segment is (offset, stride, length): block b has `length` bytes at `offset + b * stride`; the\n"
           "lengths add up to `block_bytes`. Raises InvalidArgumentError if a block would leave the region.")
      .def("add_foreign_pool", &PyCore::add_foreign_pool, nb::arg("info"), nb::arg("address"), nb::arg("nbytes"), nb::arg("owner").none(), nb::arg("segments"),
           nb::arg("device") = -1,
           "Blocks in foreign memory; `owner` is kept alive until the pool is removed or the core closed. Never shareable. `device`: the\n"
           "CUDA device that has it; -1: host memory. Raises LaneUnavailableError if that device cannot be used.")
      .def("set_digest", &PyCore::set_digest, nb::arg("pool"), nb::arg("digest"),
           "Change the digest (32 bytes) of a pool's record: later pulls from it, and by it, are judged by this one.")
      .def("remove_pool", &PyCore::remove_pool, nb::arg("pool"),
           "Raises BlocksBusyError while a block is granted, reserved or quarantined. When it returns, the core no longer uses the memory.")
      .def("add_region",
           [](PyCore& self, const RegionInfo& info, const PyRegion& region) {
             without_gil([&] { self.core().add_region(info, region.region, nullptr); });
           },
           nb::arg("info"), nb::arg("region"),
           "Register memory made by kvxfer: from now on any proven peer may read and write it as `info` says. Raises InvalidArgumentError if\n"
           "the id is or was taken, or the region is shorter than `info.bytes`.")
      .def("add_foreign_region", &PyCore::add_foreign_region, nb::arg("info"), nb::arg("address"), nb::arg("nbytes"), nb::arg("owner").none(),
           nb::arg("device") = -1,
           "Register foreign memory; `owner` is kept alive until the region is removed or the core closed. Never shareable. `device`: as\n"
           "of `add_foreign_pool`.")
      .def("remove_region", &PyCore::remove_region, nb::arg("id"),
           "Ends every peer's read and write of it. Raises BlocksBusyError while an own fetch may still write there. When it returns, the core\n"
           "no longer uses the memory.")
      .def("prepare_fetch", prepare<&Core::fetch>, nb::keep_alive<0, 1>(), nb::arg("peer"), nb::arg("local"), nb::arg("remote"), nb::arg("lanes"),
           "Reads the peer's elements `remote` into own elements `local`, one for one, of equal lengths; the start checks all of it.\n"
           "`lanes`: allowed, best first.")
      .def("prepare_push", prepare<&Core::push>, nb::keep_alive<0, 1>(), nb::arg("peer"), nb::arg("local"), nb::arg("remote"), nb::arg("lanes"),
           "Has the peer read own elements `local` into its `remote`; otherwise as `prepare_fetch`. Own elements must stay unchanged until\n"
           "TransferFinal, and their memory until TransferDrained.")
      .def("admit",
           [](PyCore& self, const PeerAdmission& admission) { self.act([&](Endpoint& e, Nanos, Effects&) { e.admit(admission); }); }, nb::arg("admission"),
           "From now on an unregistered agent may open a session if it proves what `admission` says. It stays known while one of its sessions is\n"
           "up, and a little longer while its reads or writes are in progress, unless `set_peer` registers it. Raises InvalidArgumentError if\n"
           "an admission of another kind was set before.")
      .def("is_connected",
           [](PyCore& self, const AgentRef& peer) { return self.act([&](Endpoint& e, Nanos, Effects&) { return e.is_connected(peer); }); }, nb::arg("peer"),
           "Whether a session with exactly this incarnation is up.")
      .def("set_peer",
           [](PyCore& self, const AgentRef& peer, const Bytes32& key, std::string tcp_host, uint16_t tcp_port, std::string unix_path) {
             without_gil([&] { self.core().shared().set_peer(peer, key, {std::move(tcp_host), tcp_port, std::move(unix_path)}); });
           },
           nb::arg("peer"), nb::arg("key"), nb::kw_only(), nb::arg("tcp_host"), nb::arg("tcp_port"), nb::arg("unix_path"),
           "The address and the key (32 bytes) of one incarnation of an agent. `tcp_host` is a numeric address; `unix_path` is empty if the peer is\n"
           "on another host. A later call replaces them.")
      .def("peer_dead", [](PyCore& self, const AgentRef& peer) { without_gil([&] { self.core().shared().peer_dead(peer); }); }, nb::arg("peer"))
      .def("grant",
           [](PyCore& self, const TransferId& id, uint32_t pool, const BlockArray& blocks, const std::string& reader, Nanos ttl_ns, uint32_t ready_blocks,
              const Bytes32& content_digest) {
             std::vector<uint32_t> list = to_blocks(blocks);
             without_gil([&] { self.core().grant(id, pool, std::move(list), reader, ttl_ns, ready_blocks, content_digest); });
           },
           nb::arg("id"), nb::arg("pool"), nb::arg("blocks"), nb::kw_only(), nb::arg("reader"), nb::arg("ttl_ns"), nb::arg("ready_blocks") = 0,
           nb::arg("content_digest") = Bytes32{},
           "`reader` is an agent id, or empty: the first authenticated reader that presents `id`. `content_digest`: 32 bytes over the content\n"
           "of the blocks; a reader with another digest is refused. Zero: not given.")
      .def("expect",
           [](PyCore& self, const TransferId& id, const std::string& reader) { self.act([&](Endpoint& e, Nanos, Effects&) { e.expect(id, reader); }); },
           nb::arg("id"), nb::kw_only(), nb::arg("reader"),
           "The engine here accepted the prompt of `id`: early pulls of it get QUEUED. `reader` as of `grant`. Ends by `grant` or `abort_grant`.")
      .def("pulse",
           [](PyCore& self, bool has_work, bool took_in) { self.act([&](Endpoint& e, Nanos now, Effects&) { e.pulse(has_work, took_in, now); }); },
           nb::arg("has_work"), nb::arg("took_in"),
           "A heartbeat of the engine here, which is about to step, or has nothing to do. `took_in`: it has taken in all requests that had reached\n"
           "it by its last such pulse.")
      .def("has_begun",
           [](PyCore& self, const TransferId& id) {
             return without_gil([&] { return self.core().shared().look([&](const Endpoint& e) { return e.has_begun(id); }); });
           },
           nb::arg("id"), "Whether the reader of the grant `id` has asked for blocks of it.")
      .def("abort_grant", [](PyCore& self, const TransferId& id) { self.act([&](Endpoint& e, Nanos, Effects& out) { e.abort_grant(id, out); }); }, nb::arg("id"),
           "The grant `id` will never be made here: readers that wait for it get grant_revoked.")
      .def("ready",
           [](PyCore& self, const TransferId& id, uint32_t blocks, uint32_t layers, bool complete) {
             without_gil([&] { self.core().ready(id, blocks, layers, complete); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::kw_only(), nb::arg("layers") = 0, nb::arg("complete") = false,
           "The first `blocks` blocks are written and stay unchanged. If their pool has checksums, computes those of the new ones.")
      .def("end_grant",
           [](PyCore& self, const TransferId& id, GrantEvent event, const std::string& why) {
             return without_gil([&] { return self.core().shared().end_grant(id, event, why); });
           },
           nb::arg("id"), nb::arg("event"), nb::arg("why") = "",
           "`event` is REVOKE or RELEASE. When it returns, the grant's blocks may be overwritten. The reader gets `why`.")
      .def("bind_grant",
           [](PyCore& self, const TransferId& id, const std::string& reader) {
             return self.act([&](Endpoint& e, Nanos now, Effects&) { return e.bind_grant(id, reader, now); });
           },
           nb::arg("id"), nb::arg("reader"),
           "Let only the agent `reader` read it from now on (empty: leave it open), unless another was named, or came first. Returns the\n"
           "only agent that may read it; empty: none yet, or never.")
      .def("grant_state",
           [](PyCore& self, const TransferId& id) {
             return without_gil([&] { return self.core().shared().look([&](const Endpoint& e) { return e.grant_state(id, monotonic_now()); }); });
           },
           nb::arg("id"))
      .def("pull",
           [](PyCore& self, const TransferId& id, const AgentRef& source, uint32_t pool, const BlockArray& blocks, uint32_t first, std::vector<Lane> lanes,
              Nanos deadline_ns, const Bytes32& content_digest, bool wants_checksums, uint32_t count, Nanos granted_ns, bool tells_granted) {
             TransferSpec spec;
             spec.tells_granted = tells_granted;
             spec.id = id;
             spec.source = source;
             spec.blocks = to_blocks(blocks);
             spec.count = count;
             spec.first = first;
             spec.lanes = std::move(lanes);
             spec.deadline = deadline_ns;
             spec.granted_ns = granted_ns;
             spec.content_digest = content_digest;
             spec.wants_checksums = wants_checksums;
             self.ask(blocks.size(), [&] { self.core().pull(pool, std::move(spec)); });
           },
           nb::arg("id"), nb::arg("source"), nb::arg("pool"), nb::arg("blocks"), nb::kw_only(), nb::arg("first") = 0, nb::arg("lanes"),
           nb::arg("deadline_ns") = kNever, nb::arg("content_digest") = Bytes32{}, nb::arg("wants_checksums") = false, nb::arg("count") = 0, nb::arg("granted_ns") = 0,
           nb::arg("tells_granted") = false,
           "Read grant positions `first`.. into own `blocks`, in order. `lanes`: allowed, best first. The core owns the blocks until\n"
           "TransferDrained. No blocks, and a `count`: wait for `reserve`. `deadline_ns`: the grant must exist by then; `granted_ns`, if not 0: the\n"
           "time limit of the transfer from the moment when it hears of its grant. `tells_granted`: also send TransferGranted to a pull that has\n"
           "blocks.")
      .def("reserve",
           [](PyCore& self, const TransferId& id, const BlockArray& blocks, uint32_t first) {
             std::vector<uint32_t> list = to_blocks(blocks);
             self.act([&](Endpoint& e, Nanos now, Effects& out) { e.reserve(id, std::move(list), first, now, out); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::kw_only(), nb::arg("first") = 0,
           "Give blocks to a pull that has none, for grant positions `first`... Raises InvalidArgumentError if it has ended or has blocks.")
      .def("unreserve",
           [](PyCore& self, const TransferId& id) { return self.act([&](Endpoint& e, Nanos now, Effects& out) { return e.unreserve(id, now, out); }); },
           nb::arg("id"),
           "Take back the blocks of a pull whose grant is not known to exist; it waits on without them. False: they are in use, or it has ended.")
      .def("cancel",
           [](PyCore& self, const TransferId& id) { self.act([&](Endpoint& e, Nanos now, Effects& out) { e.cancel(id, now, out); }); }, nb::arg("id"))
      .def("abort_pull",
           [](PyCore& self, const TransferId& id, const AgentRef& source) {
             self.act([&](Endpoint& e, Nanos now, Effects& out) { e.abort_pull(id, source, now, out); });
           },
           nb::arg("id"), nb::arg("source"), "`id` will never be pulled from `source`: tells the source, if it can be reached.")
      .def("transfer_state",
           [](PyCore& self, const TransferId& id) {
             const auto state = [&](const Endpoint& e) { return e.transfer_state(id); };
             if (auto seen = self.core().shared().try_look(state)) return *seen;  // most often: a polling thread should keep the GIL
             return without_gil([&] { return self.core().shared().look(state); });
           },
           nb::arg("id"), "The state of a pull, fetch or push, also for some time after its end; None if it is unknown. Fast enough for polling.")
      .def("notify",
           [](PyCore& self, const AgentRef& to, const nb::bytes& payload) {
             std::string text(view(payload));
             return self.ask(1, [&] { return self.core().notify(to, std::move(text)); });
           },
           nb::arg("to"), nb::arg("payload"), "Returns the notification's number, which NotifDelivered or NotifFailed will name.")
      .def("set_unfetched_notification_bytes", [](PyCore& self, size_t bytes) { self.core().shared().set_unfetched_notification_bytes(bytes); }, nb::arg("bytes"),
           "How many bytes of taken notifications the program has not fetched: they count as waiting here.")
      .def("counts", [](PyCore& self) { return without_gil([&] { return self.core().shared().look([](const Endpoint& e) { return e.counts(); }); }); })
      .def("statistics", &snapshot);
}

}  // namespace

void bind_core(nb::module_& m) {
  bind_events(m);
  bind_statistics(m);
  bind_region(m);
  bind_elements(m);
  bind_prepared_post(m);
  bind_core_class(m);
  bind_lanes(m);
  bind_scan(m);
  bind_ucx(m);
}

}  // namespace kvxfer
