// Feeds a decoder with what no peer should send: `kvxfer_fuzz SECONDS [SEED]`, a random seed where none is given;
// `kvxfer_fuzz corpus DIRECTORY` only writes frames to begin with. Random bytes, mutated frames, frames cut at every byte.
// Each must give frames or Error(protocol) and nothing else, and a frame that was accepted must encode again to the very
// bytes it came from. What its lists of ranges claim is then made into pieces, as an endpoint does with them. Prints what
// was tried; exits 1 with the input where a rule is broken.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <utility>

#include "machines/frames.hpp"

using namespace kvxfer;

namespace {

struct Counts {
  uint64_t inputs = 0, frames = 0, refused = 0, kinds[std::variant_size_v<Frame> + 1] = {};
};

using Random = std::mt19937_64;

uint64_t up_to(Random& random, uint64_t last) { return std::uniform_int_distribution<uint64_t>(0, last)(random); }

template <size_t N>
std::array<uint8_t, N> some_bytes(Random& random) {
  std::array<uint8_t, N> bytes;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

std::string some_text(Random& random, size_t max) {
  std::string text(up_to(random, max), '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

Frame some_frame(Random& random) {
  const TransferId id{some_bytes<16>(random)};
  const auto u32 = [&] { return static_cast<uint32_t>(random()); };
  const auto agent = [&] { return AgentRef{some_text(random, kAgentIdMax), random(), some_bytes<16>(random)}; };
  const auto code = [&] { return static_cast<Code>(up_to(random, kCodeCount - 1)); };
  const auto lane = [&] { return static_cast<Lane>(1 + up_to(random, kLaneMax - 1)); };
  const auto flag = [&] { return up_to(random, 1) == 1; };
  const auto numbers = [&](size_t count) {
    std::vector<uint32_t> values(count);
    for (uint32_t& value : values) value = u32();
    return values;
  };
  const auto list = [&] {
    WireList pieces;
    pieces.grids.resize(up_to(random, 12));
    for (Grid& grid : pieces.grids) grid = {u32(), random(), random(), random(), u32()};
    if (flag()) {  // and such as could be meant
      for (Grid& grid : pieces.grids) grid = {u32() % 3, u32(), u32() % 100 + 100, u32() % 100 + 1, u32() % 20 + 1};
    }
    pieces.picks = numbers(up_to(random, 12));
    return pieces;
  };
  const auto pull = [&] { return Pull{id, u32(), random(), lane(), u32(), u32(), random(), some_bytes<32>(random), u32(), some_bytes<32>(random), flag()}; };
  switch (up_to(random, std::variant_size_v<Frame> - 1)) {
    case 0: return Hello{static_cast<HelloStep>(1 + up_to(random, 2)), agent(), agent(), some_bytes<32>(random), some_bytes<32>(random)};
    case 1: return pull();
    case 2: {
      Push push{id, lane(), flag(), u32(), list(), list(), flag(), {}};
      if (push.has_notification) push.notification = some_text(random, 100);
      return push;
    }
    case 3: {
      const size_t count = up_to(random, 40);
      return Ready{id, u32(), u32(), u32(), u32(), u32(), flag(), u32(), u32(), u32(), numbers(count), numbers(flag() ? count : 0)};
    }
    case 4: return Data{id, u32(), u32(), u32(), flag(), flag(), up_to(random, 64)};
    case 5: return Confirm{id, random()};
    case 6: return Verdict{id, random(), code()};
    case 7: return Release{id};
    case 8: return Renew{id, u32(), u32()};
    case 9: return Revoke{id, code()};
    case 10: return Cancel{id, u32()};
    case 11: return Notif{static_cast<NotifKind>(1 + up_to(random, 1)), random(), random(), some_text(random, 300)};
    case 12: return Ping{static_cast<PingKind>(1 + up_to(random, 1)), random()};
    case 13: return ErrorFrame{id, u32(), code(), some_text(random, kTextMax)};
    case 14: return Fetch{pull(), list()};
    case 15: return Done{id, code(), some_text(random, kTextMax)};
    default: {
      Map map{u32(), lane(), random(), random(), u32(), {}, some_text(random, 60)};
      map.segments.resize(up_to(random, 20));
      for (Segment& segment : map.segments) segment = {random(), random(), random()};
      return map;
    }
  }
}

void broken(const char* rule, const std::string& input) {
  std::printf("broken: %s; input of %zu bytes:\n", rule, input.size());
  for (const char c : input) std::printf("%02x", static_cast<unsigned>(static_cast<uint8_t>(c)));
  std::printf("\n");
  std::exit(1);
}

// What an endpoint makes of the lists that a peer sent: pieces inside 2^63, or one error.
void try_lists(const Frame& frame) {
  const auto try_list = [](const WireList& wire) {
    try {
      const PieceList list = from_wire(wire);
      const std::vector<uint32_t> regions = regions_of(list);
      for (uint32_t i = 0; i < std::min(list.count(), 64u); ++i) {
        const Grid& grid = list.ranges->grids()[list.ranges->grid_of((*list.ids)[i])];
        if (grid.end() > 1ull << 63 || grid.end() < grid.offset) broken("an accepted range ends nowhere", "");
        if (!std::binary_search(regions.begin(), regions.end(), grid.region)) broken("a region was forgotten", "");
      }
    } catch (const Error& error) {
      if (error.code() != Code::invalid_argument) broken(error.what(), "");
    }
  };
  if (const auto* fetch = std::get_if<Fetch>(&frame)) try_list(fetch->pieces);
  if (const auto* push = std::get_if<Push>(&frame)) {
    try_list(push->from);
    try_list(push->to);
  }
}

// Decodes `input` in pieces of the sizes that `next_size` gives; returns how many frames came out.
size_t decode(const std::string& input, const std::function<size_t()>& next_size, Counts& counts) {
  Decoder decoder;
  size_t frames = 0, taken = 0;
  ++counts.inputs;
  try {
    for (size_t at = 0; at < input.size();) {
      const size_t size = std::min(next_size(), input.size() - at);
      decoder.feed(std::string_view(input).substr(at, size));
      at += size;
      for (;;) {
        while (decoder.payload_pending() != 0) {
          const size_t got = decoder.take_payload(SIZE_MAX).size();
          if (got == 0) break;
          taken += got;
        }
        if (decoder.payload_pending() != 0) break;
        const std::optional<Frame> frame = decoder.next();
        if (!frame) break;
        const std::string again = encode(*frame);
        if (input.compare(taken, again.size(), again) != 0) broken("an accepted frame encodes to other bytes", input);
        taken += again.size();
        try_lists(*frame);
        ++frames;
        ++counts.kinds[kind_of(*frame)];
      }
    }
    if (decoder.payload_pending() == 0 && taken + decoder.buffered() != input.size()) broken("bytes were lost", input);
  } catch (const Error& error) {
    if (error.code() != Code::protocol) broken(error.what(), input);
    ++counts.refused;
    try {
      decoder.feed("KX");
      broken("a broken decoder took more", input);
    } catch (const Error&) {
    }
  } catch (const std::exception& error) {
    broken(error.what(), input);
  }
  counts.frames += frames;
  return frames;
}

void try_random(Random& random, Counts& counts) {
  std::string input = some_text(random, 200);
  if (up_to(random, 3) != 0) {  // most get past the header
    const uint32_t size = static_cast<uint32_t>(up_to(random, 250));
    const char header[] = {'K', 'X', kWireVersion, static_cast<char>(up_to(random, std::variant_size_v<Frame> + 2)), static_cast<char>(size), 0, 0, 0};
    input.insert(0, header, sizeof header);
  }
  decode(input, [&] { return 1 + up_to(random, 50); }, counts);
}

void try_mutated(Random& random, Counts& counts) {
  std::string input;
  for (uint64_t i = up_to(random, 2) + 1; i != 0; --i) input += encode(some_frame(random));
  for (uint64_t i = up_to(random, 3); i != 0; --i) {
    const size_t at = up_to(random, input.size() - 1);
    switch (up_to(random, 3)) {
      case 0: input[at] = static_cast<char>(random()); break;
      case 1: input[at] = static_cast<char>(input[at] ^ (1 << up_to(random, 7))); break;
      case 2: input.erase(at, up_to(random, 8)); break;
      default: input.insert(at, some_text(random, 8)); break;
    }
    if (input.empty()) return;
  }
  decode(input, [&] { return 1 + up_to(random, 300); }, counts);
}

void try_cut(Random& random, Counts& counts) {
  const Frame frame = some_frame(random);
  std::string input = encode(frame);
  if (const auto* data = std::get_if<Data>(&frame)) input.append(data->payload_bytes, 'p');
  const size_t whole = input.size();
  input += encode(Ping{PingKind::Ask, 1});
  for (size_t cut = 1; cut < whole; ++cut) {
    bool is_first = true;
    const auto sizes = [&] { return std::exchange(is_first, false) ? cut : input.size(); };
    if (decode(input, sizes, counts) != 2) broken("a cut frame was not decoded", input);
    if (decode(input.substr(0, cut), [&] { return cut; }, counts) > (std::holds_alternative<Data>(frame) ? 1u : 0u)) broken("half a frame was decoded", input);
  }
  if (decode(input, [] { return size_t{1}; }, counts) != 2) broken("a frame fed byte by byte was not decoded", input);
}

}  // namespace

// One of each kind of frame and a few more: to begin a coverage-guided fuzzer with.
int write_corpus(const std::string& directory) {
  Random random(1);
  for (int i = 0; i < 400; ++i) {
    const Frame frame = some_frame(random);
    const std::string path = directory + "/" + kind_name(frame) + "-" + std::to_string(i % 4);
    FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) return std::perror(path.c_str()), 1;
    const std::string bytes = encode(frame);
    std::fwrite(bytes.data(), 1, bytes.size(), file);
    std::fclose(file);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "corpus") return write_corpus(argv[2]);
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  Random random(seed);
  Counts counts;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  do {
    for (int i = 0; i < 200; ++i) {
      try_random(random, counts);
      try_mutated(random, counts);
    }
    try_cut(random, counts);
  } while (std::chrono::steady_clock::now() < end);
  std::printf("seed %llu: %llu inputs, %llu frames accepted, %llu inputs refused; frames by kind:", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(counts.inputs), static_cast<unsigned long long>(counts.frames), static_cast<unsigned long long>(counts.refused));
  for (size_t kind = 1; kind <= std::variant_size_v<Frame>; ++kind) std::printf(" %llu", static_cast<unsigned long long>(counts.kinds[kind]));
  std::printf("\n");
  for (size_t kind = 1; kind <= std::variant_size_v<Frame>; ++kind) {
    if (counts.kinds[kind] == 0 && seconds >= 1) broken("a kind of frame was never accepted", "");
  }
  return 0;
}
