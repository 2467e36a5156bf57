// A peer's description of its memory (MAP), and reads from it: no position of a read leaves the MAP's memory or the memory to fill,
// whatever segments, blocks and elements the peer names; and the keys of lane `ucx`.
#include <map>

#include "frame_maker.hpp"
#include "lanes/copy.hpp"
#include "lanes/read_job.hpp"
#include "lanes/ucx_key.hpp"

using namespace kvxfer;
using namespace kvxfer::fuzz;

namespace {

constexpr uint64_t kTargetBytes = 4096;
constexpr uint64_t kSourceMax = 1ull << 40;
uint8_t* const kBase = reinterpret_cast<uint8_t*>(1ull << 44);  // the pretended address of a source; no byte of it is accessed

// The memory that a MAP on lane `mapped` describes, without a mapping behind it.
class UnmappedMemory final : public RemoteMemory {
 public:
  explicit UnmappedMemory(const Map& map) : RemoteMemory(map) {
    if (bytes() > kSourceMax) throw Error(Code::no_lane, "the source's memory is smaller than it says");
    set_base(kBase + 2 * kSourceMax * map.pool % (1ull << 46));
    check(is_region() == (block_count() == 0) && is_region() == (block_bytes() == 0), "a MAP of blocks that have no place");
  }
  bool holds(const uint8_t* data, size_t size) const { return data >= base() && size <= bytes() && data - base() <= static_cast<int64_t>(bytes() - size); }
  std::unique_ptr<ReadJob> open(ReadBlocks read, RemotePlace from, OwnMemory to) const override;
};

// Visits every position of a read without reading; fills all bytes that the read would fill.
class DryRead final : public ReadJob {
 public:
  DryRead(ReadBlocks read, RemotePlace from, OwnMemory to)
      : ReadJob(std::move(read), std::move(from), std::move(to)), walk_(walk_source(), walk_target()) {}

  bool is_done() const override { return walk_.is_done(); }
  size_t read(size_t max) override {
    Run runs[4];
    size_t done = 0;
    const size_t count = walk_.take(runs, std::size(runs), max, done);
    check(count != 0 && done <= max, "a read portion is empty, or larger than asked");
    for (size_t i = 0; i < count; ++i) {
      const auto& memories = source().memories;
      const auto holds = [&](const auto& memory) { return static_cast<const UnmappedMemory&>(*memory).holds(runs[i].from, runs[i].size); };
      check(std::any_of(memories.begin(), memories.end(), holds), "a read leaves the source's memory");
      std::fill_n(runs[i].to, runs[i].size, uint8_t{7});
    }
    verify(done);
    done_ += done;
    check(done_ <= bytes() && (!is_done() || done_ == bytes()), "a read of other bytes than it fills");
    return done;
  }

 private:
  RunWalk walk_;
  uint64_t done_ = 0;
};

std::unique_ptr<ReadJob> UnmappedMemory::open(ReadBlocks read, RemotePlace from, OwnMemory to) const {
  return std::make_unique<DryRead>(std::move(read), std::move(from), std::move(to));
}

void try_key(const Map& map) {
  try {
    const UcxKeyParts parts = read_ucx_key(map);
    check(!parts.address.empty() && !parts.packed.empty() && write_ucx_key(parts.address, parts.packed) == map.key, "a UCX key reads otherwise than it was written");
  } catch (const Error& error) {
    check(error.code() == Code::no_lane, error.what());
  }
}

Map over_the_wire(const Map& map) {
  Decoder decoder;
  decoder.feed(encode(map));
  return std::get<Map>(decoder.next().value());
}

// Own memory that a read fills: blocks, cut by the input, or regions of kRegionBytes.
struct Target {
  explicit Target(Input& in) {
    layout.base = bytes.data();
    uint64_t at = 0;
    for (size_t i = 1 + in.below(3); i != 0; --i) {
      const uint64_t length = 1 + in.below(100), stride = length + in.below(60);
      layout.segments.push_back({at, stride, length});
      at += stride * kBlockCount;
      block_bytes += length;
    }
    check(at <= kTargetBytes, "the target of this test is too small");
  }
  OwnMemory blocks() const {
    auto pool = std::make_shared<Pool>();
    pool->info = PoolInfo{kPool, kBlockCount, block_bytes};
    pool->layout = layout;
    OwnMemory memory;
    memory.layout = std::shared_ptr<const Layout>(pool, &pool->layout);
    memory.pool = std::move(pool);
    return memory;
  }
  OwnMemory elements(const std::shared_ptr<const Ranges>& ranges) {
    auto bases = std::make_shared<Bases>();
    for (uint32_t i = 0; i < kRegionCount; ++i) bases->add(kRegionFirst + i, bytes.data() + kRegionBytes * i);
    OwnMemory memory;
    memory.layout = std::make_shared<const Layout>(Layout{nullptr, {}, ranges, std::move(bases)});
    return memory;
  }

  std::vector<uint8_t> bytes = std::vector<uint8_t>(kTargetBytes);
  Layout layout;
  uint64_t block_bytes = 0;
};

IdList some_ids(Input& in, size_t count, uint32_t bound) {
  std::vector<uint32_t> ids(count);
  for (uint32_t& id : ids) id = bound != 0 ? static_cast<uint32_t>(in.below(bound)) : in.u32();
  return std::make_shared<const std::vector<uint32_t>>(std::move(ids));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  FrameMaker maker;
  Target target(in);
  std::map<uint32_t, std::shared_ptr<const RemoteMemory>> memories;
  while (!in.is_empty()) {
    try {
      if (in.flag()) {
        Map map = maker.map(in);
        if (in.flag()) map.key = std::string{'\1', static_cast<char>(in.byte()), static_cast<char>(in.below(2))} + map.key;
        map = over_the_wire(map);
        try_key(map);
        map.lane = Lane::Mapped;
        memories[map.pool] = std::make_shared<UnmappedMemory>(map);
        continue;
      }
      ReadBlocks read{TransferId{filled<16>(1)}, 1, 1, Lane::Mapped, {}, {}, {}};
      OwnMemory to;
      if (in.flag()) {
        const uint32_t count = 1 + static_cast<uint32_t>(in.below(6));
        read.from = Extent{kPool, nullptr, some_ids(in, count, 0), 0, count};
        read.to = Extent{kPool, nullptr, some_ids(in, count, kBlockCount), 0, count};
        to = target.blocks();
      } else {
        const ElementList from = from_wire(FrameMaker::list(in)), local = from_wire(FrameMaker::list(in));
        check_alike(local, from);
        Regions regions;
        for (uint32_t i = 0; i < kRegionCount; ++i) regions.add(RegionInfo{kRegionFirst + i, kRegionBytes});
        regions.check(local, RegionUse::Own);
        const auto first = static_cast<uint32_t>(in.below(local.count()));
        read.from = from.part(first, local.count() - first);
        read.to = local.part(first, local.count() - first);
        to = target.elements(local.ranges);
      }
      if (in.below(4) == 0) read.checksums.assign(read.to.count, in.u32());
      const auto remote_of = [&](uint32_t id) {
        const auto found = memories.find(id);
        if (found == memories.end()) throw Error(Code::no_lane, "the source did not share its memory for this lane");
        return found->second;
      };
      const std::unique_ptr<ReadJob> job = open_read(std::move(read), remote_of, std::move(to));
      const size_t portion = 1 + in.byte();
      while (!job->is_done()) job->read(portion);
    } catch (const Error& error) {
      const Code code = error.code();
      check(code == Code::no_lane || code == Code::checksum || code == Code::invalid_argument, error.what());
    }
  }
  return 0;
}
