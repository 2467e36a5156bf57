// The frame codec: the messages of two agents inside a session, and the only code that parses bytes of a peer.
//
// A frame is an 8-byte header (magic 'K' 'X', version, kind, body length: u32) and a body of at most kBodyMax bytes; all integers
// are little-endian. Only DATA is followed by `payload_bytes` raw bytes outside the body, so that a lane can read them straight
// into blocks. Decoding is total: it yields a frame or throws Error(Code::protocol), never reads past its input, and allocates no
// more than the body it got. After the first error a decoder stays broken, because the next frame of a broken stream cannot be
// found.
//
// Version history. 1: first. 2: registered regions (FETCH, PUSH, DONE), checksums, MAP for every one-sided lane, zero-copy payloads,
// notifications in parts. 3: QUEUED, a PULL of no blocks, the reason in REVOKE.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "codes.hpp"
#include "ranges.hpp"

namespace kvxfer {

constexpr uint8_t kWireVersion = 3;
constexpr size_t kHeaderBytes = 8;
constexpr size_t kBodyMax = 1024 * 1024;
constexpr size_t kTextMax = 512;             // an ERROR's explanation
constexpr size_t kAgentIdMax = 64;
constexpr size_t kNotifPieceMax = 256 * 1024;                // of a notification in one frame
constexpr size_t kNotificationMax = 16 * 1024 * 1024 + 8192;  // all its parts: 16 MiB, and what its owner adds
constexpr size_t kIdsMax = 65536;            // block ids in one READY
constexpr size_t kSegmentsMax = 4096;        // segments in one MAP
constexpr size_t kMapKeyMax = 16 * 1024;     // a lane's data in one MAP, besides addresses
constexpr uint64_t kPayloadMax = 1ull << 31;
constexpr uint8_t kDataPlain = 0, kDataHasChecksums = 1, kDataIsZeroCopy = 2;  // what DATA says of its payload

enum class HelloStep : uint8_t { Dial = 1, Accept = 2, Prove = 3 };

// Mutual proof of the pair's session key; see session.hpp.
struct Hello {
  HelloStep step = HelloStep::Dial;
  AgentRef self, peer;
  Bytes32 nonce{};  // the sender's; zero in Prove
  Bytes32 mac{};    // zero in Dial
};
// Reader to source: send me, or let me read, `count` blocks of the grant from position `first` on. A grant is a list of blocks; a
// position counts from 0 in that list. Count 0: the reader has no blocks yet; it only asks whether the grant exists.
struct Pull {
  TransferId id;
  uint32_t attempt = 0;
  uint64_t nonce = 0;  // names the verdict of this attempt if it is a trailer
  Lane lane = Lane::Stream;
  uint32_t first = 0, count = 0;
  uint64_t block_bytes = 0;
  Bytes32 digest{};    // of the reader's compatibility record
  uint32_t wait_ms = 0;  // how long it may wait at the source for its grant
  Bytes32 content_digest{};   // of the content that the reader expects; zero: not given
  bool wants_checksums = false;  // the reader checks CRC-32Cs if the source has them
};
// Elements of registered regions on the wire: every strided range, and the index of each element, in order. No indices: all
// elements in the order of the ranges, at most kUnindexedMax.
struct WireList {
  std::vector<StridedRange> rows;
  std::vector<uint32_t> indices;
  size_t bytes() const { return rows.size() * kRangeBytes + indices.size() * 4; }  // on the wire, at most kListBytesMax
};
// Of ranges that have one element each (Ranges::is_table), only those that the list names are sent. Throws Error(limit_exceeded)
// past kListBytesMax.
WireList to_wire(const ElementList& list);
size_t wire_bytes(const ElementList& list);  // throws as to_wire
// The number of elements in a list that a peer sent, before it is built. Throws Error(invalid_argument) past kUnindexedMax.
uint32_t element_count(const WireList& list);
// Throws Error(invalid_argument), as element_count, Ranges and check_indices.
ElementList from_wire(const WireList& list);
// Reader to source: as PULL, under the open-ended grant of your registered regions, of these elements. pull.first and .count are
// positions in the whole list; block_bytes, digest, content_digest and wait_ms are ignored.
struct Fetch {
  Pull pull;
  WireList elements;
};
// Source to destination: please pull my elements `from` into your elements `to`, under the open-ended offer of your registered
// regions, by `lane`, on this session. Repeated if no answer came, and once for each further lane; answered by DONE when final, or
// if the lane does not work.
struct Push {
  TransferId id;
  Lane lane = Lane::Stream;
  bool wants_checksums = false;
  uint32_t deadline_ms = 0;
  WireList from, to;
  bool has_notification = false;
  std::string notification;  // for the destination's owner, once the bytes are committed there
  uint8_t turn = 0;          // how many lanes this push used before; bytes that landed by them are not read again
  bool is_last = true;       // there is no other lane after this one
};
// Destination to source: the transfer that your PUSH asked for is final; or, if its code is no_lane and other lanes follow, it
// waits for the next one.
struct Done {
  TransferId id;
  Code code = Code::ok;  // ok: committed
  std::string text;
  uint8_t turn = 0;      // of no_lane: the turn of that lane; else the latest turn that was accepted
  uint32_t checked = 0;  // elements that matched checksums of the source
};
// The grant's cumulative state, sent whole at each new attempt. `ids` are the source's block ids of the positions from `ids_first`
// on (one-sided lanes only; no position is sent twice in one attempt).
struct Ready {
  TransferId id;
  uint32_t attempt = 0;
  uint32_t seq = 0, blocks = 0, layers = 0, total = 0;
  bool complete = false;
  uint32_t ttl_ms = 0;
  uint32_t pool = 0;
  uint32_t ids_first = 0;
  std::vector<uint32_t> ids;
  std::vector<uint32_t> checksums;  // CRC-32C of each of `ids`, or none
};
// `payload_bytes` follow: blocks `first`.. of the grant, each as its segments in order; then, where has_checksums, 4 bytes for
// each block (CRC-32C, little-endian), which payload_bytes counts too.
struct Data {
  TransferId id;
  uint32_t attempt = 0;
  uint32_t first = 0, count = 0;
  bool complete = false;  // the source had announced everything before it sent this
  bool has_checksums = false;
  // The kernel has no copy of these bytes and reads the source's memory when the reader does. So the source sends no trailer
  // verdict; the reader asks for one after its last read. Never with checksums.
  bool is_zero_copy = false;
  uint64_t payload_bytes = 0;
};
struct Confirm {
  TransferId id;
  uint64_t nonce = 0;
};
struct Verdict {
  TransferId id;
  uint64_t nonce = 0;
  Code code = Code::ok;  // ok: the grant was alive at a moment after the last byte was read
};
struct Release {
  TransferId id;
};
struct Renew {
  TransferId id;
  uint32_t seq = 0;
  uint32_t ttl_ms = 0;
};
// Source to reader: the grant has ended; bytes that you read of it will not be confirmed. `text`: its owner's reason, or none.
struct Revoke {
  TransferId id;
  Code code = Code::grant_revoked;
  std::string text;
};
// Reader to source: stop serving this attempt; the grant stays.
struct Cancel {
  TransferId id;
  uint32_t attempt = 0;
};
// A notification of more than kNotifPieceMax comes in parts, in order. An Ack says up to which number all are delivered, and how
// many bytes of the next one came.
enum class NotifKind : uint8_t { Deliver = 1, Ack = 2, Part = 3 };
// `oldest`: the lowest number that the sender still holds; those before it are settled. Zero in an Ack.
struct Notif {
  NotifKind kind = NotifKind::Deliver;
  uint64_t seq = 0, oldest = 0;
  std::string payload;
  uint32_t begin = 0;  // of a Part: its offset; of an Ack: how many bytes of number `seq` + 1 came
  uint32_t total = 0;  // of a Part: the bytes of the whole notification
};
enum class PingKind : uint8_t { Ask = 1, Answer = 2 };
struct Ping {
  PingKind kind = PingKind::Ask;
  uint64_t token = 0;
};
// A zero id refers to the whole session, which ends with this frame.
struct ErrorFrame {
  TransferId id;
  uint32_t attempt = 0;
  Code code = Code::internal;
  std::string text;
};
struct Segment {
  uint64_t offset = 0, stride = 0, length = 0;
};
// Source to reader: how to read pool or region `pool` by `lane`. region_bytes 0: not possible, and `key` is the reason as text.
//   mapped  the descriptor comes beside it (SCM_RIGHTS)
//   cma     `address`: where the memory lies in the source; `key`: 8 bytes, where its boot nonce lies
//   ucx     `address` too; `key`: the packed worker address and remote key (lanes/ucx_key.hpp)
// A region has no segments and no blocks.
struct Map {
  uint32_t pool = 0;
  Lane lane = Lane::Mapped;
  uint64_t region_bytes = 0;
  uint64_t address = 0;
  uint32_t block_count = 0;
  std::vector<Segment> segments;
  std::string key;
};

constexpr uint32_t kPositionUnknown = UINT32_MAX;
// Source to reader: your pull waits, because its grant does not exist yet. Sent at once, and again while it waits.
struct Queued {
  TransferId id;
  uint32_t attempt = 0;
  bool is_known = false;  // the source's engine has accepted that prompt
  uint32_t position = kPositionUnknown;  // how many prompts were accepted before it and have no grant yet
  bool has_work = false;  // what the source's engine reported with its last heartbeat
  uint32_t age_ms = 0;    // the time since that heartbeat
};

// The order is the kind on the wire, from 1.
using Frame = std::variant<Hello, Pull, Push, Ready, Data, Confirm, Verdict, Release, Renew, Revoke, Cancel, Notif, Ping,
                           ErrorFrame, Map, Fetch, Done, Queued>;

inline uint8_t kind_of(const Frame& frame) { return static_cast<uint8_t>(frame.index() + 1); }
const char* kind_name(const Frame& frame);
// Text of a peer, made safe to show: every byte but printable ASCII becomes '?'.
std::string printable(std::string text);

// The bytes of a frame, header included, DATA's payload excluded. Throws Error(invalid_argument) past a bound.
std::string encode(const Frame& frame);

// Feed bytes in any chunks, take frames out. Bounded: refuses a body over kBodyMax when its header comes.
class Decoder {
 public:
  void feed(std::string_view bytes);
  // The next whole frame, or nothing yet. After a DATA frame its payload must be consumed first.
  std::optional<Frame> next();
  // Payload bytes of the last DATA frame that are still to come, buffered or not.
  uint64_t payload_pending() const { return payload_pending_; }
  // Takes up to `max` payload bytes that were fed already; the view is valid until the next call.
  std::string_view take_payload(size_t max);
  // The caller read `bytes` of the payload from the socket itself; nothing may be buffered.
  void skip_payload(uint64_t bytes);
  size_t buffered() const { return buffer_.size() - begin_; }

 private:
  void check_usable() const;
  std::string buffer_;
  size_t begin_ = 0;
  uint64_t payload_pending_ = 0;
  bool is_broken_ = false;
};

}  // namespace kvxfer
