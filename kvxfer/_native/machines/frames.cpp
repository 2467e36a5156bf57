#include "frames.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

class Writer {
 public:
  template <class T>
  void number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) out_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  void flag(bool value) { number<uint8_t>(value ? 1 : 0); }
  template <size_t N>
  void bytes(const std::array<uint8_t, N>& value) {
    out_.append(reinterpret_cast<const char*>(value.data()), N);
  }
  void id(const TransferId& value) { bytes(value.raw); }
  void code(Code value) { number(static_cast<uint16_t>(value)); }
  void text(std::string_view value, size_t max, const char* what) {
    if (value.size() > max) throw Error(Code::invalid_argument, std::string(what) + " is over " + std::to_string(max) + " bytes");
    number(static_cast<uint32_t>(value.size()));
    out_.append(value);
  }
  void agent(const AgentRef& value) {
    text(value.agent_id, kAgentIdMax, "agent id");
    number(value.number);
    bytes(value.boot_nonce);
  }
  void count(size_t value, size_t max, const char* what) {
    if (value > max) throw Error(Code::invalid_argument, std::string(what) + " has over " + std::to_string(max) + " entries");
    number(static_cast<uint32_t>(value));
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

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
  // A list's length is believed only as far as the body really holds it: no allocation ahead of the bytes.
  size_t count(size_t max, size_t entry_bytes, const char* what) {
    const auto value = number<uint32_t>();
    if (value > max || value * entry_bytes > in_.size()) fail(what);
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

struct BodyWriter {
  Writer& w;
  void operator()(const Hello& f) {
    w.number(static_cast<uint8_t>(f.step));
    w.agent(f.self);
    w.agent(f.peer);
    w.bytes(f.nonce);
    w.bytes(f.mac);
  }
  void operator()(const Pull& f) {
    w.id(f.id);
    w.number(f.attempt);
    w.number(f.nonce);
    w.number(static_cast<uint8_t>(f.lane));
    w.number(f.first);
    w.number(f.count);
    w.number(f.block_bytes);
    w.bytes(f.digest);
    w.number(f.wait_ms);
    w.bytes(f.content);
  }
  void operator()(const Push& f) {
    w.id(f.id);
    w.number(f.count);
  }
  void operator()(const Ready& f) {
    w.id(f.id);
    w.number(f.attempt);
    w.number(f.seq);
    w.number(f.blocks);
    w.number(f.layers);
    w.number(f.total);
    w.flag(f.complete);
    w.number(f.ttl_ms);
    w.number(f.pool);
    w.number(f.ids_first);
    w.count(f.ids.size(), kIdsMax, "READY");
    for (uint32_t block : f.ids) w.number(block);
  }
  void operator()(const Data& f) {
    w.id(f.id);
    w.number(f.attempt);
    w.number(f.first);
    w.number(f.count);
    w.flag(f.complete);
    if (f.payload_bytes > kPayloadMax) throw Error(Code::invalid_argument, "DATA payload is over its bound");
    w.number(f.payload_bytes);
  }
  void operator()(const Confirm& f) {
    w.id(f.id);
    w.number(f.nonce);
  }
  void operator()(const Verdict& f) {
    w.id(f.id);
    w.number(f.nonce);
    w.code(f.code);
  }
  void operator()(const Release& f) { w.id(f.id); }
  void operator()(const Renew& f) {
    w.id(f.id);
    w.number(f.seq);
    w.number(f.ttl_ms);
  }
  void operator()(const Revoke& f) {
    w.id(f.id);
    w.code(f.code);
  }
  void operator()(const Cancel& f) {
    w.id(f.id);
    w.number(f.attempt);
  }
  void operator()(const Notif& f) {
    w.number(static_cast<uint8_t>(f.kind));
    w.number(f.seq);
    w.number(f.oldest);
    w.text(f.payload, kNotificationMax, "notification");
  }
  void operator()(const Ping& f) {
    w.number(static_cast<uint8_t>(f.kind));
    w.number(f.token);
  }
  void operator()(const ErrorFrame& f) {
    w.id(f.id);
    w.number(f.attempt);
    w.code(f.code);
    w.text(std::string_view(f.text).substr(0, kTextMax), kTextMax, "error text");
  }
  void operator()(const Map& f) {
    w.number(f.pool);
    w.number(f.region_bytes);
    w.number(f.block_count);
    w.count(f.segments.size(), kSegmentsMax, "MAP");
    for (const Segment& segment : f.segments) {
      w.number(segment.offset);
      w.number(segment.stride);
      w.number(segment.length);
    }
  }
};

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
    case 2: {
      Pull f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      f.nonce = r.number<uint64_t>();
      f.lane = r.choice<Lane>(3, "unknown lane");
      f.first = r.number<uint32_t>();
      f.count = r.number<uint32_t>();
      f.block_bytes = r.number<uint64_t>();
      f.digest = r.bytes<32>();
      f.wait_ms = r.number<uint32_t>();
      f.content = r.bytes<32>();
      return f;
    }
    case 3: {
      Push f;
      f.id = r.id();
      f.count = r.number<uint32_t>();
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
      f.ids.resize(r.count(kIdsMax, 4, "too many block ids"));
      for (uint32_t& block : f.ids) block = r.number<uint32_t>();
      return f;
    }
    case 5: {
      Data f;
      f.id = r.id();
      f.attempt = r.number<uint32_t>();
      f.first = r.number<uint32_t>();
      f.count = r.number<uint32_t>();
      f.complete = r.flag();
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
      f.kind = r.choice<NotifKind>(2, "unknown notification kind");
      f.seq = r.number<uint64_t>();
      f.oldest = r.number<uint64_t>();
      f.payload = r.text(kNotificationMax, "notification is too long");
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
      f.region_bytes = r.number<uint64_t>();
      f.block_count = r.number<uint32_t>();
      f.segments.resize(r.count(kSegmentsMax, 24, "too many segments"));
      for (Segment& segment : f.segments) {
        segment.offset = r.number<uint64_t>();
        segment.stride = r.number<uint64_t>();
        segment.length = r.number<uint64_t>();
      }
      return f;
    }
    default: Reader::fail("unknown kind");
  }
}

}  // namespace

const char* kind_name(const Frame& frame) {
  static const char* const names[] = {"hello", "pull",   "push",   "ready", "data", "confirm", "verdict", "release",
                                      "renew", "revoke", "cancel", "notif", "ping", "error",   "map"};
  return names[frame.index()];
}

std::string printable(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

std::string encode(const Frame& frame) {
  Writer body;
  std::visit(BodyWriter{body}, frame);
  const std::string bytes = body.take();
  if (bytes.size() > kBodyMax) throw Error(Code::invalid_argument, "frame body is over its bound");
  Writer whole;
  whole.number<uint8_t>('K');
  whole.number<uint8_t>('X');
  whole.number(kWireVersion);
  whole.number(kind_of(frame));
  whole.number(static_cast<uint32_t>(bytes.size()));
  return whole.take() + bytes;
}

void Decoder::check_usable() const {
  if (is_broken_) throw Error(Code::protocol, "this stream already went wrong");
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
  if (buffered() != 0 || bytes > payload_pending_) throw Error(Code::invalid_argument, "payload was not read that way");
  payload_pending_ -= bytes;
}

}  // namespace kvxfer
