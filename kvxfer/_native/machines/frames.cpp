#include "frames.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

class Writer {
 public:
  template <class T>
  void number(T value) {
    char raw[sizeof(T)];
    for (size_t i = 0; i < sizeof(T); ++i) raw[i] = static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
    out_.append(raw, sizeof raw);
  }
  void numbers(const std::vector<uint32_t>& values) {
    for (const uint32_t value : values) number(value);
  }
  void list(const WireList& value) {
    if (value.bytes() > kListBytesMax) throw Error(Code::invalid_argument, "a list of ranges is over its bound");
    out_.reserve(out_.size() + value.bytes() + 8);
    number(static_cast<uint32_t>(value.rows.size()));
    number(static_cast<uint32_t>(value.indices.size()));
    for (const StridedRange& range : value.rows) {
      number(range.region);
      number(range.offset);
      number(range.stride);
      number(range.length);
      number(range.count);
    }
    numbers(value.indices);
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
    w.bytes(f.content_digest);
    w.flag(f.wants_checksums);
  }
  void operator()(const Fetch& f) {
    (*this)(f.pull);
    w.list(f.elements);
  }
  void operator()(const Push& f) {
    w.id(f.id);
    w.number(static_cast<uint8_t>(f.lane));
    w.flag(f.wants_checksums);
    w.number(f.deadline_ms);
    w.flag(f.has_notification);
    w.text(f.notification, f.has_notification ? kNotifPieceMax : 0, "notification");
    w.list(f.from);
    w.list(f.to);
    w.number(f.turn);
    w.flag(f.is_last);
  }
  void operator()(const Done& f) {
    w.id(f.id);
    w.code(f.code);
    w.text(std::string_view(f.text).substr(0, kTextMax), kTextMax, "error text");
    w.number(f.turn);
    w.number(f.checked);
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
    if (!f.checksums.empty() && f.checksums.size() != f.ids.size()) throw Error(Code::invalid_argument, "READY needs one checksum for each block");
    w.flag(!f.checksums.empty());
    w.numbers(f.ids);
    w.numbers(f.checksums);
  }
  void operator()(const Data& f) {
    w.id(f.id);
    w.number(f.attempt);
    w.number(f.first);
    w.number(f.count);
    w.flag(f.complete);
    if (f.has_checksums && f.is_zero_copy) throw Error(Code::invalid_argument, "zero-copy DATA has no checksums");
    w.number(f.has_checksums ? kDataHasChecksums : f.is_zero_copy ? kDataIsZeroCopy : kDataPlain);
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
    w.text(std::string_view(f.text).substr(0, kTextMax), kTextMax, "reason");
  }
  void operator()(const Queued& f) {
    w.id(f.id);
    w.number(f.attempt);
    w.flag(f.is_known);
    w.number(f.position);
    w.flag(f.has_work);
    w.number(f.age_ms);
  }
  void operator()(const Cancel& f) {
    w.id(f.id);
    w.number(f.attempt);
  }
  void operator()(const Notif& f) {
    w.number(static_cast<uint8_t>(f.kind));
    w.number(f.seq);
    w.number(f.oldest);
    w.text(f.payload, kNotifPieceMax, "notification");
    if (f.kind != NotifKind::Deliver) w.number(f.begin);
    if (f.kind == NotifKind::Part) w.number(f.total);
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
    w.number(static_cast<uint8_t>(f.lane));
    w.number(f.region_bytes);
    w.number(f.address);
    w.number(f.block_count);
    w.count(f.segments.size(), kSegmentsMax, "MAP");
    for (const Segment& segment : f.segments) {
      w.number(segment.offset);
      w.number(segment.stride);
      w.number(segment.length);
    }
    w.text(f.key, kMapKeyMax, "MAP key");
  }
};

}  // namespace

const char* kind_name(const Frame& frame) {
  static const char* const names[] = {"hello", "pull",   "push",   "ready", "data", "confirm", "verdict", "release",
                                      "renew", "revoke", "cancel", "notif", "ping", "error",   "map",    "fetch", "done", "queued"};
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

}  // namespace kvxfer
