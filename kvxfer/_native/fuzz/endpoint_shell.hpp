// One endpoint and its shell: performs the endpoint's effects as far as a test can, and checks each. An effect must lie inside the
// owner's memory, each end is reported once, nothing that has ended is confirmed, and nothing is left when all peers and the owner
// are gone.
#pragma once

#include <deque>
#include <utility>

#include "frame_maker.hpp"
#include "machines/endpoint.hpp"
#include "owner_model.hpp"

namespace kvxfer::fuzz {

inline const AgentRef kSelf{"self", 1, filled<16>(9)};
inline const Bytes32 kKeys[] = {filled<32>('a'), filled<32>('b'), filled<32>('g'), filled<32>('x')};
inline const AgentRef kAgents[] = {{"a", 1, filled<16>(1)}, {"a", 2, filled<16>(2)}, {"c", 1, filled<16>(3)}};  // the last one is not registered

constexpr int kTicksMax = 4;  // at one moment

class Shell {
 public:
  Shell(const EndpointLimits& limits, const PoolInfo& pool, PeerAdmission::Kind admission) : endpoint_(kSelf, limits), admission_(admission) {
    endpoint_.add_pool(pool);
    for (uint32_t i = 0; i < kRegionCount; ++i) add_region(i);
    for (int i = 0; i < 2; ++i) endpoint_.set_peer(kAgents[i], kKeys[i], SessionKind::Unix);
    if (admission != PeerAdmission::Kind::RegisteredOnly) endpoint_.admit({admission, kKeys[2]});
    if (admission == PeerAdmission::Kind::DerivedKeys) keys_[2] = session_key(kKeys[2], kSelf, kAgents[2]);
  }

  // All peers and the owner leave; after the longest time limit nothing is left.
  void wind_down() {
    for (PeerConnection& connection : connections_) close(connection);
    stop_reads([](const TransferId&) { return true; });
    for (const AgentRef& agent : kAgents) call([&](Effects& out) { endpoint_.peer_dead(agent, now_, out); });
    for (int round = 0; round < 100 && endpoint_.next_deadline() != kNever; ++round) {
      pass(endpoint_.next_deadline() - now_);
      while (!dials_.empty()) fail_dial(Code::unauthenticated);
    }
    const EndpointCounts counts = endpoint_.counts();
    check(endpoint_.next_deadline() == kNever, "there is always something more to be waited for");
    check(counts.grants.alive == 0 && counts.grants.waiting_pulls == 0, "a grant or a pull outlived all peers and the owner");
    check(counts.transfers_live == 0 && counts.transfers_draining == 0, "a transfer outlived all peers and the owner");
    check(counts.sessions_up == 0 && counts.sessions_opening == 0, "a session outlived its connection");
    check(counts.notifications_pending == 0 && counts.peers == 0, "something of a dead peer is left");
    for (const PoolCounts& pool : counts.pools) check(pool.granted + pool.reserved + pool.quarantined == 0, "a block was not given back");
    for (const RegionCounts& region : counts.regions) check(region.grants + region.transfers == 0, "a claim on a region was not given back");
    model_.check_over();
    endpoint_.remove_pool(kPool);
    for (const uint32_t region : regions_) call([&](Effects& out) { endpoint_.remove_region(region, now_, out); });
  }

 protected:
  struct Incoming {  // a read into own memory that has begun
    TransferId id;
    uint64_t token;
  };
  struct PeerConnection {  // one connection, and its peer's side of it
    SessionId session;
    AgentRef peer;
    Handshake handshake;
    const Bytes32* key;  // that the peer has
    bool has_right_key;
    bool is_open = true;
    std::optional<Hello> heard{};
    Decoder decoder{};
    std::optional<Incoming> landing{};
  };

  // --- calls and their effects ---

  template <class F>
  void call(F&& act) {
    Effects out;
    act(out);
    perform(out);
  }
  // As call(), of the owner, whose call may be refused.
  template <class F>
  bool try_call(F&& act) {
    Effects out;
    bool is_done = true;
    try {
      act(out);
    } catch (const Error& error) {
      check(error.code() != Code::internal, error.what());
      is_done = false;
    }
    perform(out);
    return is_done;
  }

  void perform(Effects& effects) {
    for (Effect& effect : effects) {
      std::visit([this](const auto& e) { model_.told(e); }, effect);
      std::visit([this](auto& e) { perform(e); }, effect);
    }
    while (!over_.empty() || !cut_.empty()) {
      if (!cut_.empty()) {
        const Incoming cut = cut_.front();
        cut_.pop_front();
        stop(cut, Code::transport);
        continue;
      }
      const TransferId id = over_.front();
      over_.pop_front();
      stop_reads([&](const TransferId& other) { return other == id; });
    }
  }
  void perform(const Dial& e) {
    check(endpoint_.knows(e.peer), "an unknown peer is dialed");
    dials_.push_back(e);
  }
  void perform(const Hangup& e) {
    if (PeerConnection* connection = find(e.session)) hung_up(*connection);
  }
  void perform(const SendFrame& e) {
    const std::string wire = encode(e.frame);
    Decoder decoder;
    decoder.feed(wire);
    check(decoder.next().has_value() && decoder.buffered() == 0, "a frame is sent that no decoder takes");
    maker_.heard(e.frame, e.session);
    if (const auto* verdict = std::get_if<Verdict>(&e.frame); verdict != nullptr && verdict->code == Code::ok) {
      const bool is_first = confirmed_.insert({verdict->id, verdict->nonce}).second;
      check(!is_first || endpoint_.grant_state(verdict->id, now_) == GrantState::Alive, "a grant that has ended is confirmed");
      const bool is_sending = std::any_of(sends_.begin(), sends_.end(), [&](const SendData& send) { return send.session == e.session && send.frame.id == verdict->id; });
      check(is_asked_ || !is_sending, "a grant is confirmed before the last byte is out");
    }
    PeerConnection* connection = find(e.session);
    check(connection != nullptr, "something is sent on a session that is gone");
    if (const auto* hello = std::get_if<Hello>(&e.frame)) connection->heard = *hello;
    if (const auto* pull = std::get_if<Pull>(&e.frame)) check_peer(*connection, pull->id);
    if (const auto* fetch = std::get_if<Fetch>(&e.frame)) check_peer(*connection, fetch->pull.id);
    if (const auto* push = std::get_if<Push>(&e.frame)) check_peer(*connection, push->id);
  }
  void perform(const SendMap& e) {
    check(needs_map(e.lane) && (e.pool == kPool || regions_.count(e.pool) != 0), "a MAP of memory that is not there");
  }
  void perform(SendData& e) {
    check(e.frame.count == e.from.count && (e.checksums.empty() || e.checksums.size() == e.from.count), "a DATA frame of other blocks than it says");
    check(e.frame.payload_bytes == check_own(e.from) + (e.frame.has_checksums ? 4 * e.from.count : 0), "a DATA frame of other bytes than it says");
    check(endpoint_.grant_state(e.frame.id, now_) == GrantState::Alive, "blocks are sent that are not granted");
    sends_.push_back(std::move(e));
  }
  void perform(ReadBlocks& e) {
    check(is_one_sided(e.lane) && e.from.count == e.to.count && (e.checksums.empty() || e.checksums.size() == e.to.count), "a read of other blocks than it fills");
    check_own(e.to);
    model_.begin_landing(e.id);
    reads_.push_back(std::move(e));
  }
  void perform(const TransferFinal& e) { over_.push_back(e.id); }
  void perform(const OfferEnded& e) { over_.push_back(e.id); }
  void perform(const SessionUp& e) {
    const PeerConnection* connection = find(e.session);
    check(connection != nullptr && connection->has_right_key && e.peer == connection->peer, "a session is up without a proof");
  }
  template <class T>
  void perform(const T&) {}  // for the owner

  void posted(const TransferId& id, const AgentRef& peer) {
    model_.posted(id);
    peers_[id] = peer;
  }
  // A request of the owner for one incarnation must not reach another. A peer's own pushes are not the owner's requests.
  void check_peer(const PeerConnection& connection, const TransferId& id) const {
    if (endpoint_.transfer_state(id)) check(peers_.at(id) == connection.peer, "a transfer is taken to another peer than it names");
  }

  // Checks that it lies inside own memory; returns the bytes.
  uint64_t check_own(const Extent& extent) {
    uint64_t bytes = 0;
    check(extent.count != 0 && uint64_t{extent.first} + extent.count <= extent.ids->size(), "an extent past its list");
    for (uint32_t i = 0; i < extent.count; ++i) {
      if (!extent.ranges) {
        check(extent.pool == kPool && extent[i] < kBlockCount, "a block outside of its pool");
        bytes += kBlockBytes;
        continue;
      }
      const StridedRange& range = extent.ranges->rows().at(extent.ranges->row_of(extent[i]));
      check(regions_.count(range.region) != 0 && range.end() <= kRegionBytes, "an element outside of its region");
      bytes += range.length;
    }
    return bytes;
  }

  // --- connections ---

  PeerConnection* find(SessionId session) {
    for (PeerConnection& connection : connections_) {
      if (connection.session == session && connection.is_open) return &connection;
    }
    return nullptr;
  }
  // The effects of its start are performed once it is in connections_.
  void add(PeerConnection connection, Effects& out) {
    connections_.push_back(std::move(connection));
    perform(out);
  }
  static size_t number_of(const AgentRef& peer) { return static_cast<size_t>(std::find(std::begin(kAgents), std::end(kAgents), peer) - kAgents); }
  const Bytes32& key_of(const AgentRef& peer) const { return keys_[number_of(peer)]; }
  // What admission.hpp says that a peer that dials us must prove: its own key counts while it is registered.
  Bytes32 key_to_dial_with(const AgentRef& peer) const {
    if (admission_ == PeerAdmission::Kind::BearerKey) return kKeys[2];
    if (admission_ == PeerAdmission::Kind::DerivedKeys && !is_registered_[number_of(peer)]) return session_key(kKeys[2], kSelf, peer);
    return key_of(peer);
  }
  void close(PeerConnection& connection) {
    if (!connection.is_open) return;
    hung_up(connection);
    call([&](Effects& out) { endpoint_.closed(connection.session, now_, out); });
  }
  void hung_up(PeerConnection& connection) {
    connection.is_open = false;
    if (connection.landing) cut_.push_back(*std::exchange(connection.landing, std::nullopt));
    sends_.erase(std::remove_if(sends_.begin(), sends_.end(), [&](const SendData& send) { return send.session == connection.session; }), sends_.end());
  }
  void fail_dial(Code code) {
    const Dial dial = dials_.front();
    dials_.pop_front();
    call([&](Effects& out) { endpoint_.dial_failed(dial.peer, dial.kind, code, "no", now_, out); });
  }

  // As a real connection: stops at the first error.
  void deliver(PeerConnection& connection, const std::string& wire) {
    try {
      connection.decoder.feed(wire);
      while (connection.is_open) {
        if (connection.decoder.payload_pending() != 0) {
          while (!connection.decoder.take_payload(SIZE_MAX).empty()) {
          }
          if (connection.landing && !endpoint_.is_landing(connection.landing->id, connection.landing->token)) stop(*std::exchange(connection.landing, std::nullopt), Code::cancelled);
          if (connection.decoder.payload_pending() != 0) return;
        }
        if (connection.landing) landed(*std::exchange(connection.landing, std::nullopt));
        const std::optional<Frame> frame = connection.decoder.next();
        if (!frame) return;
        model_.heard(*frame);
        is_asked_ = std::holds_alternative<Confirm>(*frame);  // a peer may ask for the verdict before it has all bytes
        call([&](Effects& out) { endpoint_.on_frame(connection.session, *frame, now_, out); });
        is_asked_ = false;
        const auto* data = std::get_if<Data>(&*frame);
        if (data == nullptr || !connection.is_open) continue;
        const Landing landing = endpoint_.data_arrives(connection.session, *data, now_);
        if (landing.token == 0) continue;
        check(data->payload_bytes == check_own(landing.to) + (data->has_checksums ? 4 * landing.to.count : 0), "a payload lands in other memory than it fills");
        model_.begin_landing(data->id);
        connection.landing = Incoming{data->id, landing.token};
      }
    } catch (const Error& error) {
      check(error.code() == Code::protocol, error.what());
      close(connection);
    }
  }

  // --- memory and time ---

  // A region's id is never reused: the machine must refuse that.
  void add_region(uint32_t i) {
    const RegionInfo info{kRegionFirst + i, kRegionBytes, i != 1, i != 2, i == 0, i != 3};
    if (try_call([&](Effects&) { endpoint_.add_region(info); })) {
      check(regions_ever_.insert(info.id).second, "a region's id was taken twice");
      regions_.insert(info.id);
    }
  }
  void landed(const Incoming& over) {
    model_.end_landing(over.id);
    call([&](Effects& out) { endpoint_.read_landed(over.id, over.token, now_, out); });
  }
  void stop(const Incoming& over, Code code) {
    model_.end_landing(over.id);
    call([&](Effects& out) { endpoint_.read_stopped(over.id, over.token, code, "stopped", now_, out); });
  }
  template <class F>
  void stop_reads(F&& is_meant) {
    for (PeerConnection& connection : connections_) {
      if (connection.landing && is_meant(connection.landing->id)) stop(*std::exchange(connection.landing, std::nullopt), Code::cancelled);
    }
    for (size_t i = 0; i < reads_.size();) {
      if (!is_meant(reads_[i].id)) {
        ++i;
        continue;
      }
      const Incoming over{reads_[i].id, reads_[i].token};
      reads_.erase(reads_.begin() + static_cast<std::ptrdiff_t>(i));
      stop(over, Code::cancelled);
      i = 0;
    }
  }

  void pass(Nanos by) {
    now_ += std::clamp<Nanos>(by, 0, 3'600'000 * kMillisecond);
    // Its own results (a session that came up, a read that ended) may make something due at once, but not for ever.
    for (int round = 0; round == 0 || (round < kTicksMax && endpoint_.next_deadline() <= now_); ++round) {
      call([&](Effects& out) { endpoint_.tick(now_, out); });
    }
    check(endpoint_.next_deadline() > now_, "what was due is due again at once");
  }

  Endpoint endpoint_;
  FrameMaker maker_;
  Nanos now_ = 1;
  std::deque<PeerConnection> connections_;
  std::deque<Dial> dials_;
  std::deque<SendData> sends_;
  std::deque<ReadBlocks> reads_;
  std::deque<TransferId> over_;   // transfers that are final now: perform() stops the reads into their blocks
  std::deque<Incoming> cut_;      // reads whose connection is gone: perform() stops them
  std::set<uint32_t> regions_, regions_ever_;
  PeerAdmission::Kind admission_;
  std::array<bool, 3> is_registered_{true, true, false};
  std::array<Bytes32, 4> keys_{kKeys[0], kKeys[1], kKeys[2], kKeys[3]};  // what the agents prove, and a wrong one
  bool is_asked_ = false;  // the endpoint handles a CONFIRM at the moment
  OwnerModel model_;
  std::set<std::pair<TransferId, uint64_t>> confirmed_;
  std::map<TransferId, AgentRef> peers_;  // of the owner's posts
};

}  // namespace kvxfer::fuzz
