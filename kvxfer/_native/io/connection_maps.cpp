// The memory that the two ends of a connection let each other read by one-sided lanes: the maps that the peer gets of ours, and the
// maps that it gave of its own.
#include "connection.hpp"
#include "lanes/mapped.hpp"

namespace kvxfer {
namespace {

constexpr size_t kRemotesMax = 16384;     // pools and regions that one peer may let us read
constexpr size_t kRemoteBytesMax = 8 << 20;  // kept of the peer's maps: segments, keys, reasons
// Readers know this text: the end of the grant follows, which says more than that no lane is left.
constexpr const char* kGone = "the source's memory is not registered any more";

}  // namespace

// --- the peer's ---

void Connection::on_map(const Map& map) {
  Fd descriptor;
  if (map.lane == Lane::Mapped && map.region_bytes != 0 && !descriptors_.empty()) {
    descriptor = std::move(descriptors_.front());
    descriptors_.pop_front();
  }
  const MapKey key{map.pool, map.lane};
  if (remotes_.size() >= kRemotesMax && remotes_.count(key) == 0) return;  // a read that needs it will fail
  RemoteSlot& slot = remotes_[key];
  const bool is_withdrawn = map.region_bytes == 0 && (slot.memory || map.key == kGone);
  remote_bytes_ -= slot.bytes;
  slot = {};
  const size_t bytes = map.segments.size() * sizeof(Segment) + map.key.size();
  if (remote_bytes_ + bytes > kRemoteBytesMax) {
    remotes_.erase(key);
    return;
  }
  remote_bytes_ += slot.bytes = bytes;
  try {
    new_remotes_.push_back(open_remote(map, std::move(descriptor)));
    slot.memory = new_remotes_.back();
    statistics_.mappings.add();
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    slot.refusal = error.what();
    slot.is_withdrawn = is_withdrawn;
    if (!is_withdrawn) statistics_.mappings_refused.add();
  }
}

std::shared_ptr<RemoteMemory> Connection::open_remote(const Map& map, Fd descriptor) {
  if (map.region_bytes == 0) throw Error(Code::no_lane, map.key.empty() ? "the source cannot share this memory" : printable(map.key));
  if (map.lane == Lane::Ucx) {
    if (!tools_.ucx) throw Error(Code::no_lane, "this agent does not use UCX");
    return tools_.ucx->open(session, map);
  }
  if (map.lane != Lane::Mapped && map.lane != Lane::Cma) throw Error(Code::no_lane, "not a one-sided lane");
  if (kind_ != SessionKind::Unix) throw Error(Code::no_lane, "memory of this host is read over a Unix socket only");
  if (map.lane == Lane::Mapped) return open_mapped(map, std::move(descriptor), tools_.copier);
  if (!cma_peer_) cma_peer_ = std::make_shared<CmaPeer>(fd_.get(), peer_nonce_);
  return open_cma(map, cma_peer_, tools_.copier);
}

std::shared_ptr<RemoteMemory> Connection::take_new_remote() {
  if (new_remotes_.empty()) return nullptr;
  const std::shared_ptr<RemoteMemory> memory = std::move(new_remotes_.back());
  new_remotes_.pop_back();
  return memory;
}

std::shared_ptr<const RemoteMemory> Connection::remote(uint32_t id, Lane lane) const {
  const auto found = remotes_.find({id, lane});
  if (found == remotes_.end()) throw Error(Code::no_lane, "the source did not share its memory for this lane");
  // If the memory is gone, the source sends the cause under this transfer's own id, and another lane would fail too.
  if (!found->second.memory) throw Error(found->second.is_withdrawn ? Code::transport : Code::no_lane, found->second.refusal);
  return found->second.memory;
}

// --- ours ---

void Connection::send_map(uint32_t id, Lane lane) {
  std::shared_ptr<Region> region;
  uint64_t serial = 0;
  Map map = describe(id, lane, region, serial);
  uint64_t& sent = maps_sent_[{id, lane}];
  if (serial != 0 && sent == serial) return;
  sent = serial;
  outbox_.push_map(map, std::move(region));
}

void Connection::withdraw_maps(const Withdrawn& gone) {
  for (auto it = maps_sent_.lower_bound({gone.id, Lane{}}); it != maps_sent_.end() && it->first.first == gone.id;) {
    const auto [sent_lane, sent_serial] = std::pair(it->first.second, it->second);
    if (sent_serial > gone.serial) {
      ++it;
      continue;
    }
    it = maps_sent_.erase(it);
    if (session == 0 || sent_serial == 0) continue;
    Map map;
    map.pool = gone.id;
    map.lane = sent_lane;
    map.key = kGone;
    outbox_.push(map);
  }
}

// `serial`: of the described memory; 0 if there is none. `region`: its descriptor goes with the frame.
Map Connection::describe(uint32_t id, Lane lane, std::shared_ptr<Region>& region, uint64_t& serial) const {
  Map map;
  map.pool = id;
  map.lane = lane;
  uint8_t* base = nullptr;
  std::shared_ptr<Region> shared_region;
  std::shared_ptr<UcxMemory> ucx;
  bool is_exposed = false, is_device = false, is_checked = false;
  if (const std::shared_ptr<const OwnRegion> own = shared_.region(id)) {
    serial = OwnRegion::kSerial;
    base = own->base;
    map.region_bytes = own->info.bytes;
    ucx = own->ucx;
    is_exposed = own->info.is_exposed && own->info.can_read;
    is_device = own->device != nullptr;
    if (own->info.is_shareable) shared_region = own->region;
  } else if (const std::shared_ptr<const Pool> pool = shared_.pool(id)) {
    serial = pool->serial;
    base = pool->layout.base;
    map.region_bytes = pool->region_bytes;
    map.block_count = pool->info.block_count;
    map.segments = pool->layout.segments;
    ucx = pool->ucx;
    is_exposed = pool->info.is_exposed;
    is_device = pool->device != nullptr;
    is_checked = pool->info.has_checksums;
    if (pool->info.is_shareable) shared_region = pool->region;
  }
  const auto refuse = [&](const char* why) {
    map.region_bytes = 0;
    map.block_count = 0;
    map.segments.clear();
    map.key = why;
  };
  if (serial == 0) {
    refuse(kGone);
  } else if (is_device && lane != Lane::Ucx) {
    refuse("the source's memory is on a device");
  } else if (is_device && is_checked) {
    refuse("only stream and unix compute checksums of device memory");
  } else if (lane == Lane::Mapped && kind_ == SessionKind::Unix && shared_region) {
    region = std::move(shared_region);
  } else if (lane == Lane::Mapped) {
    refuse("the source's memory cannot be mapped (not allocated by kvxfer, or exposure is grant)");
  } else if (!is_exposed) {
    refuse("the source does not expose its memory (exposure is grant)");
  } else if (lane == Lane::Cma && kind_ == SessionKind::Unix) {
    describe_cma(map, base, shared_.boot_nonce());
  } else if (lane == Lane::Ucx && tools_.ucx && ucx) {
    try {
      tools_.ucx->describe(*ucx, map);
    } catch (const Error& error) {
      if (error.code() != Code::no_lane) throw;
      refuse(error.what());
    }
  } else if (lane == Lane::Ucx && tools_.ucx) {
    refuse(is_device ? "the source's UCX has no CUDA transport, or cannot register this memory" : "the source's UCX cannot register this memory");
  } else {
    refuse("the source does not serve this lane");
  }
  return map;
}

}  // namespace kvxfer
