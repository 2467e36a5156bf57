// Ranges and frames as Python sees them.
#include "bind_casters.hpp"

namespace kvxfer {
namespace {

using RangeTuple = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, uint32_t>;

std::vector<StridedRange> to_strided(const std::vector<RangeTuple>& tuples) {
  std::vector<StridedRange> rows;
  for (const auto& [region, offset, stride, length, count] : tuples) rows.push_back({region, offset, stride, length, count});
  return rows;
}

std::vector<RangeTuple> to_tuples(const std::vector<StridedRange>& rows) {
  std::vector<RangeTuple> tuples;
  for (const StridedRange& g : rows) tuples.emplace_back(g.region, g.offset, g.stride, g.length, g.count);
  return tuples;
}

using RowArray = nb::ndarray<const uint64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

PyRanges to_ranges(const RowArray& array) {
  std::vector<StridedRange> rows(array.shape(0));
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint64_t* row = array.data() + 5 * i;
    if (row[0] > UINT32_MAX || row[4] > UINT32_MAX) throw Error(Code::invalid_argument, "range " + std::to_string(i) + ": region and count have 32 bits");
    rows[i] = StridedRange{static_cast<uint32_t>(row[0]), row[1], row[2], row[3], static_cast<uint32_t>(row[4])};
  }
  return PyRanges{std::make_shared<const Ranges>(std::move(rows))};
}

}  // namespace

void bind_ranges(nb::module_& m) {
  nb::class_<PyRanges>(m, "Ranges", "Byte ranges of regions: rows of (region, offset, stride, length, count), seen as one list of elements.")
      .def("__init__", [](PyRanges* self, const RowArray& rows) { new (self) PyRanges(to_ranges(rows)); }, nb::arg("rows"))
      .def_prop_ro("count", [](const PyRanges& r) { return r.ranges->count(); })
      .def_prop_ro("uniform_bytes", [](const PyRanges& r) { return r.ranges->uniform_bytes(); })
      .def_prop_ro("row_count", [](const PyRanges& r) { return r.ranges->rows().size(); })
      .def_prop_ro("is_table", [](const PyRanges& r) { return r.ranges->is_table(); })
      .def_prop_ro("rows", [](const PyRanges& r) { return to_tuples(r.ranges->rows()); })
      .def("lengths", [](const PyRanges& r) {
        const uint32_t count = r.ranges->count();
        auto* lengths = new uint64_t[count];
        for (uint32_t i = 0; i < count; ++i) lengths[i] = r.ranges->bytes_of(i);
        nb::capsule owner(lengths, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
        return nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>(lengths, {count}, owner);
      }, "Bytes of each element.");
  nb::class_<Extent>(m, "Extent", "Some blocks of a pool, or some elements of ranges, in order.")
      .def_ro("pool", &Extent::pool).def_ro("first", &Extent::first).def_ro("count", &Extent::count)
      .def_prop_ro("blocks", &ids_of, "The block ids, or element ids.")
      .def_prop_ro("ranges", [](const Extent& e) { return e.ranges ? std::optional(PyRanges{e.ranges}) : std::nullopt; });
  nb::class_<RegionInfo>(m, "RegionInfo", "An open-ended grant and offer of one registered region.")
      .def("__init__",
           [](RegionInfo* r, uint32_t id, uint64_t bytes, bool can_read, bool can_write, bool is_shareable, bool is_exposed) {
             new (r) RegionInfo{id, bytes, can_read, can_write, is_shareable, is_exposed};
           },
           nb::arg("id"), nb::arg("bytes"), nb::arg("can_read") = true, nb::arg("can_write") = true, nb::arg("is_shareable") = false,
           nb::arg("is_exposed") = true)
      .def_ro("id", &RegionInfo::id).def_ro("bytes", &RegionInfo::bytes).def_ro("can_read", &RegionInfo::can_read)
      .def_ro("can_write", &RegionInfo::can_write).def_ro("is_shareable", &RegionInfo::is_shareable).def_ro("is_exposed", &RegionInfo::is_exposed);
  nb::class_<WireList>(m, "WireList", "Elements of regions as a frame carries them; no indices: all.")
      .def("__init__",
           [](WireList* w, const std::vector<RangeTuple>& rows, std::vector<uint32_t> indices) { new (w) WireList{to_strided(rows), std::move(indices)}; },
           nb::arg("rows"), nb::arg("indices") = std::vector<uint32_t>{})
      .def_prop_ro("rows", [](const WireList& w) { return to_tuples(w.rows); })
      .def_ro("indices", &WireList::indices);
}

void bind_frames(nb::module_& m) {
  nb::class_<Hello>(m, "Hello")
      .def("__init__",
           [](Hello* f, HelloStep step, AgentRef self, AgentRef peer, Bytes32 nonce, Bytes32 mac) { new (f) Hello{step, self, peer, nonce, mac}; },
           nb::arg("step"), nb::arg("agent"), nb::arg("peer"), nb::arg("nonce"), nb::arg("mac"))
      .def_ro("step", &Hello::step).def_ro("agent", &Hello::self).def_ro("peer", &Hello::peer).def_ro("nonce", &Hello::nonce).def_ro("mac", &Hello::mac);
  nb::class_<Pull>(m, "Pull")
      .def("__init__",
           [](Pull* f, TransferId id, uint32_t attempt, uint64_t nonce, Lane lane, uint32_t first, uint32_t count, uint64_t block_bytes, Bytes32 digest,
              uint32_t wait_ms, Bytes32 content_digest, bool wants_checksums) {
             new (f) Pull{id, attempt, nonce, lane, first, count, block_bytes, digest, wait_ms, content_digest, wants_checksums};
           },
           nb::arg("id"), nb::arg("attempt"), nb::arg("nonce"), nb::arg("lane"), nb::arg("first"), nb::arg("count"), nb::arg("block_bytes"),
           nb::arg("digest"), nb::arg("wait_ms"), nb::arg("content_digest") = Bytes32{}, nb::arg("wants_checksums") = false)
      .def_ro("wants_checksums", &Pull::wants_checksums).def_ro("id", &Pull::id).def_ro("attempt", &Pull::attempt).def_ro("nonce", &Pull::nonce).def_ro("lane", &Pull::lane).def_ro("first", &Pull::first)
      .def_ro("count", &Pull::count).def_ro("block_bytes", &Pull::block_bytes).def_ro("digest", &Pull::digest).def_ro("wait_ms", &Pull::wait_ms).def_ro("content_digest", &Pull::content_digest);
  nb::class_<Fetch>(m, "Fetch").def("__init__", [](Fetch* f, Pull pull, WireList elements) { new (f) Fetch{std::move(pull), std::move(elements)}; }, nb::arg("pull"), nb::arg("elements"))
      .def_ro("pull", &Fetch::pull).def_ro("elements", &Fetch::elements);
  nb::class_<Push>(m, "Push")
      .def("__init__",
           [](Push* f, TransferId id, Lane lane, WireList from, WireList to, uint32_t deadline_ms, bool wants_checksums, std::optional<nb::bytes> notification, uint8_t turn,
              bool is_last) {
             new (f) Push{id, lane, wants_checksums, deadline_ms, std::move(from), std::move(to), notification.has_value(),
                          notification ? std::string(view(*notification)) : std::string(), turn, is_last};
           },
           nb::arg("id"), nb::arg("lane"), nb::arg("source"), nb::arg("to"), nb::arg("deadline_ms") = 0, nb::arg("wants_checksums") = false,
           nb::arg("notification") = nb::none(), nb::arg("turn") = 0, nb::arg("is_last") = true)
      .def_ro("id", &Push::id).def_ro("lane", &Push::lane).def_ro("source", &Push::from).def_ro("to", &Push::to)
      .def_ro("deadline_ms", &Push::deadline_ms).def_ro("wants_checksums", &Push::wants_checksums).def_ro("turn", &Push::turn)
      .def_ro("is_last", &Push::is_last)
      .def_prop_ro("notification", [](const Push& f) { return f.has_notification ? std::optional(to_bytes(f.notification)) : std::nullopt; });
  nb::class_<Done>(m, "Done")
      .def("__init__",
           [](Done* f, TransferId id, Code code, nb::bytes text, uint8_t turn, uint32_t checked) { new (f) Done{id, code, std::string(view(text)), turn, checked}; },
           nb::arg("id"), nb::arg("code"), nb::arg("text"), nb::arg("turn") = 0, nb::arg("checked") = 0)
      .def_ro("id", &Done::id).def_ro("code", &Done::code).def_ro("turn", &Done::turn).def_ro("checked", &Done::checked)
      .def_prop_ro("text", [](const Done& f) { return to_bytes(f.text); }, "Bytes: a peer may send anything.");
  nb::class_<Ready>(m, "Ready")
      .def("__init__",
           [](Ready* f, TransferId id, uint32_t attempt, uint32_t seq, uint32_t blocks, uint32_t layers, uint32_t total, bool complete, uint32_t ttl_ms,
              uint32_t pool, uint32_t ids_first, std::vector<uint32_t> ids, std::vector<uint32_t> checksums) {
             new (f) Ready{id, attempt, seq, blocks, layers, total, complete, ttl_ms, pool, ids_first, std::move(ids), std::move(checksums)};
           },
           nb::arg("id"), nb::arg("attempt"), nb::arg("seq"), nb::arg("blocks"), nb::arg("layers"), nb::arg("total"), nb::arg("complete"),
           nb::arg("ttl_ms"), nb::arg("pool"), nb::arg("ids_first"), nb::arg("ids"), nb::arg("checksums") = std::vector<uint32_t>{})
      .def_ro("id", &Ready::id).def_ro("attempt", &Ready::attempt).def_ro("seq", &Ready::seq).def_ro("blocks", &Ready::blocks)
      .def_ro("layers", &Ready::layers).def_ro("total", &Ready::total).def_ro("complete", &Ready::complete).def_ro("ttl_ms", &Ready::ttl_ms)
      .def_ro("pool", &Ready::pool).def_ro("ids_first", &Ready::ids_first).def_ro("ids", &Ready::ids)
      .def_ro("checksums", &Ready::checksums);
  nb::class_<Data>(m, "Data")
      .def("__init__",
           [](Data* f, TransferId id, uint32_t attempt, uint32_t first, uint32_t count, bool complete, uint64_t payload_bytes, bool has_checksums, bool is_zero_copy) {
             new (f) Data{id, attempt, first, count, complete, has_checksums, is_zero_copy, payload_bytes};
           },
           nb::arg("id"), nb::arg("attempt"), nb::arg("first"), nb::arg("count"), nb::arg("complete"), nb::arg("payload_bytes"),
           nb::arg("has_checksums") = false, nb::arg("is_zero_copy") = false)
      .def_ro("id", &Data::id).def_ro("attempt", &Data::attempt).def_ro("first", &Data::first).def_ro("count", &Data::count)
      .def_ro("complete", &Data::complete).def_ro("payload_bytes", &Data::payload_bytes).def_ro("has_checksums", &Data::has_checksums)
      .def_ro("is_zero_copy", &Data::is_zero_copy);
  nb::class_<Confirm>(m, "Confirm")
      .def("__init__", [](Confirm* f, TransferId id, uint64_t nonce) { new (f) Confirm{id, nonce}; }, nb::arg("id"), nb::arg("nonce"))
      .def_ro("id", &Confirm::id).def_ro("nonce", &Confirm::nonce);
  nb::class_<Verdict>(m, "Verdict")
      .def("__init__", [](Verdict* f, TransferId id, uint64_t nonce, Code code) { new (f) Verdict{id, nonce, code}; }, nb::arg("id"), nb::arg("nonce"), nb::arg("code"))
      .def_ro("id", &Verdict::id).def_ro("nonce", &Verdict::nonce).def_ro("code", &Verdict::code);
  nb::class_<Release>(m, "Release").def("__init__", [](Release* f, TransferId id) { new (f) Release{id}; }, nb::arg("id")).def_ro("id", &Release::id);
  nb::class_<Renew>(m, "Renew")
      .def("__init__", [](Renew* f, TransferId id, uint32_t seq, uint32_t ttl_ms) { new (f) Renew{id, seq, ttl_ms}; }, nb::arg("id"), nb::arg("seq"), nb::arg("ttl_ms"))
      .def_ro("id", &Renew::id).def_ro("seq", &Renew::seq).def_ro("ttl_ms", &Renew::ttl_ms);
  nb::class_<Revoke>(m, "Revoke")
      .def("__init__", [](Revoke* f, TransferId id, Code code, nb::bytes text) { new (f) Revoke{id, code, std::string(view(text))}; }, nb::arg("id"), nb::arg("code"),
           nb::arg("text") = nb::bytes("", 0))
      .def_ro("id", &Revoke::id).def_ro("code", &Revoke::code)
      .def_prop_ro("text", [](const Revoke& f) { return to_bytes(f.text); }, "Bytes: a peer may send anything.");
  nb::class_<Queued>(m, "Queued")
      .def("__init__", [](Queued* f, TransferId id, uint32_t attempt, bool is_known, uint32_t position, bool has_work, uint32_t age_ms) {
             new (f) Queued{id, attempt, is_known, position, has_work, age_ms};
           }, nb::arg("id"), nb::arg("attempt"), nb::arg("is_known"), nb::arg("position"), nb::arg("has_work"), nb::arg("age_ms"))
      .def_ro("id", &Queued::id).def_ro("attempt", &Queued::attempt).def_ro("is_known", &Queued::is_known).def_ro("position", &Queued::position)
      .def_ro("has_work", &Queued::has_work).def_ro("age_ms", &Queued::age_ms);
  nb::class_<Cancel>(m, "Cancel")
      .def("__init__", [](Cancel* f, TransferId id, uint32_t attempt) { new (f) Cancel{id, attempt}; }, nb::arg("id"), nb::arg("attempt"))
      .def_ro("id", &Cancel::id).def_ro("attempt", &Cancel::attempt);
  nb::class_<Notif>(m, "Notif")
      .def("__init__",
           [](Notif* f, NotifKind kind, uint64_t seq, uint64_t oldest, nb::bytes payload, uint32_t begin, uint32_t total) {
             new (f) Notif{kind, seq, oldest, std::string(view(payload)), begin, total};
           },
           nb::arg("kind"), nb::arg("seq"), nb::arg("oldest"), nb::arg("payload"), nb::arg("begin") = 0, nb::arg("total") = 0)
      .def_ro("kind", &Notif::kind).def_ro("seq", &Notif::seq).def_ro("oldest", &Notif::oldest)
      .def_ro("begin", &Notif::begin).def_ro("total", &Notif::total)
      .def_prop_ro("payload", [](const Notif& f) { return to_bytes(f.payload); });
  nb::class_<Ping>(m, "Ping")
      .def("__init__", [](Ping* f, PingKind kind, uint64_t token) { new (f) Ping{kind, token}; }, nb::arg("kind"), nb::arg("token"))
      .def_ro("kind", &Ping::kind).def_ro("token", &Ping::token);
  nb::class_<ErrorFrame>(m, "ErrorFrame")
      .def("__init__",
           [](ErrorFrame* f, TransferId id, uint32_t attempt, Code code, nb::bytes text) { new (f) ErrorFrame{id, attempt, code, std::string(view(text))}; },
           nb::arg("id"), nb::arg("attempt"), nb::arg("code"), nb::arg("text"))
      .def_ro("id", &ErrorFrame::id).def_ro("attempt", &ErrorFrame::attempt).def_ro("code", &ErrorFrame::code)
      .def_prop_ro("text", [](const ErrorFrame& f) { return to_bytes(f.text); }, "Bytes: a peer may send anything.");
  nb::class_<Map>(m, "Map")
      .def("__init__",
           [](Map* f, uint32_t pool, uint64_t region_bytes, uint32_t block_count, const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& segments,
              Lane lane, uint64_t address, nb::bytes key) {
             new (f) Map{pool, lane, region_bytes, address, block_count, {}, std::string(view(key))};
             for (const auto& [offset, stride, length] : segments) f->segments.push_back({offset, stride, length});
           },
           nb::arg("pool"), nb::arg("region_bytes"), nb::arg("block_count"), nb::arg("segments"),
           nb::arg("lane") = Lane::Mapped, nb::arg("address") = 0, nb::arg("key") = nb::bytes("", 0))
      .def_ro("pool", &Map::pool).def_ro("lane", &Map::lane).def_ro("address", &Map::address)
      .def_prop_ro("key", [](const Map& f) { return to_bytes(f.key); }).def_ro("region_bytes", &Map::region_bytes).def_ro("block_count", &Map::block_count)
      .def_prop_ro("segments", [](const Map& f) {
        std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> segments;
        for (const Segment& s : f.segments) segments.emplace_back(s.offset, s.stride, s.length);
        return segments;
      });

  m.def("encode", [](const Frame& frame) { return to_bytes(encode(frame)); }, nb::arg("frame"), "The bytes of a frame, DATA's payload excluded.");
  m.def("kind_name", [](const Frame& frame) { return std::string(kind_name(frame)); }, nb::arg("frame"));
  nb::class_<Decoder>(m, "Decoder", "Takes bytes in any chunks; gives frames, or ProtocolError once and for ever.")
      .def(nb::init<>())
      .def("feed", [](Decoder& d, const nb::bytes& bytes) { d.feed(view(bytes)); }, nb::arg("data"))
      .def("next", &Decoder::next)
      .def_prop_ro("payload_pending", &Decoder::payload_pending)
      .def("take_payload", [](Decoder& d, size_t max) { const auto v = d.take_payload(max); return nb::bytes(v.data(), v.size()); }, nb::arg("max"))
      .def_prop_ro("buffered", &Decoder::buffered);
}

}  // namespace kvxfer
