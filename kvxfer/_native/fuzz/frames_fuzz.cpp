// The frame decoder on any bytes: it gives frames or one Error(protocol), the same for every cut of the bytes, and each accepted
// frame encodes again to the very bytes it came from.
//
// The first byte decides the cuts; then come chunks: one byte for the kind, one or two for the length, and the bytes. A chunk goes
// in unchanged, or as the body of a frame whose header is made here, so that mutations need not keep a length and a version right.
#include <functional>

#include "input.hpp"
#include "machines/frames.hpp"

using namespace kvxfer;
using namespace kvxfer::fuzz;

namespace {

constexpr uint8_t kRaw = 0x40;      // no header
constexpr uint8_t kLiar = 0x80;     // the length has two bytes, and the header claims it even if the input ends before
constexpr size_t kKindMask = 0x3f;

struct Outcome {
  std::string frames;  // encoded again, with payloads
  std::string error;
  size_t left = 0;
  bool operator==(const Outcome& o) const { return frames == o.frames && error == o.error && left == o.left; }
};

std::string wire_of(Input& input) {
  std::string wire;
  while (!input.is_empty()) {
    const uint8_t what = input.byte();
    const size_t length = (what & kLiar) != 0 ? input.number(2) : input.byte();
    const std::string body = input.bytes(length);
    if ((what & kRaw) == 0) {
      const size_t claimed = (what & kLiar) != 0 ? length : body.size();
      wire += {'K', 'X', static_cast<char>(kWireVersion), static_cast<char>(what & kKindMask)};
      for (int shift = 0; shift < 32; shift += 8) wire.push_back(static_cast<char>(claimed >> shift));
    }
    wire += body;
  }
  return wire;
}

// lists_fuzz checks how an endpoint reads a peer's lists; this checks only that it can.
void try_lists(const Frame& frame) {
  const auto try_list = [](const WireList& wire) {
    try {
      from_wire(wire);
    } catch (const Error& error) {
      check(error.code() == Code::invalid_argument, error.what());
    }
  };
  if (const auto* fetch = std::get_if<Fetch>(&frame)) try_list(fetch->elements);
  if (const auto* push = std::get_if<Push>(&frame)) {
    try_list(push->from);
    try_list(push->to);
  }
}

// As a real connection: takes payload that was fed, and reads the rest past the decoder.
Outcome decode(std::string_view wire, const std::function<size_t()>& next_size) {
  Outcome outcome;
  Decoder decoder;
  size_t at = 0;
  try {
    while (at < wire.size()) {
      const size_t size = std::min(next_size(), wire.size() - at);
      if (decoder.payload_pending() != 0 && decoder.buffered() == 0) {
        const size_t skipped = static_cast<size_t>(std::min<uint64_t>(size, decoder.payload_pending()));
        decoder.skip_payload(skipped);
        outcome.frames += wire.substr(at, skipped);
        at += skipped;
        continue;
      }
      decoder.feed(wire.substr(at, size));
      at += size;
      for (;;) {
        while (decoder.payload_pending() != 0) {
          const std::string_view part = decoder.take_payload(next_size());
          if (part.empty()) break;
          outcome.frames += part;
        }
        if (decoder.payload_pending() != 0) break;
        const std::optional<Frame> frame = decoder.next();
        if (!frame) break;
        const std::string again = encode(*frame);
        check(wire.substr(outcome.frames.size(), again.size()) == again, "an accepted frame encodes to other bytes");
        outcome.frames += again;
        check(again[3] == kind_of(*frame) && *kind_name(*frame) != '\0', "a frame has another kind than its header");
        try_lists(*frame);
      }
      check(decoder.buffered() <= kHeaderBytes + kBodyMax + size, "more is buffered than a frame and what was fed");
    }
    outcome.left = decoder.buffered();
    check(outcome.frames.size() + outcome.left == wire.size(), "bytes were lost");
  } catch (const Error& error) {
    check(error.code() == Code::protocol, error.what());
    outcome.error = error.what();
    try {
      decoder.feed("KX");
      broken("a broken decoder took more");
    } catch (const Error& again) {
      check(again.code() == Code::protocol, again.what());
    }
  }
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  uint64_t cut = input.byte() * 0x9e3779b97f4a7c15ull;
  const std::string wire = wire_of(input);
  const Outcome whole = decode(wire, [&] { return wire.size() + 1; });
  const auto next_size = [&] {
    cut = cut * 6364136223846793005ull + 1442695040888963407ull;
    return 1 + (cut >> 40) % (size_t{1} << (cut >> 33) % 8);
  };
  check(decode(wire, next_size) == whole, "another cut gives something else");
  return 0;
}
