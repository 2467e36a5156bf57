// The machines as Python sees them: the same classes that the IO thread drives, one call an event, effects as objects.
#include "bind_casters.hpp"
#include "machines/sha256.hpp"

namespace kvxfer {
namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// Runs one call that appends effects, and returns them: alone, or beside the call's own value.
template <class F>
auto effects_of(F&& call) {
  Effects out;
  if constexpr (std::is_void_v<decltype(call(out))>) {
    call(out);
    return out;
  } else {
    auto value = call(out);
    return std::make_pair(std::move(value), std::move(out));
  }
}

void bind_values(nb::module_& m) {
  nb::enum_<Lane>(m, "Lane").value("MAPPED", Lane::Mapped).value("STREAM", Lane::Stream).value("MEMORY", Lane::Memory);
  nb::enum_<SessionKind>(m, "SessionKind").value("TCP", SessionKind::Tcp).value("UNIX", SessionKind::Unix).value("MEMORY", SessionKind::Memory);
  nb::enum_<GrantState>(m, "GrantState", nb::is_arithmetic())
      .value("ALIVE", GrantState::Alive)
      .value("RELEASED", GrantState::Released)
      .value("EXPIRED", GrantState::Expired)
      .value("REVOKED", GrantState::Revoked)
      .value("READER_GONE", GrantState::ReaderGone);
  nb::enum_<GrantEvent>(m, "GrantEvent")
      .value("READY", GrantEvent::Ready)
      .value("PULL", GrantEvent::Pull)
      .value("CONFIRM", GrantEvent::Confirm)
      .value("RENEW", GrantEvent::Renew)
      .value("RELEASE", GrantEvent::Release)
      .value("REVOKE", GrantEvent::Revoke)
      .value("EXPIRE", GrantEvent::Expire)
      .value("READER_DEAD", GrantEvent::ReaderDead);
  nb::enum_<TransferState>(m, "TransferState", nb::is_arithmetic())
      .value("CONNECTING", TransferState::Connecting)
      .value("WAITING", TransferState::Waiting)
      .value("READING", TransferState::Reading)
      .value("CONFIRMING", TransferState::Confirming)
      .value("COMMITTED", TransferState::Committed)
      .value("FAILED", TransferState::Failed)
      .value("CANCELLED", TransferState::Cancelled);
  nb::enum_<TransferEvent>(m, "TransferEvent")
      .value("SESSION_UP", TransferEvent::SessionUp)
      .value("SESSION_UP_LANDED", TransferEvent::SessionUpLanded)
      .value("HEARD", TransferEvent::Heard)
      .value("LANDED", TransferEvent::Landed)
      .value("LANDED_ALL", TransferEvent::LandedAll)
      .value("SESSION_LOST", TransferEvent::SessionLost)
      .value("VERDICT_OK", TransferEvent::VerdictOk)
      .value("FAIL", TransferEvent::Fail)
      .value("CANCEL", TransferEvent::Cancel);
  nb::enum_<HelloStep>(m, "HelloStep").value("DIAL", HelloStep::Dial).value("ACCEPT", HelloStep::Accept).value("PROVE", HelloStep::Prove);
  nb::enum_<NotifKind>(m, "NotifKind").value("DELIVER", NotifKind::Deliver).value("ACK", NotifKind::Ack);
  nb::enum_<PingKind>(m, "PingKind").value("ASK", PingKind::Ask).value("ANSWER", PingKind::Answer);
  nb::enum_<Code> code(m, "Code");
  for (uint16_t i = 0; i < kCodeCount; ++i) code.value(name(static_cast<Code>(i)), static_cast<Code>(i));

  nb::class_<AgentRef>(m, "AgentRef", "One life of one agent.")
      .def("__init__",
           [](AgentRef* self, std::string agent_id, uint64_t number, Bytes16 boot_nonce) {
             if (agent_id.empty() || agent_id.size() > kAgentIdMax) throw Error(Code::invalid_argument, "agent id must be 1 to 64 bytes");
             new (self) AgentRef{std::move(agent_id), number, boot_nonce};
           },
           nb::arg("agent_id"), nb::arg("number"), nb::arg("boot_nonce"))
      .def_ro("agent_id", &AgentRef::agent_id)
      .def_ro("number", &AgentRef::number)
      .def_ro("boot_nonce", &AgentRef::boot_nonce)
      .def("__eq__", [](const AgentRef& a, const AgentRef& b) { return a == b; }, nb::is_operator(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__lt__", [](const AgentRef& a, const AgentRef& b) { return a < b; }, nb::is_operator())
      .def("__hash__", [](const AgentRef& a) { return std::hash<std::string>()(a.agent_id) ^ TransferIdHash()(TransferId{a.boot_nonce}) ^ a.number; })
      .def("__repr__", [](const AgentRef& a) { return a.agent_id + "#" + std::to_string(a.number); });
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
              uint32_t wait_ms, Bytes32 content) { new (f) Pull{id, attempt, nonce, lane, first, count, block_bytes, digest, wait_ms, content}; },
           nb::arg("id"), nb::arg("attempt"), nb::arg("nonce"), nb::arg("lane"), nb::arg("first"), nb::arg("count"), nb::arg("block_bytes"),
           nb::arg("digest"), nb::arg("wait_ms"), nb::arg("content") = Bytes32{})
      .def_ro("id", &Pull::id).def_ro("attempt", &Pull::attempt).def_ro("nonce", &Pull::nonce).def_ro("lane", &Pull::lane).def_ro("first", &Pull::first)
      .def_ro("count", &Pull::count).def_ro("block_bytes", &Pull::block_bytes).def_ro("digest", &Pull::digest).def_ro("wait_ms", &Pull::wait_ms).def_ro("content", &Pull::content);
  nb::class_<Push>(m, "Push")
      .def("__init__", [](Push* f, TransferId id, uint32_t count) { new (f) Push{id, count}; }, nb::arg("id"), nb::arg("count"))
      .def_ro("id", &Push::id).def_ro("count", &Push::count);
  nb::class_<Ready>(m, "Ready")
      .def("__init__",
           [](Ready* f, TransferId id, uint32_t attempt, uint32_t seq, uint32_t blocks, uint32_t layers, uint32_t total, bool complete, uint32_t ttl_ms,
              uint32_t pool, uint32_t ids_first, std::vector<uint32_t> ids) {
             new (f) Ready{id, attempt, seq, blocks, layers, total, complete, ttl_ms, pool, ids_first, std::move(ids)};
           },
           nb::arg("id"), nb::arg("attempt"), nb::arg("seq"), nb::arg("blocks"), nb::arg("layers"), nb::arg("total"), nb::arg("complete"),
           nb::arg("ttl_ms"), nb::arg("pool"), nb::arg("ids_first"), nb::arg("ids"))
      .def_ro("id", &Ready::id).def_ro("attempt", &Ready::attempt).def_ro("seq", &Ready::seq).def_ro("blocks", &Ready::blocks)
      .def_ro("layers", &Ready::layers).def_ro("total", &Ready::total).def_ro("complete", &Ready::complete).def_ro("ttl_ms", &Ready::ttl_ms)
      .def_ro("pool", &Ready::pool).def_ro("ids_first", &Ready::ids_first).def_ro("ids", &Ready::ids);
  nb::class_<Data>(m, "Data")
      .def("__init__",
           [](Data* f, TransferId id, uint32_t attempt, uint32_t first, uint32_t count, bool complete, uint64_t payload_bytes) {
             new (f) Data{id, attempt, first, count, complete, payload_bytes};
           },
           nb::arg("id"), nb::arg("attempt"), nb::arg("first"), nb::arg("count"), nb::arg("complete"), nb::arg("payload_bytes"))
      .def_ro("id", &Data::id).def_ro("attempt", &Data::attempt).def_ro("first", &Data::first).def_ro("count", &Data::count)
      .def_ro("complete", &Data::complete).def_ro("payload_bytes", &Data::payload_bytes);
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
      .def("__init__", [](Revoke* f, TransferId id, Code code) { new (f) Revoke{id, code}; }, nb::arg("id"), nb::arg("code"))
      .def_ro("id", &Revoke::id).def_ro("code", &Revoke::code);
  nb::class_<Cancel>(m, "Cancel")
      .def("__init__", [](Cancel* f, TransferId id, uint32_t attempt) { new (f) Cancel{id, attempt}; }, nb::arg("id"), nb::arg("attempt"))
      .def_ro("id", &Cancel::id).def_ro("attempt", &Cancel::attempt);
  nb::class_<Notif>(m, "Notif")
      .def("__init__", [](Notif* f, NotifKind kind, uint64_t seq, uint64_t oldest, nb::bytes payload) { new (f) Notif{kind, seq, oldest, std::string(view(payload))}; },
           nb::arg("kind"), nb::arg("seq"), nb::arg("oldest"), nb::arg("payload"))
      .def_ro("kind", &Notif::kind).def_ro("seq", &Notif::seq).def_ro("oldest", &Notif::oldest)
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
           [](Map* f, uint32_t pool, uint64_t region_bytes, uint32_t block_count, const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& segments) {
             new (f) Map{pool, region_bytes, block_count, {}};
             for (const auto& [offset, stride, length] : segments) f->segments.push_back({offset, stride, length});
           },
           nb::arg("pool"), nb::arg("region_bytes"), nb::arg("block_count"), nb::arg("segments"))
      .def_ro("pool", &Map::pool).def_ro("region_bytes", &Map::region_bytes).def_ro("block_count", &Map::block_count)
      .def_prop_ro("segments", [](const Map& f) {
        std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> segments;
        for (const Segment& s : f.segments) segments.emplace_back(s.offset, s.stride, s.length);
        return segments;
      });

  m.def("encode", [](const Frame& frame) { return to_bytes(encode(frame)); }, nb::arg("frame"), "The bytes of a frame, DATA's payload excluded.");
  m.def("kind_name", [](const Frame& frame) { return std::string(kind_name(frame)); }, nb::arg("frame"));
  nb::class_<Decoder>(m, "Decoder", "Bytes in, in any cut; frames out, or ProtocolViolation once and for ever.")
      .def(nb::init<>())
      .def("feed", [](Decoder& d, const nb::bytes& bytes) { d.feed(view(bytes)); }, nb::arg("data"))
      .def("next", &Decoder::next)
      .def_prop_ro("payload_pending", &Decoder::payload_pending)
      .def("take_payload", [](Decoder& d, size_t max) { const auto v = d.take_payload(max); return nb::bytes(v.data(), v.size()); }, nb::arg("max"))
      .def_prop_ro("buffered", &Decoder::buffered);
}

void bind_effects(nb::module_& m) {
  nb::class_<Dial>(m, "Dial").def_ro("peer", &Dial::peer).def_ro("kind", &Dial::kind);
  nb::class_<Hangup>(m, "Hangup").def_ro("session", &Hangup::session).def_ro("code", &Hangup::code).def_ro("text", &Hangup::text);
  nb::class_<SendFrame>(m, "SendFrame").def_ro("session", &SendFrame::session).def_ro("frame", &SendFrame::frame);
  nb::class_<SendMap>(m, "SendMap").def_ro("session", &SendMap::session).def_ro("pool", &SendMap::pool);
  nb::class_<SendData>(m, "SendData").def_ro("session", &SendData::session).def_ro("frame", &SendData::frame).def_ro("pool", &SendData::pool)
      .def_ro("blocks", &SendData::blocks);
  nb::class_<ReadBlocks>(m, "ReadBlocks").def_ro("id", &ReadBlocks::id).def_ro("token", &ReadBlocks::token).def_ro("session", &ReadBlocks::session)
      .def_ro("remote_pool", &ReadBlocks::remote_pool).def_ro("from_blocks", &ReadBlocks::from).def_ro("pool", &ReadBlocks::pool)
      .def_ro("to_blocks", &ReadBlocks::to);
  nb::class_<GrantEnded>(m, "GrantEnded").def_ro("id", &GrantEnded::id).def_ro("state", &GrantEnded::state);
  nb::class_<TransferProgress>(m, "TransferProgress").def_ro("id", &TransferProgress::id).def_ro("state", &TransferProgress::state)
      .def_ro("done", &TransferProgress::done).def_ro("total", &TransferProgress::total);
  nb::class_<TransferFinal>(m, "TransferFinal").def_ro("id", &TransferFinal::id).def_ro("state", &TransferFinal::state).def_ro("code", &TransferFinal::code)
      .def_ro("text", &TransferFinal::text).def_ro("lane", &TransferFinal::lane).def_ro("lane_notes", &TransferFinal::lane_notes)
      .def_ro("attempts", &TransferFinal::attempts).def_ro("blocks_done", &TransferFinal::blocks_done)
      .def_ro("blocks_before_complete", &TransferFinal::blocks_before_complete).def_ro("queue_ns", &TransferFinal::queue_ns)
      .def_ro("wire_ns", &TransferFinal::wire_ns).def_ro("confirm_ns", &TransferFinal::confirm_ns);
  nb::class_<TransferDrained>(m, "TransferDrained").def_ro("id", &TransferDrained::id);
  nb::class_<NotifReceived>(m, "NotifReceived").def_ro("sender", &NotifReceived::from).def_ro("seq", &NotifReceived::seq)
      .def_prop_ro("payload", [](const NotifReceived& e) { return to_bytes(e.payload); });
  nb::class_<NotifDelivered>(m, "NotifDelivered").def_ro("receiver", &NotifDelivered::to).def_ro("seq", &NotifDelivered::seq);
  nb::class_<NotifFailed>(m, "NotifFailed").def_ro("receiver", &NotifFailed::to).def_ro("seq", &NotifFailed::seq).def_ro("code", &NotifFailed::code);
  nb::class_<SessionUp>(m, "SessionUp").def_ro("session", &SessionUp::session).def_ro("peer", &SessionUp::peer).def_ro("kind", &SessionUp::kind);
}

void bind_tables(nb::module_& m) {
  nb::class_<PoolInfo>(m, "PoolInfo")
      .def("__init__",
           [](PoolInfo* p, uint32_t id, uint32_t block_count, uint64_t block_bytes, Bytes32 digest, bool is_shareable) {
             new (p) PoolInfo{id, block_count, block_bytes, digest, is_shareable};
           },
           nb::arg("id"), nb::arg("block_count"), nb::arg("block_bytes"), nb::arg("digest"), nb::arg("is_shareable"));
  nb::class_<Ledger>(m, "Ledger").def(nb::init<PoolInfo>(), nb::arg("info"))
      .def("grant", &Ledger::grant, nb::arg("blocks")).def("end_grant", &Ledger::end_grant, nb::arg("blocks"))
      .def("reserve", &Ledger::reserve, nb::arg("blocks")).def("quarantine", &Ledger::quarantine, nb::arg("blocks"))
      .def("give_back", &Ledger::give_back, nb::arg("blocks"))
      .def("is_reserved", &Ledger::is_reserved, nb::arg("block")).def("is_granted", &Ledger::is_granted, nb::arg("block"))
      .def_prop_ro("granted_count", &Ledger::granted_count).def_prop_ro("reserved_count", &Ledger::reserved_count)
      .def_prop_ro("quarantined_count", &Ledger::quarantined_count);

  nb::class_<GrantLimits>(m, "GrantLimits").def(nb::init<>())
      .def_rw("grants_max", &GrantLimits::grants_max).def_rw("tombstones_max", &GrantLimits::tombstones_max).def_rw("waiting_max", &GrantLimits::waiting_max)
      .def_rw("ttl_ns", &GrantLimits::ttl_ns).def_rw("life_max_ns", &GrantLimits::life_max_ns).def_rw("wait_max_ns", &GrantLimits::wait_max_ns)
      .def_rw("data_bytes_max", &GrantLimits::data_bytes_max);
  nb::class_<TransferLimits>(m, "TransferLimits").def(nb::init<>())
      .def_rw("stall_ns", &TransferLimits::stall_ns).def_rw("reconnect_ns", &TransferLimits::reconnect_ns).def_rw("ttl_ns", &TransferLimits::ttl_ns)
      .def_rw("wait_ms", &TransferLimits::wait_ms).def_rw("read_bytes_max", &TransferLimits::read_bytes_max);
  nb::class_<EndpointLimits>(m, "EndpointLimits").def(nb::init<>())
      .def_rw("grants", &EndpointLimits::grants).def_rw("transfers", &EndpointLimits::transfers).def_rw("transfers_max", &EndpointLimits::transfers_max)
      .def_rw("finished_max", &EndpointLimits::finished_max).def_rw("sessions_max", &EndpointLimits::sessions_max)
      .def_rw("notifications_max", &EndpointLimits::notifications_max).def_rw("notification_bytes_max", &EndpointLimits::notification_bytes_max)
      .def_rw("handshake_ns", &EndpointLimits::handshake_ns);
  nb::class_<GrantCounts>(m, "GrantCounts").def_ro("alive", &GrantCounts::alive).def_ro("waiting_pulls", &GrantCounts::waiting_pulls)
      .def_ro("released", &GrantCounts::released).def_ro("expired", &GrantCounts::expired).def_ro("revoked", &GrantCounts::revoked)
      .def_ro("reader_gone", &GrantCounts::reader_gone).def_ro("verdicts_ok", &GrantCounts::verdicts_ok)
      .def_ro("verdicts_refused", &GrantCounts::verdicts_refused);
  nb::class_<PoolCounts>(m, "PoolCounts").def_ro("pool", &PoolCounts::pool).def_ro("blocks", &PoolCounts::blocks).def_ro("granted", &PoolCounts::granted)
      .def_ro("reserved", &PoolCounts::reserved).def_ro("quarantined", &PoolCounts::quarantined);
  nb::class_<EndpointCounts>(m, "EndpointCounts").def_ro("grants", &EndpointCounts::grants).def_ro("pools", &EndpointCounts::pools)
      .def_ro("transfers_live", &EndpointCounts::transfers_live).def_ro("transfers_draining", &EndpointCounts::transfers_draining)
      .def_ro("sessions_up", &EndpointCounts::sessions_up).def_ro("sessions_opening", &EndpointCounts::sessions_opening)
      .def_ro("peers", &EndpointCounts::peers).def_ro("notifications_pending", &EndpointCounts::notifications_pending);

  nb::class_<GrantTable>(m, "GrantTable")
      .def(nb::init<GrantLimits>(), nb::arg("limits"))
      .def("grant",
           [](GrantTable& t, TransferId id, Ledger& ledger, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns, Nanos now_ns,
              const Bytes32& content) {
             return effects_of([&](Effects& out) { t.grant(id, ledger, std::move(blocks), reader, ttl_ns, now_ns, out, content); });
           },
           nb::arg("id"), nb::arg("ledger"), nb::arg("blocks"), nb::arg("reader"), nb::arg("ttl_ns"), nb::arg("now_ns"),
           nb::arg("content") = Bytes32{}, nb::keep_alive<1, 3>())
      .def("decline", [](GrantTable& t, TransferId id) { return effects_of([&](Effects& out) { t.decline(id, out); }); }, nb::arg("id"))
      .def("ready",
           [](GrantTable& t, TransferId id, uint32_t blocks, uint32_t layers, bool complete, Nanos now_ns) {
             return effects_of([&](Effects& out) { t.ready(id, blocks, layers, complete, now_ns, out); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::arg("layers"), nb::arg("complete"), nb::arg("now_ns"))
      .def("end",
           [](GrantTable& t, TransferId id, GrantEvent event, Nanos now_ns) { return effects_of([&](Effects& out) { return t.end(id, event, now_ns, out); }); },
           nb::arg("id"), nb::arg("event"), nb::arg("now_ns"))
      .def("state", &GrantTable::state, nb::arg("id"), nb::arg("now_ns"))
      .def("on_pull",
           [](GrantTable& t, SessionId session, const AgentRef& peer, const Pull& pull, Nanos now_ns) {
             return effects_of([&](Effects& out) { t.on_pull(session, peer, pull, now_ns, out); });
           },
           nb::arg("session"), nb::arg("peer"), nb::arg("pull"), nb::arg("now_ns"))
      .def("on_confirm",
           [](GrantTable& t, SessionId session, const AgentRef& peer, const Confirm& confirm, Nanos now_ns) {
             return effects_of([&](Effects& out) { t.on_confirm(session, peer, confirm, now_ns, out); });
           },
           nb::arg("session"), nb::arg("peer"), nb::arg("confirm"), nb::arg("now_ns"))
      .def("on_release",
           [](GrantTable& t, const AgentRef& peer, TransferId id, Nanos now_ns) { return effects_of([&](Effects& out) { t.on_release(peer, id, now_ns, out); }); },
           nb::arg("peer"), nb::arg("id"), nb::arg("now_ns"))
      .def("on_renew", &GrantTable::on_renew, nb::arg("peer"), nb::arg("renew"), nb::arg("now_ns"))
      .def("on_cancel", &GrantTable::on_cancel, nb::arg("session"), nb::arg("cancel"))
      .def("data_sent",
           [](GrantTable& t, SessionId session, TransferId id, uint32_t attempt, uint32_t count, Nanos now_ns) {
             return effects_of([&](Effects& out) { t.data_sent(session, id, attempt, count, now_ns, out); });
           },
           nb::arg("session"), nb::arg("id"), nb::arg("attempt"), nb::arg("count"), nb::arg("now_ns"))
      .def("session_closed", &GrantTable::session_closed, nb::arg("session"))
      .def("reader_dead",
           [](GrantTable& t, const AgentRef& reader, Nanos now_ns) { return effects_of([&](Effects& out) { t.reader_dead(reader, now_ns, out); }); },
           nb::arg("reader"), nb::arg("now_ns"))
      .def("tick", [](GrantTable& t, Nanos now_ns) { return effects_of([&](Effects& out) { t.tick(now_ns, out); }); }, nb::arg("now_ns"))
      .def("next_deadline", &GrantTable::next_deadline)
      .def("counts", &GrantTable::counts);

  // (state, event, state after), or None where the pair is impossible: what docs and tests are generated from.
  m.def("grant_transitions", [] {
    std::vector<std::tuple<GrantState, GrantEvent, std::optional<GrantState>>> rows;
    for (int s = 0; s <= static_cast<int>(GrantState::ReaderGone); ++s) {
      for (int e = 0; e <= static_cast<int>(GrantEvent::ReaderDead); ++e) {
        std::optional<GrantState> after;
        try {
          after = next_state(static_cast<GrantState>(s), static_cast<GrantEvent>(e));
        } catch (const Error&) {
        }
        rows.emplace_back(static_cast<GrantState>(s), static_cast<GrantEvent>(e), after);
      }
    }
    return rows;
  });
  m.def("transfer_transitions", [] {
    std::vector<std::tuple<TransferState, TransferEvent, std::optional<TransferState>>> rows;
    for (int s = 0; s <= static_cast<int>(TransferState::Cancelled); ++s) {
      for (int e = 0; e <= static_cast<int>(TransferEvent::Cancel); ++e) {
        std::optional<TransferState> after;
        try {
          after = next_state(static_cast<TransferState>(s), static_cast<TransferEvent>(e));
        } catch (const Error&) {
        }
        rows.emplace_back(static_cast<TransferState>(s), static_cast<TransferEvent>(e), after);
      }
    }
    return rows;
  });
}

void bind_endpoint(nb::module_& m) {
  nb::class_<Landing>(m, "Landing").def_ro("token", &Landing::token).def_ro("pool", &Landing::pool).def_ro("blocks", &Landing::blocks);
  nb::class_<Endpoint>(m, "Endpoint", "All machines of one agent. Every method that can cause effects returns them, last.")
      .def(nb::init<AgentRef, EndpointLimits>(), nb::arg("agent"), nb::arg("limits"))
      .def_prop_ro("agent", &Endpoint::self)
      .def("set_peer", &Endpoint::set_peer, nb::arg("peer"), nb::arg("key"), nb::arg("control"))
      .def("peer_dead", [](Endpoint& e, const AgentRef& peer, Nanos now_ns) { return effects_of([&](Effects& out) { e.peer_dead(peer, now_ns, out); }); },
           nb::arg("peer"), nb::arg("now_ns"))
      .def("knows", &Endpoint::knows, nb::arg("peer"))
      .def("add_pool", &Endpoint::add_pool, nb::arg("info"))
      .def("remove_pool", &Endpoint::remove_pool, nb::arg("pool"))
      .def("grant",
           [](Endpoint& e, TransferId id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns, uint32_t ready_blocks,
              Nanos now_ns, const Bytes32& content) {
             return effects_of([&](Effects& out) { e.grant(id, pool, std::move(blocks), reader, ttl_ns, ready_blocks, now_ns, out, content); });
           },
           nb::arg("id"), nb::arg("pool"), nb::arg("blocks"), nb::arg("reader"), nb::arg("ttl_ns"), nb::arg("ready_blocks"), nb::arg("now_ns"),
           nb::arg("content") = Bytes32{})
      .def("decline", [](Endpoint& e, TransferId id) { return effects_of([&](Effects& out) { e.decline(id, out); }); }, nb::arg("id"))
      .def("give_up", [](Endpoint& e, TransferId id, const AgentRef& source) { return effects_of([&](Effects& out) { e.give_up(id, source, out); }); },
           nb::arg("id"), nb::arg("source"))
      .def("ready",
           [](Endpoint& e, TransferId id, uint32_t blocks, uint32_t layers, bool complete, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.ready(id, blocks, layers, complete, now_ns, out); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::arg("layers"), nb::arg("complete"), nb::arg("now_ns"))
      .def("end_grant",
           [](Endpoint& e, TransferId id, GrantEvent event, Nanos now_ns) {
             return effects_of([&](Effects& out) { return e.end_grant(id, event, now_ns, out); });
           },
           nb::arg("id"), nb::arg("event"), nb::arg("now_ns"))
      .def("grant_state", &Endpoint::grant_state, nb::arg("id"), nb::arg("now_ns"))
      .def("pull",
           [](Endpoint& e, TransferId id, const AgentRef& source, uint32_t pool, std::vector<uint32_t> blocks, uint32_t first, std::vector<Lane> lanes,
              Nanos deadline_ns, uint64_t nonce_seed, Nanos now_ns, const Bytes32& content) {
             return effects_of([&](Effects& out) {
               e.pull(pool, TransferSpec{id, source, std::move(blocks), first, std::move(lanes), deadline_ns, nonce_seed, content}, now_ns, out);
             });
           },
           nb::arg("id"), nb::arg("source"), nb::arg("pool"), nb::arg("blocks"), nb::arg("first"), nb::arg("lanes"), nb::arg("deadline_ns"),
           nb::arg("nonce_seed"), nb::arg("now_ns"), nb::arg("content") = Bytes32{})
      .def("cancel", [](Endpoint& e, TransferId id, Nanos now_ns) { return effects_of([&](Effects& out) { e.cancel(id, now_ns, out); }); },
           nb::arg("id"), nb::arg("now_ns"))
      .def("transfer_state", &Endpoint::transfer_state, nb::arg("id"))
      .def("notify",
           [](Endpoint& e, const AgentRef& to, const nb::bytes& payload, Nanos now_ns) {
             return effects_of([&](Effects& out) { return e.notify(to, std::string(view(payload)), now_ns, out); });
           },
           nb::arg("to"), nb::arg("payload"), nb::arg("now_ns"))
      .def("dialed",
           [](Endpoint& e, const AgentRef& peer, SessionKind kind, Bytes32 nonce, Nanos now_ns) {
             return effects_of([&](Effects& out) { return e.dialed(peer, kind, nonce, now_ns, out); });
           },
           nb::arg("peer"), nb::arg("kind"), nb::arg("nonce"), nb::arg("now_ns"))
      .def("dial_failed",
           [](Endpoint& e, const AgentRef& peer, SessionKind kind, Code code, const std::string& text, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.dial_failed(peer, kind, code, text, now_ns, out); });
           },
           nb::arg("peer"), nb::arg("kind"), nb::arg("code"), nb::arg("text"), nb::arg("now_ns"))
      .def("accepted",
           [](Endpoint& e, SessionKind kind, Bytes32 nonce, Nanos now_ns) { return effects_of([&](Effects& out) { return e.accepted(kind, nonce, now_ns, out); }); },
           nb::arg("kind"), nb::arg("nonce"), nb::arg("now_ns"))
      .def("closed", [](Endpoint& e, SessionId session, Nanos now_ns) { return effects_of([&](Effects& out) { e.closed(session, now_ns, out); }); },
           nb::arg("session"), nb::arg("now_ns"))
      .def("heard", &Endpoint::heard, nb::arg("session"), nb::arg("now_ns"))
      .def("on_frame",
           [](Endpoint& e, SessionId session, const Frame& frame, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.on_frame(session, frame, now_ns, out); });
           },
           nb::arg("session"), nb::arg("frame"), nb::arg("now_ns"))
      .def("data_sent",
           [](Endpoint& e, SessionId session, TransferId id, uint32_t attempt, uint32_t count, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.data_sent(session, id, attempt, count, now_ns, out); });
           },
           nb::arg("session"), nb::arg("id"), nb::arg("attempt"), nb::arg("count"), nb::arg("now_ns"))
      .def("data_arrives", &Endpoint::data_arrives, nb::arg("session"), nb::arg("data"), nb::arg("now_ns"))
      .def("is_landing", &Endpoint::is_landing, nb::arg("id"), nb::arg("token"))
      .def("read_landed",
           [](Endpoint& e, TransferId id, uint64_t token, Nanos now_ns) { return effects_of([&](Effects& out) { e.read_landed(id, token, now_ns, out); }); },
           nb::arg("id"), nb::arg("token"), nb::arg("now_ns"))
      .def("read_stopped",
           [](Endpoint& e, TransferId id, uint64_t token, Code code, const std::string& text, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.read_stopped(id, token, code, text, now_ns, out); });
           },
           nb::arg("id"), nb::arg("token"), nb::arg("code"), nb::arg("text"), nb::arg("now_ns"))
      .def("tick", [](Endpoint& e, Nanos now_ns) { return effects_of([&](Effects& out) { e.tick(now_ns, out); }); }, nb::arg("now_ns"))
      .def("next_deadline", &Endpoint::next_deadline)
      .def("counts", &Endpoint::counts);
}

}  // namespace
}  // namespace kvxfer

NB_MODULE(KVXFER_MODULE_NAME, m) {
  using namespace kvxfer;
  nb::set_leak_warnings(false);  // whoever exits with objects alive has not done wrong
  m.doc() = "kvxfer's native core. Bad calls and failures raise the exceptions of kvxfer.errors.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const nb::object exception = nb::module_::import_("kvxfer.errors").attr("from_code")(name(error.code()), error.what());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    }
  });
  bind_values(m);
  bind_frames(m);
  bind_effects(m);
  bind_tables(m);
  bind_endpoint(m);
  m.attr("WIRE_VERSION") = kWireVersion;
  m.attr("BODY_MAX") = kBodyMax;
  m.attr("NEVER_NS") = kNever;
  m.def("sha256", [](const nb::bytes& message) { return sha256(view(message)); }, nb::arg("message"));
  m.def("hmac_sha256", [](const nb::bytes& key, const nb::bytes& message) { return hmac_sha256(view(key), view(message)); }, nb::arg("key"), nb::arg("message"));
#ifdef KVXFER_SEEDED_BUGS
  nb::enum_<Bug>(m, "Bug")
      .value("NONE", Bug::none)
      .value("SKIP_CONFIRM", Bug::skip_confirm)
      .value("VERDICT_BEFORE_LAST_BYTE", Bug::verdict_before_last_byte)
      .value("FREE_BEFORE_DRAIN", Bug::free_before_drain)
      .value("COMMIT_TWICE", Bug::commit_twice)
      .value("RENEW_REVIVES", Bug::renew_revives)
      .value("MIX_TWO_SOURCES", Bug::mix_two_sources);
  m.def("seed_bug", [](Bug bug) { seeded_bug() = bug; }, nb::arg("bug"), "Switches one classic bug on; NONE switches it off.");
#else
  bind_core(m);
#endif
}
