// The parsing half of the frame codec: the only code that parses bytes of a peer.
#include <algorithm>

#include "frames.hpp"

namespace kvxfer {
namespace {

// Every read checks the length first; `end` refuses a body with bytes left over.
class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  template <class T>
  T number() {
    const std::string_view raw = raw_bytes(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(raw[i])) << (8 * i);
    return static_cast<T>(value);
  }
  bool flag() {
    const auto value = number<uint8_t>();
    if (value > 1) fail("flag is neither 0 nor 1");
    return value == 1;
  }
  template <size_t N>
  std::array<uint8_t, N> bytes() {
    std::array<uint8_t, N> value;
    std::memcpy(value.data(), raw_bytes(N).data(), N);
    return value;
  }
  TransferId id() { return TransferId{bytes<16>()}; }
  Code code() {
    const auto value = number<uint16_t>();
    if (value >= kCodeCount) fail("unknown code");
    return static_cast<Code>(value);
  }
  template <class T>
  T choice(uint8_t last, const char* what) {
    const auto value = number<uint8_t>();
    if (value < 1 || value > last) fail(what);
    return static_cast<T>(value);
  }
  uint8_t turn() {
    const auto value = number<uint8_t>();
    if (value >= kLaneMax) fail("more turns than there are lanes");
    return value;
  }
  std::string text(size_t max, const char* what) {
    const auto size = number<uint32_t>();
    if (size > max) fail(what);
    return std::string(raw_bytes(size));
  }
  AgentRef agent() {
    AgentRef ref;
    ref.agent_id = text(kAgentIdMax, "agent id is too long");
    ref.number = number<uint64_t>();
    ref.boot_nonce = bytes<16>();
    return ref;
  }
  // Checks a list's length against the bytes that are there: no allocation ahead of them.
  size_t count(size_t max, size_t entry_bytes, const char* what) {
    const auto value = number<uint32_t>();
    if (value > max || value * entry_bytes > in_.size()) fail(what);
    return value;
  }
  // A list of numbers, whose bytes count() has checked.
  std::vector<uint32_t> numbers(size_t count) {
    const std::string_view raw = raw_bytes(count * 4);
    std::vector<uint32_t> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = Reader(raw.substr(4 * i, 4)).number<uint32_t>();
    return values;
  }
  WireList list() {
    WireList value;
    const uint64_t rows = number<uint32_t>(), indices = number<uint32_t>();
    const uint64_t size = rows * kRangeBytes + indices * 4;
    if (size > kListBytesMax || size > in_.size()) fail("list of ranges is too long");
    value.rows.resize(rows);
    for (StridedRange& range : value.rows) {
      range.region = number<uint32_t>();
      range.offset = number<uint64_t>();
      range.stride = number<uint64_t>();
      range.length = number<uint64_t>();
      range.count = number<uint32_t>();
    }
    value.indices = numbers(indices);
    return value;
  }
  void end() const {
    if (!in_.empty()) fail("body is longer than its frame");
  }
  [[noreturn]] static void fail(const char* what) { throw Error(Code::protocol, std::string("malformed frame: ") + what); }

 private:
  std::string_view raw_bytes(size_t size) {
    if (size > in_.size()) fail("body is shorter than its frame");
    const std::string_view raw = in_.substr(0, size);
    in_.remove_prefix(size);
    return raw;
  }
  std::string_view in_;
};

Pull read_pull(Reader& r) {
  Pull f;
  f.id = r.id();
  f.attempt = r.number<uint32_t>();
  f.nonce = r.number<uint64_t>();
  f.lane = r.choice<Lane>(kLaneMax, "unknown lane");
  f.first = r.number<uint32_t>();
  f.count = r.number<uint32_t>();
  f.block_bytes = r.number<uint64_t>();
  f.digest = r.bytes<32>();
  f.wait_ms = r.number<uint32_t>();
  f.content_digest = r.bytes<32>();
  f.wants_checksums = r.flag();
  return f;
}

Frame read_body(uint8_t kind, Reader& r) {
  switch (kind) {
    case 1: {
      Hello f;
      f.step = r.choice<HelloStep>(3, "unknown hello step");
      f.self = r.agent();
      f.peer = r.agent();
      f.nonce = r.bytes<32>();
      f.mac = r.bytes<32>();
      return f;
    }
    case 2: return read_pull(r);
    case 3: {
      Push f;
      f.id = r.id();
      f.lane = r.choice<Lane>(kLaneMax, "unknown lane");
      f.wants_checksums = r.flag();
      f.deadline_ms = r.number<uint32_t>();
      f.has_notification = r.flag();
      f.notification = r.text(f.has_notification ? kNotifPieceMax : 0, "notification is too long");
      f.from = r.list();
      f.to = r.list();
      f.turn = r.turn();
      f.is_last = r.flag();
      return f;
    }
    case 4: {
      Ready f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      f.seq = r.number<uint32_t>();
      f.blocks = r.number<uint32_t>();
      f.layers = r.number<uint32_t>();
      f.total = r.number<uint32_t>();
      f.complete = r.flag();
      f.ttl_ms = r.number<uint32_t>();
      f.pool = r.number<uint32_t>();
      f.ids_first = r.number<uint32_t>();
      const auto count = r.count(kIdsMax, 4, "too many block ids");
      const bool has_checksums = r.flag();
      if (has_checksums && count == 0) Reader::fail("checksums of no block");
      f.ids = r.numbers(count);
      if (has_checksums) f.checksums = r.numbers(count);
      return f;
    }
    case 5: {
      Data f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      f.first = r.number<uint32_t>();
      f.count = r.number<uint32_t>();
      f.complete = r.flag();
      const auto kind = r.number<uint8_t>();
      if (kind > kDataIsZeroCopy) Reader::fail("unknown kind of payload");
      f.has_checksums = kind == kDataHasChecksums;
      f.is_zero_copy = kind == kDataIsZeroCopy;
      f.payload_bytes = r.number<uint64_t>();
      if (f.payload_bytes > kPayloadMax) Reader::fail("payload is over its bound");
      return f;
    }
    case 6: {
      Confirm f;
      f.id = r.id();
      f.nonce = r.number<uint64_t>();
      return f;
    }
    case 7: {
      Verdict f;
      f.id = r.id();
      f.nonce = r.number<uint64_t>();
      f.code = r.code();
      return f;
    }
    case 8: return Release{r.id()};
    case 9: {
      Renew f;
      f.id = r.id();
      f.seq = r.number<uint32_t>();
      f.ttl_ms = r.number<uint32_t>();
      return f;
    }
    case 10: {
      Revoke f;
      f.id = r.id();
      f.code = r.code();
      f.text = r.text(kTextMax, "reason is too long");
      return f;
    }
    case 11: {
      Cancel f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      return f;
    }
    case 12: {
      Notif f;
      f.kind = r.choice<NotifKind>(3, "unknown notification kind");
      f.seq = r.number<uint64_t>();
      f.oldest = r.number<uint64_t>();
      f.payload = r.text(kNotifPieceMax, "notification is too long");
      if (f.kind != NotifKind::Deliver) f.begin = r.number<uint32_t>();
      if (f.kind != NotifKind::Part) return f;
      f.total = r.number<uint32_t>();
      if (f.payload.empty() || f.total > kNotificationMax || f.begin > f.total || f.payload.size() > f.total - f.begin) {
        Reader::fail("part of a notification beyond its end");
      }
      return f;
    }
    case 13: {
      Ping f;
      f.kind = r.choice<PingKind>(2, "unknown ping kind");
      f.token = r.number<uint64_t>();
      return f;
    }
    case 14: {
      ErrorFrame f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      f.code = r.code();
      f.text = r.text(kTextMax, "error text is too long");
      return f;
    }
    case 15: {
      Map f;
      f.pool = r.number<uint32_t>();
      f.lane = r.choice<Lane>(kLaneMax, "unknown lane");
      f.region_bytes = r.number<uint64_t>();
      f.address = r.number<uint64_t>();
      f.block_count = r.number<uint32_t>();
      f.segments.resize(r.count(kSegmentsMax, 24, "too many segments"));
      for (Segment& segment : f.segments) {
        segment.offset = r.number<uint64_t>();
        segment.stride = r.number<uint64_t>();
        segment.length = r.number<uint64_t>();
      }
      f.key = r.text(kMapKeyMax, "MAP key is too long");
      return f;
    }
    case 16: {
      Fetch f;
      f.pull = read_pull(r);
      f.elements = r.list();
      return f;
    }
    case 17: {
      Done f;
      f.id = r.id();
      f.code = r.code();
      f.text = r.text(kTextMax, "error text is too long");
      f.turn = r.turn();
      f.checked = r.number<uint32_t>();
      return f;
    }
    case 18: {
      Queued f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      f.is_known = r.flag();
      f.position = r.number<uint32_t>();
      f.has_work = r.flag();
      f.age_ms = r.number<uint32_t>();
      return f;
    }
    default: Reader::fail("unknown kind");
  }
}

}  // namespace

void Decoder::check_usable() const {
  if (is_broken_) throw Error(Code::protocol, "this stream failed before");
}

void Decoder::feed(std::string_view bytes) {
  check_usable();
  if (begin_ == buffer_.size()) {
    buffer_.clear();
    begin_ = 0;
  } else if (begin_ > kBodyMax) {
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  buffer_.append(bytes);
}

std::optional<Frame> Decoder::next() {
  check_usable();
  if (payload_pending_ != 0) throw Error(Code::invalid_argument, "consume the payload before the next frame");
  try {
    if (buffered() < kHeaderBytes) return std::nullopt;
    const std::string_view all = std::string_view(buffer_).substr(begin_);
    Reader header(all.substr(0, kHeaderBytes));
    if (header.number<uint8_t>() != 'K' || header.number<uint8_t>() != 'X') Reader::fail("wrong magic");
    const auto version = header.number<uint8_t>();
    if (version != kWireVersion) {
      throw Error(Code::protocol, "peer speaks wire version " + std::to_string(version) + ", this is " + std::to_string(kWireVersion));
    }
    const auto kind = header.number<uint8_t>();
    const auto size = header.number<uint32_t>();
    if (size > kBodyMax) Reader::fail("body is over its bound");
    if (all.size() < kHeaderBytes + size) return std::nullopt;
    Reader body(all.substr(kHeaderBytes, size));
    Frame frame = read_body(kind, body);
    body.end();
    begin_ += kHeaderBytes + size;
    if (const auto* data = std::get_if<Data>(&frame)) payload_pending_ = data->payload_bytes;
    return frame;
  } catch (const Error&) {
    is_broken_ = true;
    throw;
  }
}

std::string_view Decoder::take_payload(size_t max) {
  check_usable();
  const size_t size = static_cast<size_t>(std::min<uint64_t>({max, buffered(), payload_pending_}));
  const std::string_view view = std::string_view(buffer_).substr(begin_, size);
  begin_ += size;
  payload_pending_ -= size;
  return view;
}

void Decoder::skip_payload(uint64_t bytes) {
  check_usable();
  if (buffered() != 0 || bytes > payload_pending_) throw Error(Code::invalid_argument, "payload bytes were not read from the socket");
  payload_pending_ -= bytes;
}

}  // namespace kvxfer
