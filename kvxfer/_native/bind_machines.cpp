// The machines as Python sees them: the same classes that the IO thread drives, one call an event, effects as objects.
#include "bind_casters.hpp"
#include "machines/sha256.hpp"

namespace kvxfer {
namespace {

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
  nb::enum_<Lane>(m, "Lane").value("MAPPED", Lane::Mapped).value("STREAM", Lane::Stream).value("MEMORY", Lane::Memory)
      .value("CMA", Lane::Cma).value("UCX", Lane::Ucx).value("UNIX", Lane::Unix);
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
      .value("GRANTED", TransferState::Granted)
      .value("READING", TransferState::Reading)
      .value("CONFIRMING", TransferState::Confirming)
      .value("COMMITTED", TransferState::Committed)
      .value("FAILED", TransferState::Failed)
      .value("CANCELLED", TransferState::Cancelled);
  nb::enum_<TransferEvent>(m, "TransferEvent")
      .value("SESSION_UP", TransferEvent::SessionUp)
      .value("SESSION_UP_LANDED", TransferEvent::SessionUpLanded)
      .value("GRANTED", TransferEvent::Granted)
      .value("RESERVED", TransferEvent::Reserved)
      .value("KNOWN", TransferEvent::Known)
      .value("HEARD", TransferEvent::Heard)
      .value("LANDED", TransferEvent::Landed)
      .value("LANDED_ALL", TransferEvent::LandedAll)
      .value("SESSION_LOST", TransferEvent::SessionLost)
      .value("VERDICT_OK", TransferEvent::VerdictOk)
      .value("FAIL", TransferEvent::Fail)
      .value("CANCEL", TransferEvent::Cancel);
  nb::enum_<PushEvent>(m, "PushEvent")
      .value("SESSION_UP", PushEvent::SessionUp)
      .value("SESSION_LOST", PushEvent::SessionLost)
      .value("DONE", PushEvent::Done)
      .value("FAIL", PushEvent::Fail)
      .value("CANCEL", PushEvent::Cancel);
  nb::enum_<HelloStep>(m, "HelloStep").value("DIAL", HelloStep::Dial).value("ACCEPT", HelloStep::Accept).value("PROVE", HelloStep::Prove);
  nb::enum_<NotifKind>(m, "NotifKind").value("DELIVER", NotifKind::Deliver).value("ACK", NotifKind::Ack).value("PART", NotifKind::Part);
  nb::enum_<PingKind>(m, "PingKind").value("ASK", PingKind::Ask).value("ANSWER", PingKind::Answer);
  nb::enum_<Code> code(m, "Code");
  for (uint16_t i = 0; i < kCodeCount; ++i) code.value(name(static_cast<Code>(i)), static_cast<Code>(i));

  nb::class_<AgentRef>(m, "AgentRef", "One incarnation of one agent.")
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
  nb::class_<PeerAdmission>(m, "PeerAdmission", "What unregistered peers must prove to be admitted. Without one, they are refused.")
      .def_static("bearer_key", [](const Bytes32& key) { return PeerAdmission{PeerAdmission::Kind::BearerKey, key}; }, nb::arg("key"),
                  "These 32 bytes, which also registered peers prove when they dial. A peer may use any name.")
      .def_static("derived_keys", [](const Bytes32& cluster_secret) { return PeerAdmission{PeerAdmission::Kind::DerivedKeys, cluster_secret}; },
                  nb::arg("cluster_secret"), "The session key of both incarnations, derived from these 32 bytes.");
}

void bind_effects(nb::module_& m) {
  nb::class_<Dial>(m, "Dial").def_ro("peer", &Dial::peer).def_ro("kind", &Dial::kind);
  nb::class_<Hangup>(m, "Hangup").def_ro("session", &Hangup::session).def_ro("code", &Hangup::code).def_ro("text", &Hangup::text);
  nb::class_<SendFrame>(m, "SendFrame").def_ro("session", &SendFrame::session).def_ro("frame", &SendFrame::frame);
  nb::class_<SendMap>(m, "SendMap").def_ro("session", &SendMap::session).def_ro("pool", &SendMap::pool).def_ro("lane", &SendMap::lane);
  nb::class_<SendData>(m, "SendData").def_ro("session", &SendData::session).def_ro("frame", &SendData::frame).def_ro("source", &SendData::from)
      .def_ro("checksums", &SendData::checksums).def_ro("serial", &SendData::serial)
      .def_prop_ro("pool", [](const SendData& e) { return e.from.pool; })
      .def_prop_ro("blocks", [](const SendData& e) { return ids_of(e.from); });
  nb::class_<ReadBlocks>(m, "ReadBlocks").def_ro("id", &ReadBlocks::id).def_ro("token", &ReadBlocks::token).def_ro("session", &ReadBlocks::session)
      .def_ro("lane", &ReadBlocks::lane).def_ro("source", &ReadBlocks::from).def_ro("to", &ReadBlocks::to).def_ro("checksums", &ReadBlocks::checksums)
      .def_prop_ro("remote_pool", [](const ReadBlocks& e) { return e.from.pool; })
      .def_prop_ro("from_blocks", [](const ReadBlocks& e) { return ids_of(e.from); })
      .def_prop_ro("pool", [](const ReadBlocks& e) { return e.to.pool; })
      .def_prop_ro("to_blocks", [](const ReadBlocks& e) { return ids_of(e.to); });
  nb::class_<StopRead>(m, "StopRead").def_ro("id", &StopRead::id);
  nb::class_<GrantEnded>(m, "GrantEnded").def_ro("id", &GrantEnded::id).def_ro("state", &GrantEnded::state);
  nb::class_<TransferProgress>(m, "TransferProgress").def_ro("id", &TransferProgress::id).def_ro("state", &TransferProgress::state)
      .def_ro("done", &TransferProgress::done).def_ro("total", &TransferProgress::total);
  nb::class_<TransferGranted>(m, "TransferGranted").def_ro("id", &TransferGranted::id);
  nb::class_<TransferFinal>(m, "TransferFinal").def_ro("id", &TransferFinal::id).def_ro("state", &TransferFinal::state).def_ro("code", &TransferFinal::code)
      .def_ro("text", &TransferFinal::text).def_ro("lane", &TransferFinal::lane).def_ro("lane_notes", &TransferFinal::lane_notes)
      .def_ro("attempts", &TransferFinal::attempts).def_ro("blocks_done", &TransferFinal::blocks_done)
      .def_ro("blocks_before_complete", &TransferFinal::blocks_before_complete).def_ro("queue_ns", &TransferFinal::queue_ns)
      .def_ro("wire_ns", &TransferFinal::wire_ns).def_ro("confirm_ns", &TransferFinal::confirm_ns).def_ro("blocks_checked", &TransferFinal::blocks_checked)
      .def_ro("session", &TransferFinal::session);
  nb::class_<TransferDrained>(m, "TransferDrained").def_ro("id", &TransferDrained::id);
  nb::class_<OfferEnded>(m, "OfferEnded").def_ro("id", &OfferEnded::id).def_ro("sender", &OfferEnded::from).def_ro("state", &OfferEnded::state)
      .def_ro("code", &OfferEnded::code).def_ro("lane", &OfferEnded::lane).def_ro("bytes", &OfferEnded::bytes);
  nb::class_<NotifReceived>(m, "NotifReceived").def_ro("sender", &NotifReceived::from).def_ro("seq", &NotifReceived::seq)
      .def_prop_ro("payload", [](const NotifReceived& e) { return to_bytes(e.payload); });
  nb::class_<NotifDelivered>(m, "NotifDelivered").def_ro("receiver", &NotifDelivered::to).def_ro("seq", &NotifDelivered::seq);
  nb::class_<NotifFailed>(m, "NotifFailed").def_ro("receiver", &NotifFailed::to).def_ro("seq", &NotifFailed::seq).def_ro("code", &NotifFailed::code);
  nb::class_<SessionUp>(m, "SessionUp").def_ro("session", &SessionUp::session).def_ro("peer", &SessionUp::peer).def_ro("kind", &SessionUp::kind);
}

template <class State, class Event>
std::vector<std::tuple<State, Event, std::optional<State>>> transitions(State last_state, Event last_event) {
  std::vector<std::tuple<State, Event, std::optional<State>>> rows;
  for (int s = 0; s <= static_cast<int>(last_state); ++s) {
    for (int e = 0; e <= static_cast<int>(last_event); ++e) {
      std::optional<State> after;
      try {
        after = next_state(static_cast<State>(s), static_cast<Event>(e));
      } catch (const Error&) {
      }
      rows.emplace_back(static_cast<State>(s), static_cast<Event>(e), after);
    }
  }
  return rows;
}

void bind_tables(nb::module_& m) {
  nb::class_<PoolInfo>(m, "PoolInfo")
      .def("__init__",
           [](PoolInfo* p, uint32_t id, uint32_t block_count, uint64_t block_bytes, Bytes32 digest, bool is_shareable, bool is_exposed, bool has_checksums) {
             new (p) PoolInfo{id, block_count, block_bytes, digest, is_shareable, is_exposed, has_checksums};
           },
           nb::arg("id"), nb::arg("block_count"), nb::arg("block_bytes"), nb::arg("digest"), nb::arg("is_shareable"),
           nb::arg("is_exposed") = false, nb::arg("has_checksums") = false);
  nb::class_<Ledger>(m, "Ledger").def(nb::init<PoolInfo>(), nb::arg("info"))
      .def("grant", &Ledger::grant, nb::arg("blocks")).def("end_grant", &Ledger::end_grant, nb::arg("blocks"))
      .def("reserve", &Ledger::reserve, nb::arg("blocks")).def("quarantine", &Ledger::quarantine, nb::arg("blocks"))
      .def("give_back", &Ledger::give_back, nb::arg("blocks"))
      .def("is_reserved", &Ledger::is_reserved, nb::arg("block")).def("is_granted", &Ledger::is_granted, nb::arg("block"))
      .def_prop_ro("granted_count", &Ledger::granted_count).def_prop_ro("reserved_count", &Ledger::reserved_count)
      .def_prop_ro("quarantined_count", &Ledger::quarantined_count);

  nb::class_<GrantLimits>(m, "GrantLimits").def(nb::init<>())
      .def_rw("grants_max", &GrantLimits::grants_max).def_rw("tombstones_max", &GrantLimits::tombstones_max).def_rw("waiting_max", &GrantLimits::waiting_max)
      .def_rw("ttl_ns", &GrantLimits::ttl_ns).def_rw("lifetime_max_ns", &GrantLimits::lifetime_max_ns).def_rw("wait_max_ns", &GrantLimits::wait_max_ns)
      .def_rw("unknown_wait_ns", &GrantLimits::unknown_wait_ns).def_rw("queued_every_ns", &GrantLimits::queued_every_ns)
      .def_rw("away_max_ns", &GrantLimits::away_max_ns)
      .def_rw("data_bytes_max", &GrantLimits::data_bytes_max);
  nb::class_<TransferLimits>(m, "TransferLimits").def(nb::init<>())
      .def_rw("stall_ns", &TransferLimits::stall_ns).def_rw("reconnect_ns", &TransferLimits::reconnect_ns).def_rw("ttl_ns", &TransferLimits::ttl_ns)
      .def_rw("engine_silent_ns", &TransferLimits::engine_silent_ns).def_rw("read_bytes_max", &TransferLimits::read_bytes_max);
  nb::class_<EndpointLimits>(m, "EndpointLimits").def(nb::init<>())
      .def_rw("grants", &EndpointLimits::grants).def_rw("transfers", &EndpointLimits::transfers).def_rw("transfers_max", &EndpointLimits::transfers_max)
      .def_rw("finished_max", &EndpointLimits::finished_max).def_rw("sessions_max", &EndpointLimits::sessions_max)
      .def_rw("refusals_max", &EndpointLimits::refusals_max)
      .def_rw("notifications_max", &EndpointLimits::notifications_max).def_rw("notification_bytes_max", &EndpointLimits::notification_bytes_max)
      .def_rw("notification_queue_bytes_max", &EndpointLimits::notification_queue_bytes_max)
      .def_rw("notification_piece_bytes", &EndpointLimits::notification_piece_bytes)
      .def_rw("handshake_ns", &EndpointLimits::handshake_ns).def_rw("stripes", &EndpointLimits::stripes)
      .def_rw("lanes", &EndpointLimits::lanes, "The lanes that this agent reads by and serves: bit `1 << lane` for each.");
  nb::class_<GrantCounts>(m, "GrantCounts").def_ro("alive", &GrantCounts::alive).def_ro("waiting_pulls", &GrantCounts::waiting_pulls)
      .def_ro("expected", &GrantCounts::expected).def_ro("unread", &GrantCounts::unread).def_ro("unread_blocks", &GrantCounts::unread_blocks)
      .def_ro("released", &GrantCounts::released).def_ro("expired", &GrantCounts::expired).def_ro("revoked", &GrantCounts::revoked)
      .def_ro("reader_gone", &GrantCounts::reader_gone).def_ro("verdicts_ok", &GrantCounts::verdicts_ok)
      .def_ro("verdicts_refused", &GrantCounts::verdicts_refused).def_ro("refused", &GrantCounts::refused);
  nb::class_<PoolCounts>(m, "PoolCounts").def_ro("pool", &PoolCounts::pool).def_ro("blocks", &PoolCounts::blocks).def_ro("granted", &PoolCounts::granted)
      .def_ro("reserved", &PoolCounts::reserved).def_ro("quarantined", &PoolCounts::quarantined);
  nb::class_<RegionCounts>(m, "RegionCounts").def_ro("region", &RegionCounts::region).def_ro("bytes", &RegionCounts::bytes)
      .def_ro("grants", &RegionCounts::grants).def_ro("transfers", &RegionCounts::transfers);
  nb::class_<EndpointCounts>(m, "EndpointCounts").def_ro("grants", &EndpointCounts::grants).def_ro("pools", &EndpointCounts::pools)
      .def_ro("regions", &EndpointCounts::regions)
      .def_ro("pulls_unknown", &EndpointCounts::pulls_unknown).def_ro("pulls_queued", &EndpointCounts::pulls_queued)
      .def_ro("pulls_granted", &EndpointCounts::pulls_granted)
      .def_ro("transfers_live", &EndpointCounts::transfers_live).def_ro("transfers_draining", &EndpointCounts::transfers_draining)
      .def_ro("sessions_up", &EndpointCounts::sessions_up).def_ro("sessions_opening", &EndpointCounts::sessions_opening)
      .def_ro("peers", &EndpointCounts::peers).def_ro("notifications_pending", &EndpointCounts::notifications_pending);

  nb::class_<GrantTable>(m, "GrantTable")
      .def(nb::init<GrantLimits>(), nb::arg("limits"))
      .def("grant",
           [](GrantTable& t, TransferId id, Ledger& ledger, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns, Nanos now_ns,
              const Bytes32& content_digest) {
             return effects_of([&](Effects& out) { t.grant(id, ledger, std::move(blocks), reader, ttl_ns, now_ns, out, content_digest); });
           },
           nb::arg("id"), nb::arg("ledger"), nb::arg("blocks"), nb::arg("reader"), nb::arg("ttl_ns"), nb::arg("now_ns"),
           nb::arg("content_digest") = Bytes32{}, nb::keep_alive<1, 3>())
      .def("expect", &GrantTable::expect, nb::arg("id"), nb::arg("reader"))
      .def("pulse", &GrantTable::pulse, nb::arg("has_work"), nb::arg("took_in"), nb::arg("now_ns"))
      .def("has_begun", &GrantTable::has_begun, nb::arg("id"))
      .def("abort_grant", [](GrantTable& t, TransferId id) { return effects_of([&](Effects& out) { t.abort_grant(id, out); }); }, nb::arg("id"))
      .def("ready",
           [](GrantTable& t, TransferId id, uint32_t blocks, uint32_t layers, bool complete, Nanos now_ns, const std::vector<uint32_t>& checksums) {
             return effects_of([&](Effects& out) { t.ready(id, blocks, layers, complete, now_ns, out, checksums); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::arg("layers"), nb::arg("complete"), nb::arg("now_ns"), nb::arg("checksums") = std::vector<uint32_t>{})
      .def("end",
           [](GrantTable& t, TransferId id, GrantEvent event, Nanos now_ns, const std::string& why) {
             return effects_of([&](Effects& out) { return t.end(id, event, now_ns, out, why); });
           },
           nb::arg("id"), nb::arg("event"), nb::arg("now_ns"), nb::arg("why") = "")
      .def("bind", &GrantTable::bind, nb::arg("id"), nb::arg("reader"), nb::arg("now_ns"))
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
           [](GrantTable& t, SessionId session, TransferId id, uint32_t attempt, uint32_t count, Nanos now_ns, bool is_zero_copy) {
             return effects_of([&](Effects& out) { t.data_sent(session, id, attempt, count, is_zero_copy, now_ns, out); });
           },
           nb::arg("session"), nb::arg("id"), nb::arg("attempt"), nb::arg("count"), nb::arg("now_ns"), nb::arg("is_zero_copy") = false)
      .def("data_failed",
           [](GrantTable& t, TransferId id, Code code, const std::string& text, Nanos now_ns, uint64_t serial) {
             return effects_of([&](Effects& out) { t.data_failed(id, serial, code, text, now_ns, out); });
           },
           nb::arg("id"), nb::arg("code"), nb::arg("text"), nb::arg("now_ns"), nb::arg("serial") = 0)
      .def("session_closed", &GrantTable::session_closed, nb::arg("session"), nb::arg("now"))
      .def("reader_dead",
           [](GrantTable& t, const AgentRef& reader, Nanos now_ns) { return effects_of([&](Effects& out) { t.reader_dead(reader, now_ns, out); }); },
           nb::arg("reader"), nb::arg("now_ns"))
      .def("tick", [](GrantTable& t, Nanos now_ns) { return effects_of([&](Effects& out) { t.tick(now_ns, out); }); }, nb::arg("now_ns"))
      .def("next_deadline", &GrantTable::next_deadline)
      .def("counts", &GrantTable::counts);

  // (state, event, state after), or None where the pair is impossible: what docs and tests are generated from.
  m.def("grant_transitions", [] { return transitions<GrantState, GrantEvent>(GrantState::ReaderGone, GrantEvent::ReaderDead); });
  m.def("transfer_transitions", [] { return transitions<TransferState, TransferEvent>(TransferState::Cancelled, TransferEvent::Cancel); });
  m.def("push_transitions", [] { return transitions<TransferState, PushEvent>(TransferState::Cancelled, PushEvent::Cancel); });
}

template <void (Endpoint::*Act)(PostSpec, Nanos, Effects&)>
Effects post(Endpoint& e, TransferId id, const AgentRef& peer, const PyRanges& local, std::vector<uint32_t> local_ids, const PyRanges& remote,
             std::vector<uint32_t> remote_ids, std::vector<Lane> lanes, Nanos deadline_ns, uint64_t nonce_seed, Nanos now_ns,
             const std::optional<nb::bytes>& notification, bool wants_checksums) {
  const auto list = [](const PyRanges& ranges, std::vector<uint32_t> ids) {
    return ElementList{ranges.ranges, std::make_shared<const std::vector<uint32_t>>(std::move(ids))};
  };
  PostSpec spec{id, peer, list(local, std::move(local_ids)), list(remote, std::move(remote_ids)), std::move(lanes), deadline_ns, nonce_seed, wants_checksums, {}};
  if (notification) spec.notification = std::string(view(*notification));
  return effects_of([&](Effects& out) { (e.*Act)(std::move(spec), now_ns, out); });
}

void bind_endpoint(nb::module_& m) {
  nb::class_<Landing>(m, "Landing").def_ro("token", &Landing::token).def_ro("to", &Landing::to)
      .def_prop_ro("pool", [](const Landing& l) { return l.to.pool; })
      .def_prop_ro("blocks", [](const Landing& l) { return ids_of(l.to); });
  nb::class_<Endpoint>(m, "Endpoint", "All machines of one agent. Every method that can cause effects returns them, last.")
      .def(nb::init<AgentRef, EndpointLimits>(), nb::arg("agent"), nb::arg("limits"))
      .def_prop_ro("agent", &Endpoint::self)
      .def("set_peer", &Endpoint::set_peer, nb::arg("peer"), nb::arg("key"), nb::arg("control"))
      .def("peer_dead", [](Endpoint& e, const AgentRef& peer, Nanos now_ns) { return effects_of([&](Effects& out) { e.peer_dead(peer, now_ns, out); }); },
           nb::arg("peer"), nb::arg("now_ns"))
      .def("knows", &Endpoint::knows, nb::arg("peer"))
      .def("add_pool",
           [](Endpoint& e, const PoolInfo& info, uint64_t base, const std::vector<SegmentTuple>& segments) {
             e.add_pool(info, {base, to_segments(segments)});
           },
           nb::arg("info"), nb::arg("base") = 0, nb::arg("segments") = std::vector<SegmentTuple>{},
           "`base` and `segments` (offset, stride, length): where its blocks lie. Those that share bytes with blocks of another pool are busy while\n"
           "those are.")
      .def("set_digest", &Endpoint::set_digest, nb::arg("pool"), nb::arg("digest"))
      .def("remove_pool", &Endpoint::remove_pool, nb::arg("pool"))
      .def("grant",
           [](Endpoint& e, TransferId id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns, uint32_t ready_blocks,
              Nanos now_ns, const Bytes32& content_digest) {
             return effects_of([&](Effects& out) { e.grant(id, pool, std::move(blocks), reader, ttl_ns, ready_blocks, now_ns, out, content_digest); });
           },
           nb::arg("id"), nb::arg("pool"), nb::arg("blocks"), nb::arg("reader"), nb::arg("ttl_ns"), nb::arg("ready_blocks"), nb::arg("now_ns"),
           nb::arg("content_digest") = Bytes32{})
      .def("expect", &Endpoint::expect, nb::arg("id"), nb::arg("reader"))
      .def("pulse", &Endpoint::pulse, nb::arg("has_work"), nb::arg("took_in"), nb::arg("now_ns"))
      .def("has_begun", &Endpoint::has_begun, nb::arg("id"))
      .def("reserve",
           [](Endpoint& e, TransferId id, std::vector<uint32_t> blocks, uint32_t first, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.reserve(id, std::move(blocks), first, now_ns, out); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::arg("first"), nb::arg("now_ns"))
      .def("unreserve", [](Endpoint& e, TransferId id, Nanos now_ns) { return effects_of([&](Effects& out) { return e.unreserve(id, now_ns, out); }); },
           nb::arg("id"), nb::arg("now_ns"))
      .def("abort_grant", [](Endpoint& e, TransferId id) { return effects_of([&](Effects& out) { e.abort_grant(id, out); }); }, nb::arg("id"))
      .def("abort_pull",
           [](Endpoint& e, TransferId id, const AgentRef& source, Nanos now_ns) {
             return effects_of([&](Effects& out) { e.abort_pull(id, source, now_ns, out); });
           },
           nb::arg("id"), nb::arg("source"), nb::arg("now_ns"))
      .def("ready",
           [](Endpoint& e, TransferId id, uint32_t blocks, uint32_t layers, bool complete, Nanos now_ns, const std::vector<uint32_t>& checksums) {
             return effects_of([&](Effects& out) { e.ready(id, blocks, layers, complete, now_ns, out, checksums); });
           },
           nb::arg("id"), nb::arg("blocks"), nb::arg("layers"), nb::arg("complete"), nb::arg("now_ns"), nb::arg("checksums") = std::vector<uint32_t>{})
      .def("end_grant",
           [](Endpoint& e, TransferId id, GrantEvent event, Nanos now_ns, const std::string& why) {
             return effects_of([&](Effects& out) { return e.end_grant(id, event, now_ns, out, why); });
           },
           nb::arg("id"), nb::arg("event"), nb::arg("now_ns"), nb::arg("why") = "")
      .def("bind_grant", &Endpoint::bind_grant, nb::arg("id"), nb::arg("reader"), nb::arg("now_ns"))
      .def("grant_state", &Endpoint::grant_state, nb::arg("id"), nb::arg("now_ns"))
      .def("is_granted", &Endpoint::is_granted, nb::arg("id"), nb::arg("serial"), nb::arg("now_ns"))
      .def("pull",
           [](Endpoint& e, TransferId id, const AgentRef& source, uint32_t pool, std::vector<uint32_t> blocks, uint32_t first, std::vector<Lane> lanes,
              Nanos deadline_ns, uint64_t nonce_seed, Nanos now_ns, const Bytes32& content_digest, bool wants_checksums, uint32_t count, Nanos granted_ns,
              bool tells_granted) {
             return effects_of([&](Effects& out) {
               TransferSpec spec{id, source, std::move(blocks), count, first, std::move(lanes), deadline_ns, tells_granted, granted_ns, nonce_seed, content_digest, wants_checksums, {}};
               e.pull(pool, std::move(spec), now_ns, out);
             });
           },
           nb::arg("id"), nb::arg("source"), nb::arg("pool"), nb::arg("blocks"), nb::arg("first"), nb::arg("lanes"), nb::arg("deadline_ns"),
           nb::arg("nonce_seed"), nb::arg("now_ns"), nb::arg("content_digest") = Bytes32{}, nb::arg("wants_checksums") = false, nb::arg("count") = 0,
           nb::arg("granted_ns") = 0, nb::arg("tells_granted") = false)
      .def("becoming_ready", &Endpoint::becoming_ready, nb::arg("id"), nb::arg("blocks"),
           "The pool, and the blocks that `ready(id, blocks)` would newly announce, if the owner must supply their CRC-32Cs.")
      .def("admit", &Endpoint::admit, nb::arg("admission"))
      .def("is_connected", &Endpoint::is_connected, nb::arg("peer"))
      .def("add_region", &Endpoint::add_region, nb::arg("info"), nb::arg("base") = 0)
      .def("remove_region",
           [](Endpoint& e, uint32_t region, Nanos now_ns) {  // blocks_busy has effects too: it is a value here
             return effects_of([&](Effects& out) {
               try {
                 e.remove_region(region, now_ns, out);
               } catch (const Error& error) {
                 if (error.code() != Code::blocks_busy) throw;
                 return false;
               }
               return true;
             });
           },
           nb::arg("region"), nb::arg("now_ns"), "True: it is removed. False: busy; call again once reads into it have drained.")
      .def("fetch", &post<&Endpoint::fetch>, nb::arg("id"), nb::arg("peer"), nb::arg("local"), nb::arg("local_ids"), nb::arg("remote"),
           nb::arg("remote_ids"), nb::arg("lanes"), nb::arg("deadline_ns"), nb::arg("nonce_seed"), nb::arg("now_ns"),
           nb::arg("notification") = nb::none(), nb::arg("wants_checksums") = false)
      .def("push", &post<&Endpoint::push>, nb::arg("id"), nb::arg("peer"), nb::arg("local"), nb::arg("local_ids"), nb::arg("remote"),
           nb::arg("remote_ids"), nb::arg("lanes"), nb::arg("deadline_ns"), nb::arg("nonce_seed"), nb::arg("now_ns"),
           nb::arg("notification") = nb::none(), nb::arg("wants_checksums") = false)
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
           [](Endpoint& e, SessionId session, TransferId id, uint32_t attempt, uint32_t count, Nanos now_ns, bool is_zero_copy, uint64_t serial) {
             return effects_of([&](Effects& out) { e.data_sent(session, id, attempt, count, is_zero_copy, now_ns, out, serial); });
           },
           nb::arg("session"), nb::arg("id"), nb::arg("attempt"), nb::arg("count"), nb::arg("now_ns"), nb::arg("is_zero_copy") = false,
           nb::arg("serial") = 0)
      .def("data_failed",
           [](Endpoint& e, TransferId id, Code code, const std::string& text, Nanos now_ns, uint64_t serial) {
             return effects_of([&](Effects& out) { e.data_failed(id, serial, code, text, now_ns, out); });
           },
           nb::arg("id"), nb::arg("code"), nb::arg("text"), nb::arg("now_ns"), nb::arg("serial") = 0)
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
  nb::set_leak_warnings(false);  // a program may exit with objects alive
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
  bind_ranges(m);
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
      .value("VERDICT_OF_ZERO_COPY", Bug::verdict_of_zero_copy)
      .value("FREE_BEFORE_DRAIN", Bug::free_before_drain)
      .value("COMMIT_TWICE", Bug::commit_twice)
      .value("RENEW_REVIVES", Bug::renew_revives)
      .value("MIX_TWO_SOURCES", Bug::mix_two_sources)
      .value("PUSH_WITHOUT_OFFER", Bug::push_without_offer)
      .value("NOTIFY_BEFORE_COMMIT", Bug::notify_before_commit)
      .value("CONFIRM_UNREADABLE", Bug::confirm_unreadable)
      .value("VERDICT_OF_BEFORE", Bug::verdict_of_before);
  m.def("seed_bug", [](Bug bug) { seeded_bug() = bug; }, nb::arg("bug"), "Switches one classic bug on; NONE switches it off.");
#else
  bind_core(m);
#endif
}
