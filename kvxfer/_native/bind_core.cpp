// The core as Python sees it. Every call that may wait, or takes long, lets go of the GIL first; the owners of foreign memory are
// kept here, because nothing below may touch a Python object.
#include <nanobind/ndarray.h>

#include "bind_casters.hpp"
#include "io/core.hpp"

namespace kvxfer {
namespace {

using BlockArray = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentTuple = std::tuple<uint64_t, uint64_t, uint64_t>;

// Longer lists are looked at without the GIL.
constexpr size_t kSmallList = 256;

IdList to_ids(const BlockArray& array) {
  const auto copy = [&] { return std::make_shared<const std::vector<uint32_t>>(array.data(), array.data() + array.size()); };
  if (array.size() <= kSmallList) return copy();
  nb::gil_scoped_release release;
  return copy();
}

std::vector<uint32_t> to_blocks(const BlockArray& array) { return {array.data(), array.data() + array.size()}; }

std::vector<Segment> to_segments(const std::vector<SegmentTuple>& tuples) {
  std::vector<Segment> segments;
  for (const auto& [offset, stride, length] : tuples) segments.push_back({offset, stride, length});
  return segments;
}

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

  // What is asked of a peer: a post or a pull of so many pieces, a notification. Where callers run the event loop, this call may
  // copy and send, and does it without the GIL. Otherwise a small one only enters the endpoint, which takes microseconds, and
  // keeps the GIL: to get it back from a thread that computes in Python can take 5 ms.
  template <class F>
  auto ask(size_t pieces, F&& call) {
    return core_.is_run_by_callers() || pieces > kSmallList ? without_gil(std::forward<F>(call)) : call();
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

// Some pieces of ranges, in order, as they are posted again and again: copied out of Python's arrays once.
struct PyPieces {
  PieceList list;
};

void bind_pieces(nb::module_& m) {
  nb::class_<PyPieces>(m, "Pieces", "A list of pieces of registered memory: pieces `ids` (uint32, shape [n]) of `ranges`, in this order.")
      .def("__init__",
           [](PyPieces* self, const PyRanges& ranges, const BlockArray& ids) { new (self) PyPieces{PieceList{ranges.ranges, to_ids(ids)}}; },
           nb::arg("ranges"), nb::arg("ids"))
      .def_prop_ro("ranges", [](const PyPieces& self) { return PyRanges{self.list.ranges}; })
      .def_prop_ro("ids", [](const PyPieces& self) {
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
  nb::class_<SessionRefused>(m, "SessionRefused", "A session that never came up, and why; `peer` is None where nobody had said who dials.")
      .def_ro("peer", &SessionRefused::peer).def_ro("kind", &SessionRefused::kind).def_ro("code", &SessionRefused::code)
      .def_ro("text", &SessionRefused::text);
  nb::class_<CoreFailed>(m, "CoreFailed", "The IO thread met an internal error and is gone: nothing is read or written any more, every call raises.")
      .def_ro("text", &CoreFailed::text);
}


struct CoreStatistics {
  uint64_t bytes_mapped, bytes_cma, bytes_ucx, bytes_streamed_in, bytes_streamed_out, bytes_spliced_out, bytes_discarded;
  uint64_t runs_mapped, runs_cma, calls_cma, gets_ucx, gets_ucx_most, runs_streamed_out, calls_streamed_out;
  uint64_t frames_in, frames_out, wakeups;
  uint64_t connections, sessions_tcp, sessions_unix, sessions_refused, sessions_ended, dials, dials_failed;
  uint64_t mappings, mappings_refused, checksum_failures;
};

void bind_statistics(nb::module_& m) {
  using S = CoreStatistics;
  nb::class_<S>(m, "CoreStatistics", "What a core has done; `connections` and `sessions_*` (but refused) are of this moment, the rest only grows.")
      .def_ro("bytes_mapped", &S::bytes_mapped, "Copied out of peers' mapped pools.")
      .def_ro("bytes_cma", &S::bytes_cma, "Copied out of peers' memory by the kernel.")
      .def_ro("bytes_ucx", &S::bytes_ucx)
      .def_ro("bytes_streamed_in", &S::bytes_streamed_in, "Over TCP and Unix sockets, into blocks and pieces.")
      .def_ro("bytes_streamed_out", &S::bytes_streamed_out)
      .def_ro("bytes_spliced_out", &S::bytes_spliced_out, "Of those, what went to peers under this kernel without a copy.")
      .def_ro("bytes_discarded", &S::bytes_discarded, "Payload that came for reads that were over.")
      .def_ro("runs_mapped", &S::runs_mapped, "Stretches of memory that were copied, neighbours being one; the same of `runs_cma`.")
      .def_ro("runs_cma", &S::runs_cma)
      .def_ro("calls_cma", &S::calls_cma, "Of process_vm_readv.")
      .def_ro("gets_ucx", &S::gets_ucx)
      .def_ro("gets_ucx_most", &S::gets_ucx_most, "Gets of one read that were in flight at once, the most so far.")
      .def_ro("runs_streamed_out", &S::runs_streamed_out, "Stretches of blocks that were offered to the kernel; again, where it took not all.")
      .def_ro("calls_streamed_out", &S::calls_streamed_out, "System calls that offered them.")
      .def_ro("frames_in", &S::frames_in)
      .def_ro("frames_out", &S::frames_out)
      .def_ro("wakeups", &S::wakeups, "Times that the event loop looked at its sockets, or slept on them.")
      .def_ro("connections", &S::connections)
      .def_ro("sessions_tcp", &S::sessions_tcp)
      .def_ro("sessions_unix", &S::sessions_unix)
      .def_ro("sessions_refused", &S::sessions_refused)
      .def_ro("sessions_ended", &S::sessions_ended, "That were up, for what one side did: sent what is no frame, asked too often for what it may not have.")
      .def_ro("dials", &S::dials)
      .def_ro("dials_failed", &S::dials_failed)
      .def_ro("mappings", &S::mappings, "Pools and regions that peers let this agent read by a one-sided lane.")
      .def_ro("mappings_refused", &S::mappings_refused)
      .def_ro("checksum_failures", &S::checksum_failures, "Reads thrown away because bytes came that the source had not sent.");
}

CoreStatistics snapshot(PyCore& self) {
  const Statistics& s = self.core().statistics();
  return {s.bytes_mapped.get(),      s.bytes_cma.get(),   s.bytes_ucx.get(),     s.bytes_streamed_in.get(), s.bytes_streamed_out.get(),
          s.bytes_spliced_out.get(), s.bytes_discarded.get(),   s.runs_mapped.get(),
          s.runs_cma.get(),          s.calls_cma.get(),   s.gets_ucx.get(),      s.gets_ucx_most.get(),     s.runs_streamed_out.get(),
          s.calls_streamed_out.get(), s.frames_in.get(),   s.frames_out.get(),    s.wakeups.get(),
          s.connections.get(),       s.sessions_tcp.get(),      s.sessions_unix.get(), s.sessions_refused.get(), s.sessions_ended.get(), s.dials.get(),         s.dials_failed.get(),
          s.mappings.get(),          s.mappings_refused.get(), s.checksum_failures.get()};
}

HugePages to_huge_pages(const std::string& word) {
  if (word == "auto") return HugePages::Auto;
  if (word == "never") return HugePages::Never;
  if (word == "require") return HugePages::Require;
  throw Error(Code::invalid_argument, "huge is \"auto\", \"never\" or \"require\", not \"" + word + "\"");
}

void bind_region(nb::module_& m) {
  nb::class_<PyRegion>(m, "Region", nb::type_slots(region_slots),
                     "Shared memory made by kvxfer: a sealed memfd, page aligned, zeroed. It lives as long as this object, a view of its buffer or a\n"
                     "pool over it. `numpy.frombuffer(region, dtype=numpy.uint8)` is a writable view.")
      .def("__init__",
           [](PyRegion* self, uint64_t nbytes, bool populate, const std::string& huge) {
             new (self) PyRegion{without_gil([&] { return std::make_shared<Region>(nbytes, populate, to_huge_pages(huge)); })};
           },
           nb::arg("nbytes"), nb::kw_only(), nb::arg("populate") = true, nb::arg("huge") = "auto",
           "`populate` makes every page resident now, so that memory that is not there is missed here. `huge` pages: \"auto\" (where the\n"
           "host has them), \"never\", \"require\" (raises LimitExceededError where it has none). Raises LaneUnavailableError where the host gives\n"
           "processes no sealed shared memory: memfd_create is forbidden, or the kernel is too old.")
      .def_prop_ro("page_bytes", [](const PyRegion& r) { return r.region->page_bytes(); }, "Of most of its pages.")
      .def_prop_ro("address", [](const PyRegion& r) { return reinterpret_cast<uintptr_t>(r.region->address()); })
      .def_prop_ro("nbytes", [](const PyRegion& r) { return r.region->bytes(); })
      .def("fileno", [](const PyRegion& r) { return r.region->fd(); }, "The memfd, which stays the region's: for a look from another process.");
}

ProgressMode to_progress(const std::string& word) {
  if (word == "thread") return ProgressMode::Thread;
  if (word == "caller") return ProgressMode::Caller;
  throw Error(Code::invalid_argument, "progress is \"thread\" or \"caller\", not \"" + word + "\"");
}

// From now, at most an hour.
Nanos in_time(uint64_t timeout_ns) { return monotonic_now() + static_cast<Nanos>(std::min<uint64_t>(timeout_ns, 3'600'000'000'000)); }

// What many posts have in common; the core outlives it.
struct PyPreparedPost {
  PyCore& core;
  void (Core::*method)(PostSpec);
  PostSpec common;

  void start(const TransferId& id, Nanos timeout_ns, const std::optional<nb::bytes>& notification, bool wants_sums) const {
    PostSpec spec = common;
    spec.id = id;
    spec.deadline = monotonic_now() + std::min(timeout_ns, kNever / 2);
    spec.wants_sums = wants_sums;
    if (notification) spec.notification = std::string(view(*notification));
    core.ask(common.local.count(), [&] { (core.core().*method)(std::move(spec)); });
  }
};

template <auto Method>
PyPreparedPost prepare(PyCore& self, const AgentRef& peer, const PyPieces& local, const PyPieces& remote, std::vector<Lane> lanes) {
  PyPreparedPost prepared{self, Method, {}};
  prepared.common.peer = peer;
  prepared.common.local = local.list;
  prepared.common.remote = remote.list;
  prepared.common.lanes = std::move(lanes);
  return prepared;
}

void bind_prepared_post(nb::module_& m) {
  nb::class_<PyPreparedPost>(m, "PreparedPost", "A read or write of a peer's pieces that can be started again and again, by any thread: see Core.")
      .def("start", &PyPreparedPost::start, nb::arg("id"), nb::arg("timeout_ns"), nb::arg("notification") = nb::none(), nb::arg("wants_sums") = false,
           "Start one transfer, called `id`, 16 bytes never used before; it ends in TransferFinal and TransferDrained, at the latest when\n"
           "`timeout_ns` have passed. `notification` goes to the peer once it is committed; `wants_sums`: its bytes go with CRC-32Cs. Raises\n"
           "InvalidArgumentError, PeerGoneError, LimitExceededError, LaneUnavailableError.");
}

void bind_core_class(nb::module_& m) {
  nb::class_<PyCore>(m, "Core",
                     "One agent's sockets, mappings and machines, on one native thread that needs no GIL. Every method is thread-safe. Times are\n"
                     "nanoseconds of CLOCK_MONOTONIC (`time.monotonic_ns()`). What happened is told through `fileno()` and `drain()`.")
      .def("__init__",
           [](PyCore* self, AgentRef agent, EndpointLimits limits, std::string bind_host, uint16_t bind_port, std::string unix_path,
              std::string ucx_library, std::string ucx_tls, unsigned copy_threads, const std::string& progress) {
             CoreOptions options{std::move(bind_host), bind_port, std::move(unix_path), {std::move(ucx_library), std::move(ucx_tls)}, copy_threads, to_progress(progress)};
             without_gil([&] { new (self) PyCore(std::move(agent), limits, std::move(options)); });
           },
           nb::arg("agent"), nb::arg("limits"), nb::kw_only(), nb::arg("bind_host"), nb::arg("bind_port"), nb::arg("unix_path"),
           nb::arg("ucx_library") = "", nb::arg("ucx_tls") = "", nb::arg("copy_threads") = 0,
           nb::arg("progress") = "thread",
           "`bind_host` is a numeric address. `unix_path` empty: no Unix socket, so nobody can map our pools; its directory must be private (0700).\n"
           "`ucx_library`: path of libucp, loaded here; empty: no `ucx` lane. `ucx_tls`: its transports; empty: all but tcp. `copy_threads`: of\n"
           "`mapped` and `cma`, 0: as processors are idle. `progress`: which threads run the event loop: \"thread\", the core's own and one that\n"
           "waits; \"caller\", also one that posts or drains.")
      .def("start", [](PyCore& self) { without_gil([&] { self.core().start(); }); }, "Listen and start the thread. Raises TransportError where a socket cannot be bound.")
      .def("close", &PyCore::close, "Drop every session and join the thread. Idempotent; afterwards only `drain` and what merely looks may be called.")
      .def_prop_ro("agent", [](PyCore& self) { return self.core().shared().look([](const Endpoint& e) { return e.self(); }); })
      .def_prop_ro("tcp_port", [](PyCore& self) { return self.core().tcp_port(); }, "The port that the core listens on; 0 before start.")
      .def_prop_ro("unix_path", [](PyCore& self) { return self.core().unix_path(); })
      .def_prop_ro("ucx_obstacle", [](PyCore& self) { return self.core().ucx_obstacle(); }, "Why the `ucx` lane is off; empty: it is on.")
      .def("fileno", [](PyCore& self) { return self.core().shared().event_fd(); },
           "An eventfd, readable while `drain` has something to give. Valid as long as the object.")
      .def("drain",
           [](PyCore& self) -> std::vector<OwnerEvent> {
             self.core().shared().check_process();
             const bool runs_loop = self.core().is_run_by_callers() && !self.core().shared().has_events();
             return runs_loop ? without_gil([&] { return self.core().drain(); }) : self.core().drain();
           },
           "What happened since the last call, in order; of a transfer's progress only the newest. Never blocks. With progress \"caller\", and where\n"
           "there is nothing, the calling thread looks at the sockets first.")
      .def("wait",
           [](PyCore& self, uint64_t timeout_ns) {
             self.core().shared().check_process();
             return without_gil([&] { return self.core().wait(in_time(timeout_ns)); });
           },
           nb::arg("timeout_ns"),
           "Wait until `drain` has more to give than progress, at most so long; returns whether it has anything. A signal may end it early. The\n"
           "calling thread runs the event loop meanwhile, unless another one does, and the core's own thread is not woken by sockets.")
      .def("add_pool",
           [](PyCore& self, const PoolInfo& info, const PyRegion& region, const std::vector<SegmentTuple>& segments) {
             without_gil([&] { self.core().add_pool(info, region.region, to_segments(segments)); });
           },
           nb::arg("info"), nb::arg("region"), nb::arg("segments"),
           "Blocks in memory made by kvxfer. A segment is (offset, stride, length): block b has `length` bytes at `offset + b * stride`; the\n"
           "lengths add up to `block_bytes`. Raises InvalidArgumentError where a block would leave the region.")
      .def("add_foreign_pool", &PyCore::add_foreign_pool, nb::arg("info"), nb::arg("address"), nb::arg("nbytes"), nb::arg("owner").none(), nb::arg("segments"),
           nb::arg("device") = -1,
           "Blocks in memory of somebody else; `owner` is kept alive until the pool is removed or the core closed. Never shareable. `device`: the\n"
           "CUDA device that it lies on; -1: it is the host's. Raises LaneUnavailableError where that device cannot be used.")
      .def("set_digest", &PyCore::set_digest, nb::arg("pool"), nb::arg("digest"),
           "What the record of a pool is from now on: pulls from it, and by it, that are judged later are judged by this digest (32 bytes).")
      .def("remove_pool", &PyCore::remove_pool, nb::arg("pool"),
           "Raises BlocksBusy while a block is granted, reserved or quarantined. When it returns, the memory is not touched any more.")
      .def("add_region",
           [](PyCore& self, const RegionInfo& info, const PyRegion& region) {
             without_gil([&] { self.core().add_region(info, region.region, nullptr); });
           },
           nb::arg("info"), nb::arg("region"),
           "Register memory made by kvxfer: from now on any proven peer may read and write it as `info` says. Raises InvalidArgumentError where\n"
           "the id is or was taken, or the region is shorter than `info.bytes`.")
      .def("add_foreign_region", &PyCore::add_foreign_region, nb::arg("info"), nb::arg("address"), nb::arg("nbytes"), nb::arg("owner").none(),
           nb::arg("device") = -1,
           "Register memory of somebody else; `owner` is kept alive until the region is removed or the core closed. Never shareable. `device`: as\n"
           "of `add_foreign_pool`.")
      .def("remove_region", &PyCore::remove_region, nb::arg("id"),
           "Ends every peer's read and write of it. Raises BlocksBusy while an own fetch may still write there. When it returns, the memory\n"
           "is not touched any more.")
      .def("prepare_fetch", prepare<&Core::fetch>, nb::keep_alive<0, 1>(), nb::arg("peer"), nb::arg("local"), nb::arg("remote"), nb::arg("lanes"),
           "Reads of the peer's pieces `remote` into own pieces `local`, one for one, of equal lengths; nothing is checked before the start.\n"
           "`lanes`: allowed, best first.")
      .def("prepare_push", prepare<&Core::push>, nb::keep_alive<0, 1>(), nb::arg("peer"), nb::arg("local"), nb::arg("remote"), nb::arg("lanes"),
           "Have the peer read own pieces `local` into its `remote`; else as `prepare_fetch`. Own pieces must stay as they are until\n"
           "TransferFinal, and their memory until TransferDrained.")
      .def("set_guest_key",
           [](PyCore& self, const Bytes32& key) { self.act([&](Endpoint& e, Nanos, Effects&) { e.set_guest_key(key); }); }, nb::arg("key"),
           "From now on an agent that nobody named may open a session if it proves this key (32 bytes); it is known while a session of\n"
           "it is up, and a little longer where it has reads or writes under way.")
      .def("set_root",
           [](PyCore& self, const Bytes32& root) { self.act([&](Endpoint& e, Nanos, Effects&) { e.set_root(root); }); }, nb::arg("root"),
           "From now on an agent that nobody named may open a session if it proves its session key with this one under `root` (32 bytes); it is\n"
           "known from then on.")
      .def("is_connected",
           [](PyCore& self, const AgentRef& peer) { return self.act([&](Endpoint& e, Nanos, Effects&) { return e.is_connected(peer); }); }, nb::arg("peer"),
           "Whether a session with exactly this life is up.")
      .def("set_peer",
           [](PyCore& self, const AgentRef& peer, const Bytes32& key, std::string tcp_host, uint16_t tcp_port, std::string unix_path) {
             without_gil([&] { self.core().shared().set_peer(peer, key, {std::move(tcp_host), tcp_port, std::move(unix_path)}); });
           },
           nb::arg("peer"), nb::arg("key"), nb::kw_only(), nb::arg("tcp_host"), nb::arg("tcp_port"), nb::arg("unix_path"),
           "How to reach and to prove one life of an agent. `key`: 32 bytes. `tcp_host` is a numeric address; `unix_path` is empty where the\n"
           "peer is on another host. Called again, it replaces what was said.")
      .def("peer_dead", [](PyCore& self, const AgentRef& peer) { without_gil([&] { self.core().shared().peer_dead(peer); }); }, nb::arg("peer"))
      .def("grant",
           [](PyCore& self, const TransferId& id, uint32_t pool, const BlockArray& blocks, const std::string& reader, Nanos ttl_ns, uint32_t ready_blocks,
              const Bytes32& content) {
             std::vector<uint32_t> list = to_blocks(blocks);
             without_gil([&] { self.core().grant(id, pool, std::move(list), reader, ttl_ns, ready_blocks, content); });
           },
           nb::arg("id"), nb::arg("pool"), nb::arg("blocks"), nb::kw_only(), nb::arg("reader"), nb::arg("ttl_ns"), nb::arg("ready_blocks") = 0,
           nb::arg("content") = Bytes32{},
           "`reader` is an agent id, or empty: the first authenticated reader that presents `id`. `content`: 32 bytes that say what the blocks\n"
           "hold; a reader that says otherwise is refused. Zero says nothing.")
      .def("expect",
           [](PyCore& self, const TransferId& id, const std::string& reader) { self.act([&](Endpoint& e, Nanos, Effects&) { e.expect(id, reader); }); },
           nb::arg("id"), nb::kw_only(), nb::arg("reader"),
           "The engine here accepted the prompt of `id`: whoever pulls it early is told so. `reader` as of `grant`. Ends by `grant` or `decline`.")
      .def("pulse",
           [](PyCore& self, bool has_work, bool took_in) { self.act([&](Endpoint& e, Nanos now, Effects&) { e.pulse(has_work, took_in, now); }); },
           nb::arg("has_work"), nb::arg("took_in"),
           "A sign of life of the engine here, which is about to step, or has nothing to do. `took_in`: all is taken in that had reached it at\n"
           "its last such pulse.")
      .def("has_begun",
           [](PyCore& self, const TransferId& id) {
             return without_gil([&] { return self.core().shared().look([&](const Endpoint& e) { return e.has_begun(id); }); });
           },
           nb::arg("id"), "Whether the reader of the grant `id` has asked for blocks of it.")
      .def("decline", [](PyCore& self, const TransferId& id) { self.act([&](Endpoint& e, Nanos, Effects& out) { e.decline(id, out); }); }, nb::arg("id"),
           "The grant `id` will never be made here: whoever waits for it is told.")
      .def("ready",
           [](PyCore& self, const TransferId& id, uint32_t blocks, uint32_t layers, bool complete) {
             without_gil([&] { self.core().ready(id, blocks, layers, complete); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::kw_only(), nb::arg("layers") = 0, nb::arg("complete") = false,
           "The first `blocks` blocks are written and stay as they are. Where their pool checks, takes the checksums of the new ones.")
      .def("end_grant",
           [](PyCore& self, const TransferId& id, GrantEvent event, const std::string& why) {
             return without_gil([&] { return self.core().shared().end_grant(id, event, why); });
           },
           nb::arg("id"), nb::arg("event"), nb::arg("why") = "",
           "`event` is REVOKE or RELEASE. When it returns, the grant's blocks may be overwritten. `why` is told to its reader.")
      .def("bind_grant",
           [](PyCore& self, const TransferId& id, const std::string& reader) {
             return self.act([&](Endpoint& e, Nanos now, Effects&) { return e.bind_grant(id, reader, now); });
           },
           nb::arg("id"), nb::arg("reader"),
           "Let only the agent `reader` read it from now on (empty: leave it open), unless another was named, or came first. Returns which\n"
           "agent alone may read it; empty: none yet, or none ever.")
      .def("grant_state",
           [](PyCore& self, const TransferId& id) {
             return without_gil([&] { return self.core().shared().look([&](const Endpoint& e) { return e.grant_state(id, monotonic_now()); }); });
           },
           nb::arg("id"))
      .def("pull",
           [](PyCore& self, const TransferId& id, const AgentRef& source, uint32_t pool, const BlockArray& blocks, uint32_t first, std::vector<Lane> lanes,
              Nanos deadline_ns, const Bytes32& content, bool wants_sums, uint32_t count, Nanos granted_ns, bool tells_granted) {
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
             spec.content = content;
             spec.wants_sums = wants_sums;
             self.ask(blocks.size(), [&] { self.core().pull(pool, std::move(spec)); });
           },
           nb::arg("id"), nb::arg("source"), nb::arg("pool"), nb::arg("blocks"), nb::kw_only(), nb::arg("first") = 0, nb::arg("lanes"),
           nb::arg("deadline_ns") = kNever, nb::arg("content") = Bytes32{}, nb::arg("wants_sums") = false, nb::arg("count") = 0, nb::arg("granted_ns") = 0,
           nb::arg("tells_granted") = false,
           "Read grant positions `first`.. into own `blocks`, in order. `lanes`: allowed, best first. The blocks are the core's until\n"
           "TransferDrained is told. No blocks, and a `count`: wait for `reserve`. `deadline_ns`: by then the grant exists; `granted_ns`, where\n"
           "not 0: how long the transfer may take from the moment in which it heard of its grant. `tells_granted`: TransferGranted is told also\n"
           "where it has blocks.")
      .def("reserve",
           [](PyCore& self, const TransferId& id, const BlockArray& blocks, uint32_t first) {
             std::vector<uint32_t> list = to_blocks(blocks);
             self.act([&](Endpoint& e, Nanos now, Effects& out) { e.reserve(id, std::move(list), first, now, out); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::kw_only(), nb::arg("first") = 0,
           "Give a pull that has no blocks its own, for grant positions `first`... Raises InvalidArgumentError where it is over or has some.")
      .def("unreserve",
           [](PyCore& self, const TransferId& id) { return self.act([&](Endpoint& e, Nanos now, Effects& out) { return e.unreserve(id, now, out); }); },
           nb::arg("id"),
           "Take the blocks of a pull back whose grant is not known to exist; it waits on without them. False: they are in use, or it is over.")
      .def("cancel",
           [](PyCore& self, const TransferId& id) { self.act([&](Endpoint& e, Nanos now, Effects& out) { e.cancel(id, now, out); }); }, nb::arg("id"))
      .def("give_up",
           [](PyCore& self, const TransferId& id, const AgentRef& source) {
             self.act([&](Endpoint& e, Nanos now, Effects& out) { e.give_up(id, source, now, out); });
           },
           nb::arg("id"), nb::arg("source"), "`id` will never be pulled from `source`: lets it know, where it can be reached.")
      .def("transfer_state",
           [](PyCore& self, const TransferId& id) {
             const auto state = [&](const Endpoint& e) { return e.transfer_state(id); };
             if (auto seen = self.core().shared().try_look(state)) return *seen;  // most often: who polls should not give the GIL away for it
             return without_gil([&] { return self.core().shared().look(state); });
           },
           nb::arg("id"), "Of a pull, fetch or push, also for some time after its end; None where it is not known. Quick: for polling.")
      .def("notify",
           [](PyCore& self, const AgentRef& to, const nb::bytes& payload) {
             std::string text(view(payload));
             return self.ask(1, [&] { return self.core().notify(to, std::move(text)); });
           },
           nb::arg("to"), nb::arg("payload"), "Returns the notification's number, which NotifDelivered or NotifFailed will name.")
      .def("hold_notifications", [](PyCore& self, size_t bytes) { self.core().shared().hold_notifications(bytes); }, nb::arg("bytes"),
           "How many bytes of the notifications that were taken still wait for the program: they count as those that wait here.")
      .def("counts", [](PyCore& self) { return without_gil([&] { return self.core().shared().look([](const Endpoint& e) { return e.counts(); }); }); })
      .def("statistics", &snapshot);
}

}  // namespace

void bind_core(nb::module_& m) {
  bind_events(m);
  bind_statistics(m);
  bind_region(m);
  bind_pieces(m);
  bind_prepared_post(m);
  bind_core_class(m);
  bind_lanes(m);
  bind_ucx(m);
}

}  // namespace kvxfer
