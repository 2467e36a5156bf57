// Frames of a peer that knows the protocol and does not keep to it: each field is right, or nearly right, or anything.
#pragma once

#include <deque>
#include <map>
#include <optional>

#include "input.hpp"
#include "machines/frames.hpp"

namespace kvxfer::fuzz {

// Ids that both sides of a target use.
constexpr uint32_t kPool = 1, kRegionFirst = 10, kRegionCount = 4;
constexpr uint32_t kBlockCount = 8;
constexpr uint64_t kBlockBytes = 48, kRegionBytes = 512;
constexpr uint32_t kNoChecksumOfWire = 0x9d1ce5a7;  // kNoChecksum of lanes/stream.hpp

class FrameMaker {
 public:
  static constexpr uint8_t kOwnIds = 4;
  static constexpr size_t kQuestionsMax = 8;

  FrameMaker() {
    for (uint8_t i = 1; i <= kOwnIds; ++i) ids_.push_back(TransferId{filled<16>(i)});
  }

  // What the other side sent on connection `by`, so that answers can be right.
  void heard(const Frame& frame, uint64_t by) {
    if (const auto* pull = std::get_if<Pull>(&frame)) ask({by, *pull});
    if (const auto* fetch = std::get_if<Fetch>(&frame)) {
      lists_[fetch->pull.id] = fetch->elements;
      ask({by, fetch->pull});
    }
    if (const auto* confirm = std::get_if<Confirm>(&frame)) {
      nonces_[confirm->id] = confirm->nonce;
      questions_.push_back({by, Pull{}, *confirm});
    }
    if (const auto* push = std::get_if<Push>(&frame)) {
      lists_[push->id] = push->from;
      remember(push->id);
      questions_.push_back({by, Pull{}, *push});
    }
    if (questions_.size() > kQuestionsMax) questions_.pop_front();
  }

  struct Answer {
    Frame frame;
    uint64_t by;
  };
  // An honest peer's answer to the last question, or the one before; nothing if there was none.
  std::optional<Answer> answer(Input& in) {
    if (questions_.empty()) return std::nullopt;
    if (questions_.size() > 1 && in.below(4) == 0) questions_.pop_back();
    Question& question = questions_.back();
    const uint64_t by = question.by;
    if (const auto* confirm = std::get_if<Confirm>(&question.frame)) {
      const Verdict verdict{confirm->id, confirm->nonce, Code::ok};
      questions_.pop_back();
      return Answer{verdict, by};
    }
    if (const auto* push = std::get_if<Push>(&question.frame)) return Answer{answer(*push, question.step++), by};
    return Answer{answer(in, question), by};
  }

  // The bytes of a frame. A small DATA frame is followed by its payload. Its checksums, if it has any, say that the source computed
  // none. One payload in eight gets another length.
  static std::string with_payload(const Frame& frame, Input& in) {
    std::string wire = encode(frame);
    const auto* data = std::get_if<Data>(&frame);
    if (data == nullptr || data->payload_bytes > 2048) return wire;
    std::string payload(data->payload_bytes, 'p');
    const size_t checksums = data->has_checksums ? std::min<size_t>(4 * size_t{data->count}, payload.size()) : 0;
    for (size_t i = 0; i < checksums; ++i) payload[payload.size() - checksums + i] = static_cast<char>(kNoChecksumOfWire >> (8 * (i % 4)));
    if (in.below(8) == 0) payload.resize(in.below(64));
    return wire + payload;
  }

  TransferId id(Input& in) { return in.pick(ids_); }
  // An id that the owner under test uses, and that the peer may use too.
  TransferId own_id(Input& in) { return ids_[in.below(kOwnIds)]; }

  Frame make(Input& in) {
    switch (in.below(19)) {
      case 0: return Hello{static_cast<HelloStep>(1 + in.below(3)), {}, {}, filled<32>(in.byte()), filled<32>(in.byte())};
      case 1: return pull(in);
      case 2: {
        Push push{id(in), lane(in), in.flag(), in.u32(), list(in), {}, in.flag(), {}};
        push.to = in.flag() ? push.from : list(in);
        lists_[push.id] = push.from;
        if (push.has_notification) push.notification = in.some_bytes();
        push.turn = static_cast<uint8_t>(in.below(kLaneMax));
        push.is_last = in.flag();
        return push;
      }
      case 3: {
        Ready ready{id(in), 0, in.u32(), in.u32(), in.u32(), in.u32(), in.flag(), in.u32(), pool(in), in.u32(), {}, {}};
        ready.attempt = attempt(in, ready.id);
        ready.ids.resize(in.below(10));
        for (uint32_t& block : ready.ids) block = in.u32();
        if (!ready.ids.empty() && in.flag()) ready.checksums.resize(ready.ids.size(), in.u32());
        return ready;
      }
      case 4:
      case 5: {
        Data data{id(in), 0, in.u32(), in.u32(), in.flag(), in.flag(), false, 0};
        data.is_zero_copy = !data.has_checksums && data.count % 4 == 3;
        data.attempt = attempt(in, data.id);
        const uint64_t element = in.flag() ? in.any() : kBlockBytes;
        data.payload_bytes = std::min(uint64_t{data.count} * (element + (data.has_checksums ? 4 : 0)), kPayloadMax);
        return data;
      }
      case 6: return Confirm{id(in), in.any()};
      case 7: {
        Verdict verdict{id(in), 0, code(in)};
        verdict.nonce = nonce(in, verdict.id);
        return verdict;
      }
      case 8: return Release{id(in)};
      case 9: return Renew{id(in), in.u32(), in.u32()};
      case 10: return Revoke{id(in), code(in), in.bytes(in.below(20))};
      case 11: {
        const TransferId of = id(in);
        return Cancel{of, attempt(in, of)};
      }
      case 12: {
        Notif notif{static_cast<NotifKind>(1 + in.below(2)), in.any(), in.any(), in.some_bytes()};
        if (notif.kind != NotifKind::Ack && !notif.payload.empty() && in.flag()) {
          notif.kind = NotifKind::Part;
          notif.begin = static_cast<uint32_t>(in.below(64));
          notif.total = static_cast<uint32_t>(notif.begin + notif.payload.size() + in.below(64));
        } else if (notif.kind == NotifKind::Ack && in.flag()) {
          notif.begin = static_cast<uint32_t>(in.below(64));
        }
        return notif;
      }
      case 13: return Ping{static_cast<PingKind>(1 + in.below(2)), in.any()};
      case 14: {
        ErrorFrame error{in.below(8) == 0 ? TransferId{} : id(in), 0, code(in), in.bytes(in.below(40))};
        error.attempt = attempt(in, error.id);
        return error;
      }
      case 15: return map(in);
      case 16: return Fetch{pull(in), list(in)};
      case 17: return Queued{id(in), in.u32(), in.flag(), in.u32(), in.flag(), in.u32()};
      default: return Done{id(in), code(in), in.bytes(in.below(40)), static_cast<uint8_t>(in.below(kLaneMax)), in.u32()};
    }
  }

  static Lane lane(Input& in) { return static_cast<Lane>(1 + in.below(kLaneMax)); }
  static Code code(Input& in) { return in.flag() ? Code::ok : static_cast<Code>(in.below(kCodeCount)); }

  // An element list; most of it inside some region.
  static WireList list(Input& in) {
    WireList wire;
    wire.rows.resize(1 + in.below(3));
    for (StridedRange& range : wire.rows) {
      if (in.below(8) == 0) {
        range = {in.u32(), in.any(), in.any(), in.any(), in.u32()};
      } else {
        const uint64_t length = 1 + in.below(64);
        range = {kRegionFirst + static_cast<uint32_t>(in.below(kRegionCount)), in.below(256), length + in.below(16), length, 1 + static_cast<uint32_t>(in.below(4))};
      }
    }
    wire.indices.resize(in.below(2) * in.below(6));
    for (uint32_t& index : wire.indices) index = static_cast<uint32_t>(in.below(8));
    return wire;
  }

  Map map(Input& in) {
    Map map{pool(in), lane(in), in.flag() ? kRegionBytes : in.any(), 0, in.u32(), {}, in.bytes(in.below(24))};
    map.address = in.any();
    map.segments.resize(in.below(4));
    for (Segment& segment : map.segments) segment = {in.any(), in.any(), in.any()};
    return map;
  }

 private:
  static uint32_t pool(Input& in) { return in.flag() ? kPool : kRegionFirst + static_cast<uint32_t>(in.below(kRegionCount + 1)); }
  uint32_t attempt(Input& in, const TransferId& of) {
    const uint8_t choice = in.byte();
    return choice < 0xc0 ? attempts_[of] : in.u32();
  }
  uint64_t nonce(Input& in, const TransferId& of) {
    const uint8_t choice = in.byte();
    return choice < 0xc0 ? nonces_[of] : in.any();
  }
  Pull pull(Input& in) {
    Pull pull{id(in), in.u32(), in.any(), lane(in), in.u32(), in.u32(), in.flag() ? in.any() : kBlockBytes, {}, in.u32(), {}, in.flag()};
    if (in.below(8) == 0) pull.digest = filled<32>(in.byte());
    if (in.below(8) == 0) pull.content_digest = filled<32>(in.byte());
    return pull;
  }
  struct Question {
    uint64_t by;
    Pull pull;
    Frame frame = Release{};  // the question itself if it is a PUSH or a CONFIRM; any other kind: the question is `pull`
    uint32_t step = 0;        // how many answers it got
    uint32_t done = 0;        // how many elements of `pull` were sent
  };
  void ask(Question question) {
    const Pull& pull = question.pull;
    remember(pull.id);
    attempts_[pull.id] = pull.attempt;
    nonces_[pull.id] = pull.nonce;
    questions_.push_back(std::move(question));
  }
  // READY, the blocks or elements, and the verdict; on one-sided lanes the verdict answers a question.
  Frame answer(Input& in, Question& question) {
    const Pull& pull = question.pull;
    const uint32_t end = pull.first + pull.count;
    if (question.step++ == 0 || is_one_sided(pull.lane)) {
      Ready ready{pull.id, pull.attempt, question.step, end, 0, end, in.flag(), 5000, kPool, pull.first, {}, {}};
      const bool has_ids = is_one_sided(pull.lane) && lists_.count(pull.id) == 0;
      for (uint32_t i = 0; has_ids && i < std::min(pull.count, 16u); ++i) ready.ids.push_back(static_cast<uint32_t>(in.below(kBlockCount)));
      return ready;
    }
    if (question.done == pull.count) return Verdict{pull.id, pull.nonce, Code::ok};
    const uint32_t first = question.done, count = 1 + static_cast<uint32_t>(in.below(std::min(pull.count - first, 255u)));
    question.done += count;
    const bool is_zero_copy = !pull.wants_checksums && pull.nonce % 2 == 0;
    const uint64_t bytes = bytes_of(pull.id, pull.first + first, count) + (pull.wants_checksums ? 4 * count : 0);
    return Data{pull.id, pull.attempt, pull.first + first, count, true, pull.wants_checksums, is_zero_copy, bytes};
  }
  // The destination pulls as asked, and reports its end.
  Frame answer(const Push& push, uint32_t step) {
    uint32_t count = 0;
    for (const StridedRange& range : push.from.rows) count += range.count;
    if (!push.from.indices.empty()) count = static_cast<uint32_t>(push.from.indices.size());
    if (step == 0) return Pull{push.id, 1, 77, push.lane, 0, count, 0, {}, 0, {}, push.wants_checksums};
    if (step == 1 && is_one_sided(push.lane)) return Confirm{push.id, 78};
    return Done{push.id, Code::ok, ""};
  }
  uint64_t bytes_of(const TransferId& id, uint32_t first, uint32_t count) const {
    const auto found = lists_.find(id);
    if (found == lists_.end()) return kBlockBytes * count;
    try {
      const ElementList elements = from_wire(found->second);
      return uint64_t{first} + count <= elements.count() ? elements.bytes(first, count) : 0;
    } catch (const Error&) {
      return 0;
    }
  }
  void remember(const TransferId& id) {
    if (ids_.size() < 16 && std::find(ids_.begin(), ids_.end(), id) == ids_.end()) ids_.push_back(id);
  }

  std::vector<TransferId> ids_;
  std::map<TransferId, uint32_t> attempts_;
  std::map<TransferId, uint64_t> nonces_;
  std::map<TransferId, WireList> lists_;  // where they are known
  std::deque<Question> questions_;
};

}  // namespace kvxfer::fuzz
