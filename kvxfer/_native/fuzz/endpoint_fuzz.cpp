// One endpoint among peers that send anything at any moment, and an owner that calls anything. The input is a program: which side
// connects and proves what, which frames and raw bytes come, what the owner calls, when time passes and how the shell's work ends.
// Whatever the input, calls throw only what they document, and the rules of endpoint_shell.hpp hold.
#include "endpoint_shell.hpp"

using namespace kvxfer;
using namespace kvxfer::fuzz;

namespace {

constexpr size_t kConnectionsMax = 6;

// So small that an input of some hundred bytes reaches each limit.
EndpointLimits small_limits(Input& in) {
  EndpointLimits limits;
  limits.grants.grants_max = 6;
  limits.grants.tombstones_max = 8;
  limits.grants.waiting_max = 4;
  limits.grants.data_bytes_max = 2 * kBlockBytes;
  limits.transfers.read_bytes_max = 2 * kBlockBytes;
  limits.transfers_max = 6;
  limits.finished_max = 4;
  limits.sessions_max = 8;
  limits.notifications_max = 4;
  limits.notification_bytes_max = 64;
  limits.stripes = 1 + in.below(2);
  if (in.below(4) == 0) limits.lanes = static_cast<uint32_t>(in.byte()) | 4;
  return limits;
}

class EndpointWorld : public Shell {
 public:
  EndpointWorld(Input& in, const EndpointLimits& limits, const PoolInfo& pool, PeerAdmission::Kind admission) : Shell(limits, pool, admission), in_(in) {}

  void play() {
    while (!in_.is_empty()) {
      switch (in_.below(10)) {
        case 0: open(); break;
        case 1: answer_dial(); break;
        case 2:
        case 3: say(FrameMaker::with_payload(maker_.make(in_), in_)); break;
        case 7:
        case 8: answer(); break;
        case 4: say(in_.some_bytes()); break;
        case 5: own_act(); break;
        case 6: shell_act(); break;
        default: pass(in_.flag() ? static_cast<Nanos>(in_.any() % 3'600'000) * kMillisecond : endpoint_.next_deadline() - now_); break;
      }
    }
  }

 private:
  // --- connections ---

  void forget_closed() {
    connections_.erase(std::remove_if(connections_.begin(), connections_.end(), [](const PeerConnection& connection) { return !connection.is_open; }), connections_.end());
  }
  PeerConnection* some_connection() {
    forget_closed();
    return connections_.empty() ? nullptr : &connections_[in_.below(connections_.size())];
  }
  static SessionKind kind(Input& in) { return static_cast<SessionKind>(1 + in.below(3)); }

  void open() {
    forget_closed();
    if (connections_.size() >= kConnectionsMax) return close(connections_[in_.below(connections_.size())]);
    const AgentRef& peer = kAgents[in_.below(3)];
    Effects out;
    const Bytes32& key = keys_[in_.below(4)];
    const SessionId session = endpoint_.accepted(kind(in_), filled<32>(1), now_, out);
    add(PeerConnection{session, peer, Handshake(peer, kSelf, filled<32>(2)), &key, key == key_to_dial_with(peer)}, out);
    PeerConnection* connection = find(session);
    if (connection == nullptr || in_.below(8) == 0) return;
    deliver(*connection, encode(connection->handshake.dial_hello()));
    if ((connection = find(session)) != nullptr) shake_hands(*connection);
  }
  void answer_dial() {
    if (dials_.empty()) return;
    if (in_.below(4) == 0) return fail_dial(in_.flag() ? Code::no_lane : Code::unauthenticated);
    const Dial dial = dials_.front();
    dials_.pop_front();
    Effects out;
    const SessionId session = endpoint_.dialed(dial.peer, dial.kind, filled<32>(1), now_, out);
    const Bytes32& key = in_.below(8) == 0 ? keys_[3] : key_of(dial.peer);
    add(PeerConnection{session, dial.peer, Handshake(dial.peer, filled<32>(2)), &key, key == key_of(dial.peer)}, out);
    if (PeerConnection* connection = find(session)) shake_hands(*connection);
  }
  // The peer answers the endpoint's last HELLO with its key. A peer without the right key finds the endpoint's proof wrong. It sends
  // a PROVE all the same, with a wrong proof, which the endpoint must refuse.
  void shake_hands(PeerConnection& connection) {
    if (!connection.heard) return;
    Hello answer{HelloStep::Prove, connection.peer, kSelf, {}, filled<32>(5)};
    try {
      const std::optional<Hello> right = connection.handshake.on_hello(*connection.heard, [&](const AgentRef&) { return *connection.key; });
      if (!right) return;
      answer = *right;
    } catch (const Error& error) {
      check(error.code() != Code::internal && !connection.has_right_key, error.what());
    }
    deliver(connection, encode(answer));
  }

  // --- frames of a peer ---

  void answer() {
    const std::optional<FrameMaker::Answer> answer = maker_.answer(in_);
    if (!answer) return;
    if (PeerConnection* connection = find(answer->by)) deliver(*connection, FrameMaker::with_payload(answer->frame, in_));
  }
  void say(const std::string& wire) {
    if (PeerConnection* connection = some_connection()) deliver(*connection, wire);
  }

  // --- calls of the owner ---

  void own_act() {
    const TransferId id = maker_.own_id(in_);
    const uint32_t region = kRegionFirst + static_cast<uint32_t>(in_.below(kRegionCount));
    switch (in_.below(16)) {
      case 0: {
        std::vector<uint32_t> blocks = some_blocks();
        const uint32_t ready = static_cast<uint32_t>(in_.below(blocks.size() + 1));
        const char* const reader = in_.flag() ? "a" : "";
        const Nanos ttl = static_cast<Nanos>(in_.any() % 700'000) * kMillisecond;
        try_call([&](Effects& out) {
          endpoint_.grant(id, kPool, blocks, reader, ttl, ready, now_, out);
          model_.granted(id);
        });
        return;
      }
      case 1: {
        const uint32_t ready = in_.u32();
        const std::vector<uint32_t> checksums(endpoint_.becoming_ready(id, ready).second.size(), 7);
        try_call([&](Effects& out) { endpoint_.ready(id, ready, 0, in_.flag(), now_, out, checksums); });
        return;
      }
      case 2: try_call([&](Effects& out) { endpoint_.end_grant(id, in_.flag() ? GrantEvent::Revoke : GrantEvent::Release, now_, out); }); return;
      case 3: try_call([&](Effects& out) { endpoint_.abort_grant(id, out); }); return;
      case 4:
      case 5: return pull(id);
      case 6:
      case 7: return post(id);
      case 8: try_call([&](Effects& out) { endpoint_.cancel(id, now_, out); }); return;
      case 9: try_call([&](Effects& out) { endpoint_.abort_pull(id, kAgents[in_.below(3)], now_, out); }); return;
      case 10: {
        const AgentRef& to = kAgents[in_.below(3)];
        const std::string payload = in_.bytes(in_.below(80));
        try_call([&](Effects& out) { endpoint_.notify(to, payload, now_, out); });
        return;
      }
      case 13:
        if (in_.flag()) return endpoint_.pulse(in_.flag(), in_.flag(), now_);
        try_call([&](Effects&) { endpoint_.expect(id, in_.flag() ? "a" : ""); });
        return;
      case 14:
        if (in_.flag()) return call([&](Effects& out) { endpoint_.unreserve(id, now_, out); });
        try_call([&](Effects& out) { endpoint_.reserve(id, some_blocks(), static_cast<uint32_t>(in_.below(4)), now_, out); });
        return;
      case 11: return add_region(region - kRegionFirst);
      case 12:
        if (try_call([&](Effects& out) { endpoint_.remove_region(region, now_, out); })) regions_.erase(region);
        return;
      default: {
        const size_t agent = in_.below(3);
        is_registered_[agent] = !in_.flag();
        if (!is_registered_[agent]) return call([&](Effects& out) { endpoint_.peer_dead(kAgents[agent], now_, out); });
        return endpoint_.set_peer(kAgents[agent], keys_[agent], kind(in_));
      }
    }
  }
  std::vector<uint32_t> some_blocks() {
    std::vector<uint32_t> blocks(1 + in_.below(4));
    const auto first = static_cast<uint32_t>(in_.below(kBlockCount));
    for (uint32_t& block : blocks) block = first + static_cast<uint32_t>(&block - blocks.data());
    return blocks;
  }
  std::vector<Lane> some_lanes() {
    std::vector<Lane> lanes(1 + in_.below(3));
    for (Lane& lane : lanes) lane = FrameMaker::lane(in_);
    return lanes;
  }
  Nanos some_deadline() { return in_.flag() ? kNever : now_ + static_cast<Nanos>(in_.below(256)) * 100 * kMillisecond; }
  void pull(const TransferId& id) {
    TransferSpec spec;
    spec.id = id;
    spec.source = kAgents[in_.below(3)];
    if (in_.flag()) {
      spec.blocks = some_blocks();
    } else {
      spec.count = static_cast<uint32_t>(in_.below(6));
    }
    spec.first = static_cast<uint32_t>(in_.below(4));
    spec.granted_ns = static_cast<Nanos>(in_.below(4)) * 1000 * kMillisecond;
    spec.lanes = some_lanes();
    spec.deadline = some_deadline();
    spec.wants_checksums = in_.flag();
    try_call([&](Effects& out) {
      endpoint_.pull(kPool, spec, now_, out);
      posted(id, spec.source);
    });
  }
  void post(const TransferId& id) {
    PostSpec spec;
    spec.id = id;
    spec.peer = kAgents[in_.below(3)];
    const bool is_push = in_.flag();
    const WireList local = FrameMaker::list(in_), remote = in_.flag() ? local : FrameMaker::list(in_);
    spec.lanes = some_lanes();
    spec.deadline = some_deadline();
    spec.wants_checksums = in_.flag();
    if (in_.flag()) spec.notification = in_.bytes(in_.below(80));
    try_call([&](Effects& out) {
      spec.local = from_wire(local);
      spec.remote = from_wire(remote);
      is_push ? endpoint_.push(spec, now_, out) : endpoint_.fetch(spec, now_, out);
      posted(id, spec.peer);
    });
  }

  // --- results of the shell ---

  void shell_act() {
    switch (in_.below(4)) {
      case 0:
        if (!sends_.empty()) {
          const SendData send = std::move(sends_.front());
          sends_.pop_front();
          if (send.frame.first % 4 == 3) call([&](Effects& out) { endpoint_.data_failed(send.frame.id, send.serial, Code::memory_gone, "gone", now_, out); });
          call([&](Effects& out) { endpoint_.data_sent(send.session, send.frame.id, send.frame.attempt, send.frame.count, send.frame.count % 2 == 0, now_, out); });
        }
        return;
      case 1:
      case 2:
        if (!reads_.empty()) {
          const ReadBlocks read = std::move(reads_.front());
          reads_.pop_front();
          const Incoming over{read.id, read.token};
          const bool is_held = endpoint_.is_landing(read.id, read.token);
          if (is_held && !in_.flag()) return landed(over);
          const Code codes[] = {Code::transport, Code::no_lane, Code::checksum, Code::memory_gone};
          return stop(over, is_held ? codes[in_.below(4)] : Code::cancelled);
        }
        return;
      default:
        if (PeerConnection* connection = some_connection(); connection != nullptr && in_.flag()) return close(*connection);
        return;
    }
  }

  Input& in_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const EndpointLimits limits = small_limits(input);
  const PoolInfo pool{kPool, kBlockCount, kBlockBytes, {}, input.flag(), input.flag(), input.flag()};
  using Kind = PeerAdmission::Kind;
  constexpr Kind kinds[] = {Kind::RegisteredOnly, Kind::BearerKey, Kind::DerivedKeys, Kind::BearerKey};
  EndpointWorld world(input, limits, pool, kinds[input.below(4)]);
  world.play();
  world.wind_down();
  return 0;
}
