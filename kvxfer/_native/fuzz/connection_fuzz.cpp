// A whole core without its thread: the event loop, its connections and its reads, between a peer's sockets and an owner's memory.
// The input is a program: peers connect, prove themselves and send anything, with descriptors or without; the owner grants, pulls
// and pushes. Whatever the input, the loop does not fail, no byte of memory changes without a permission to write it, and the loop
// ends.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <csignal>
#include <utility>

#include "io/event_loop.hpp"
#include "io/sockets.hpp"
#include "frame_maker.hpp"
#include "lanes/stream.hpp"
#include "owner_model.hpp"

using namespace kvxfer;
using namespace kvxfer::fuzz;

namespace {

static_assert(kNoChecksumOfWire == kNoChecksum);
constexpr size_t kConnectionsMax = 4;
constexpr uint8_t kUntouched = 0x5a;
constexpr uint32_t kReadOnly = kRegionFirst + 2;  // no peer may write into this region
const AgentRef kSelf{"self", 1, filled<16>(9)};
const AgentRef kAgents[] = {{"a", 1, filled<16>(1)}, {"b", 1, filled<16>(2)}};
const Bytes32 kKey = filled<32>('k');

// What the peers have, in this process: made once, and removed when the process ends.
struct PeerSide {
  PeerSide() {
    std::signal(SIGPIPE, SIG_IGN);
    const char* const temporary = std::getenv("TMPDIR");
    path = std::string(temporary != nullptr ? temporary : "/tmp") + "/kvxfer-fuzz-" + std::to_string(::getpid()) + ".sock";
    listener = listen_unix(path);
  }
  ~PeerSide() { ::unlink(path.c_str()); }

  std::string path;          // where the peers listen
  Fd listener;
  Region shared{4096, true, HugePages::Never};  // a peer's own memory, as the mapped lane wants it
  std::vector<uint8_t> memory = std::vector<uint8_t>(4096, 0x77);  // and as cma reads it
};

PeerSide& peer_side() {
  static PeerSide instance;
  return instance;
}

// A listener at an abstract address that the kernel chooses, so that runs in parallel do not collide.
Fd listen_nameless(sockaddr_un& address, socklen_t& size) {
  Fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  address = {};
  address.sun_family = AF_UNIX;
  size = sizeof address;
  const bool is_bound = ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address.sun_family) == 0 &&
                        ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0 && ::listen(listener.get(), 8) == 0;
  check(is_bound, "no socket can be had");
  return listener;
}

LaneTools tools() {
  LaneTools tools;
  tools.copier = std::make_shared<Copier>();
  tools.staging = std::make_unique<Staging>();
  return tools;
}

EndpointLimits limits_of(Input& in) {
  EndpointLimits limits;
  limits.grants.data_bytes_max = 2 * kBlockBytes;
  limits.transfers.read_bytes_max = 2 * kBlockBytes;
  limits.sessions_max = 16;
  limits.stripes = 1 + in.below(2);
  return limits;
}

class ConnectionWorld {
 public:
  explicit ConnectionWorld(Input& in) : in_(in), limits_(limits_of(in)), shared_(kSelf, limits_) {
    Fd tcp = listen_nameless(addresses_[0], address_bytes_[0]), local = listen_nameless(addresses_[1], address_bytes_[1]);
    loop_ = std::make_unique<EventLoop>(shared_, statistics_, limits_, tools(), mutex_, std::move(tcp), std::move(local));
    const uint64_t half = kBlockBytes / 2;
    Layout layout{pool_.data(), {{0, half, half}, {half * kBlockCount, half, half}}, nullptr, nullptr};
    const PoolInfo info{kPool, kBlockCount, kBlockBytes, {}, false, in.flag(), in.flag()};
    shared_.add_pool(Pool{info, std::move(layout), pool_.size(), nullptr, 0, nullptr, nullptr});
    for (uint32_t i = 0; i < kRegionCount; ++i) {
      const RegionInfo region{kRegionFirst + i, kRegionBytes, i != 1, kRegionFirst + i != kReadOnly, false, i != 3};
      regions_[i].assign(kRegionBytes, kUntouched);
      shared_.add_region(OwnRegion{region, regions_[i].data(), nullptr, nullptr, nullptr});
    }
    for (const AgentRef& agent : kAgents) shared_.set_peer(agent, kKey, PeerAddress{"", 0, peer_side().path});
  }

  void play() {
    while (!in_.is_empty()) {
      SocketConnection* connection = nullptr;
      switch (in_.below(10)) {
        case 0: connect(); break;
        case 1:
        case 2: say(FrameMaker::with_payload(maker_.make(in_), in_)); break;
        case 3: say(in_.some_bytes()); break;
        case 4: map(); break;
        case 5: own_act(); break;
        case 6:
          if ((connection = some_connection()) != nullptr) hear(*connection);
          break;
        case 7:
        case 8: answer(); break;
        default:
          if ((connection = some_connection()) != nullptr && in_.below(4) == 0) connections_.erase(connections_.begin() + (connection - connections_.data()));
          break;
      }
      step();
    }
  }

  void end() {
    for (SocketConnection& connection : connections_) hear(connection);
    connections_.clear();
    step();
    shared_.shut("");
    loop_->run();
    check(!shared_.has_failed(), "the loop failed");
    loop_.reset();
    take_events();
    const auto is_untouched = [](const std::vector<uint8_t>& bytes) { return std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == kUntouched; }); };
    check(is_untouched(regions_[kReadOnly - kRegionFirst]), "a peer changed memory that it may only read");
    for (uint32_t block = 0; block < kBlockCount; ++block) {
      if (pulled_.count(block) != 0) continue;
      for (const uint64_t part : {uint64_t{0}, kBlockCount * kBlockBytes / 2}) {
        const auto at = pool_.begin() + static_cast<std::ptrdiff_t>(part + block * kBlockBytes / 2);
        check(std::all_of(at, at + kBlockBytes / 2, [](uint8_t b) { return b == kUntouched; }), "a block changed that nothing was pulled into");
      }
    }
  }

 private:
  struct SocketConnection {
    Fd fd;
    AgentRef peer;
    Handshake handshake;
    Decoder heard{}, said{};
  };

  void step() {
    accept_dialed();
    loop_->progress(false);
    loop_->progress(true);
    check(!shared_.has_failed(), "the loop failed");
    take_events();
  }
  void take_events() {
    for (const OwnerEvent& event : shared_.take_events()) std::visit([this](const auto& e) { model_.told(e); }, event);
  }

  // --- peers ---

  SocketConnection* some_connection() { return connections_.empty() ? nullptr : &in_.pick(connections_); }

  void connect() {
    if (connections_.size() >= kConnectionsMax) return;
    const size_t kind = in_.below(2);
    const AgentRef& peer = kAgents[in_.below(2)];
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&addresses_[kind]), address_bytes_[kind]) != 0) return;
    connections_.push_back({std::move(fd), peer, Handshake(peer, kSelf, filled<32>(2))});
    if (in_.below(8) == 0) return;
    send(connections_.back(), encode(connections_.back().handshake.dial_hello()));
    step();
    hear(connections_.back());
    step();
  }
  void accept_dialed() {
    Fd fd(::accept4(peer_side().listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd || connections_.size() >= kConnectionsMax) return;
    const AgentRef& peer = kAgents[in_.below(2)];
    connections_.push_back({std::move(fd), peer, Handshake(peer, filled<32>(2))});
  }

  // Handles received frames, and answers a HELLO.
  void hear(SocketConnection& connection) {
    char buffer[16384];
    for (ssize_t got; (got = ::recv(connection.fd.get(), buffer, sizeof buffer, MSG_DONTWAIT)) > 0;) {
      connection.heard.feed({buffer, static_cast<size_t>(got)});
      for (;;) {
        while (!connection.heard.take_payload(SIZE_MAX).empty()) {
        }
        if (connection.heard.payload_pending() != 0) break;
        const std::optional<Frame> frame = connection.heard.next();
        if (!frame) break;
        maker_.heard(*frame, static_cast<uint64_t>(connection.fd.get()));
        if (const auto* hello = std::get_if<Hello>(&*frame)) answer(connection, *hello);
      }
    }
  }
  void answer(SocketConnection& connection, const Hello& hello) {
    try {
      if (const std::optional<Hello> answer = connection.handshake.on_hello(hello, [](const AgentRef&) { return kKey; })) send(connection, encode(*answer));
    } catch (const Error& error) {
      check(error.code() != Code::internal, error.what());  // accept_dialed() may answer as another agent than the core dialed
    }
  }

  void answer() {
    const std::optional<FrameMaker::Answer> answer = maker_.answer(in_);
    if (!answer) return;
    for (SocketConnection& connection : connections_) {
      if (static_cast<uint64_t>(connection.fd.get()) == answer->by) send(connection, FrameMaker::with_payload(answer->frame, in_));
    }
  }
  void say(const std::string& wire) {
    if (SocketConnection* connection = some_connection()) send(*connection, wire);
  }
  // Tells the model of the frames in these bytes, before the core gets them.
  void note(SocketConnection& connection, const std::string& wire) {
    try {
      connection.said.feed(wire);
      for (;;) {
        while (!connection.said.take_payload(SIZE_MAX).empty()) {
        }
        if (connection.said.payload_pending() != 0) return;
        const std::optional<Frame> frame = connection.said.next();
        if (!frame) return;
        model_.heard(*frame);
      }
    } catch (const Error& error) {
      check(error.code() == Code::protocol, error.what());
    }
  }
  void send(SocketConnection& connection, const std::string& wire, int descriptor = -1) {
    if (wire.empty()) return;
    note(connection, wire);
    iovec vector{const_cast<char*>(wire.data()), wire.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof descriptor);
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    if (::sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;  // the core has hung up, or stopped reading
  }

  // Memory of a peer that really exists: at the claimed address, or near it.
  void map() {
    SocketConnection* const connection = some_connection();
    if (connection == nullptr) return;
    Map map = maker_.map(in_);
    map.lane = in_.flag() ? Lane::Mapped : Lane::Cma;
    int descriptor = -1;
    if (map.lane == Lane::Mapped) {
      descriptor = in_.below(4) == 0 ? connection->fd.get() : peer_side().shared.fd();
    } else {
      map.address = reinterpret_cast<uintptr_t>(peer_side().memory.data()) + in_.below(64);
      const auto place = reinterpret_cast<uintptr_t>(connection->peer.boot_nonce.data()) + (in_.below(8) == 0 ? 1 : 0);
      map.key.clear();
      for (int shift = 0; shift < 64; shift += 8) map.key.push_back(static_cast<char>(place >> shift));
    }
    send(*connection, encode(map), in_.below(8) == 0 ? -1 : descriptor);
  }

  // --- the owner ---

  template <class F>
  void act(F&& act) {
    try {
      shared_.act(std::forward<F>(act));
    } catch (const Error& error) {
      check(error.code() != Code::internal, error.what());
    }
  }
  template <class Spec>
  Spec some_spec(const TransferId& id) {
    Spec spec;
    spec.id = id;
    spec.lanes = {FrameMaker::lane(in_), FrameMaker::lane(in_)};
    spec.wants_checksums = in_.flag();
    return spec;
  }
  void own_act() {
    const TransferId id = maker_.own_id(in_);
    const AgentRef& peer = kAgents[in_.below(2)];
    std::vector<uint32_t> blocks(1 + in_.below(3));
    const auto first = static_cast<uint32_t>(in_.below(kBlockCount - 2));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = first + static_cast<uint32_t>(i);
    switch (in_.below(6)) {
      case 0:
        return act([&](Endpoint& endpoint, Nanos now, Effects& out) {
          endpoint.grant(id, kPool, blocks, "", 60'000 * kMillisecond, static_cast<uint32_t>(blocks.size()), now, out);
          model_.granted(id);
        });
      case 1:
      case 2: {
        auto spec = some_spec<TransferSpec>(id);
        spec.source = peer;
        spec.blocks = blocks;
        return act([&](Endpoint& endpoint, Nanos now, Effects& out) {
          endpoint.pull(kPool, spec, now, out);
          pulled_.insert(blocks.begin(), blocks.end());
          model_.posted(id);
        });
      }
      case 3:
      case 4: {
        auto spec = some_spec<PostSpec>(id);
        spec.peer = peer;
        const WireList local = FrameMaker::list(in_), remote = in_.flag() ? local : FrameMaker::list(in_);
        const bool is_fetch = std::none_of(local.rows.begin(), local.rows.end(), [](const StridedRange& range) { return range.region == kReadOnly; });
        return act([&](Endpoint& endpoint, Nanos now, Effects& out) {
          spec.local = from_wire(local);
          spec.remote = from_wire(remote);
          is_fetch && in_.flag() ? endpoint.fetch(spec, now, out) : endpoint.push(spec, now, out);
          model_.posted(id);
        });
      }
      default: return act([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.cancel(id, now, out); });
    }
  }

  Input& in_;
  const EndpointLimits limits_;
  // Own memory, exactly as long as it is registered: an access past it is detected.
  std::vector<uint8_t> pool_ = std::vector<uint8_t>(kBlockCount * kBlockBytes, kUntouched);
  std::vector<uint8_t> regions_[kRegionCount];
  SharedEndpoint shared_;
  Statistics statistics_;
  std::mutex mutex_;
  sockaddr_un addresses_[2];
  socklen_t address_bytes_[2];
  std::unique_ptr<EventLoop> loop_;
  FrameMaker maker_;
  OwnerModel model_;
  std::set<uint32_t> pulled_;  // blocks
  std::vector<SocketConnection> connections_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  ConnectionWorld world(input);
  world.play();
  world.end();
  return 0;
}
