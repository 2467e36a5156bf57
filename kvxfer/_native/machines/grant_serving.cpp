// What the grant table sends to readers: refusals, the state of a pull that waits, announcements, data on `stream`, and the verdict
// after it.
#include <algorithm>

#include "grant.hpp"

namespace kvxfer {
namespace {

uint32_t to_ms(Nanos ns) { return static_cast<uint32_t>(std::clamp<Nanos>(ns / kMillisecond, 0, UINT32_MAX)); }

}  // namespace

void GrantTable::refuse(SessionId session, const Pull& pull, Code code, const std::string& text, Effects& out) {
  if (code == Code::refused) count_refusal();
  out.push_back(SendFrame{session, ErrorFrame{pull.id, pull.attempt, code, text}});
}

void GrantTable::tell(WaitingPull& waiting, Nanos now, Effects& out) {
  const TransferId& id = waiting.pull.id;
  const bool is_known = intake_.expects(id);
  waiting.tell_at = now + limits_.queued_every_ns;
  out.push_back(SendFrame{waiting.session, Queued{id, waiting.pull.attempt, is_known, is_known ? intake_.position(id) : kPositionUnknown,
                                                  intake_.has_work(), to_ms(intake_.age(waiting.came_at, now))}});
}

// One READY. On one-sided lanes it carries as many of the source's new block ids as fit; of elements the reader has the list.
Ready GrantTable::announcement(const Grant& grant, Reading& reading, uint32_t can_read, Nanos now) {
  const Pull& pull = reading.pull;
  const Promise& promise = *grant.promise;
  const PoolInfo* pool = promise.claim->pool();
  Ready ready{pull.id, pull.attempt, promise.seq, promise.ready_blocks, promise.layers, promise.claim->count(), promise.is_complete,
              to_ms(grant.expiry - now), pool != nullptr ? pool->id : 0, pull.first + reading.ids_told, {}, {}};
  if (!is_one_sided(pull.lane)) return ready;
  if (pool == nullptr) {
    reading.ids_told = can_read;
    return ready;
  }
  const uint32_t count = std::min<uint32_t>(can_read - reading.ids_told, kIdsMax);
  const Extent told = promise.claim->part(pull.first + reading.ids_told, count);
  const auto from = told.ids->begin() + told.first;
  ready.ids.assign(from, from + count);
  if (pull.wants_checksums || pool->has_checksums) ready.checksums = checksums_of(promise, pull.first + reading.ids_told, count);
  reading.ids_told += count;
  return ready;
}

// All, or none.
std::vector<uint32_t> GrantTable::checksums_of(const Promise& promise, uint32_t first, uint32_t count) {
  std::vector<uint32_t> checksums;
  for (uint32_t i = first; i < first + count && i < promise.checksums.size() && promise.checksums[i]; ++i) checksums.push_back(*promise.checksums[i]);
  if (checksums.size() != count) checksums.clear();
  return checksums;
}

void GrantTable::send_next(Grant& grant, Reading& reading, uint32_t can_read, Effects& out) {
  const Pull& pull = reading.pull;
  const Promise& promise = *grant.promise;
  const MemoryClaim& claim = *promise.claim;
  const uint32_t first = pull.first + reading.sent;
  const uint32_t count = claim.fitting(first, can_read - reading.sent, limits_.data_bytes_max);
  reading.sending = count;
  const bool has_checksums = pull.wants_checksums || (claim.pool() != nullptr && claim.pool()->has_checksums);
  const uint64_t bytes = claim.bytes(first, count) + (has_checksums ? uint64_t{count} * 4 : 0);
  out.push_back(SendData{reading.session, Data{pull.id, pull.attempt, first, count, promise.is_complete, has_checksums, false, bytes}, claim.part(first, count),
                         has_checksums ? checksums_of(promise, first, count) : std::vector<uint32_t>{}, grant.serial});
}

// Announces news to the reader and, on `stream`, sends ready blocks, one SendData at a time, so that few bytes queue in front of a
// control frame. Called after every event that can change the result.
void GrantTable::serve(Grant& grant, Nanos now, Effects& out) {
  if (reading_of(grant) == nullptr) return;
  Reading& reading = *reading_of(grant);
  const Pull& pull = reading.pull;
  const uint32_t end = pull.first + pull.count;
  const uint32_t can_read = std::clamp(grant.promise->ready_blocks, pull.first, end) - pull.first;

  if (!reading.is_told || (reading.told_seq != grant.promise->seq && pull.count != 0)) {
    do {
      out.push_back(SendFrame{reading.session, announcement(grant, reading, can_read, now)});
    } while (is_one_sided(pull.lane) && reading.ids_told < can_read);
    reading.is_told = true;
    reading.told_seq = grant.promise->seq;
  }
  if (is_one_sided(pull.lane) || pull.count == 0) return;

  if (reading.sending == 0 && reading.sent < can_read) send_next(grant, reading, can_read, out);
  const uint32_t out_of_hands = has_bug(Bug::verdict_before_last_byte) ? reading.sent + reading.sending : reading.sent;
  if (out_of_hands == pull.count && !reading.is_judged && (!reading.has_zero_copy || has_bug(Bug::verdict_of_zero_copy))) {
    reading.is_judged = true;
    const SessionId session = reading.session;
    const uint64_t nonce = pull.nonce;
    const Code code = judge(grant, nonce, now, out);  // may end the grant, and with it `reading`
    out.push_back(SendFrame{session, Verdict{grant.id, nonce, code}});
  }
}

void GrantTable::data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, bool is_zero_copy, Nanos now, Effects& out,
                           uint64_t serial) {
  const auto found = grants_.find(id);
  if (found == grants_.end() || reading_of(found->second) == nullptr || (serial != 0 && serial != found->second.serial)) return;
  Grant& grant = found->second;
  Reading& reading = *reading_of(grant);
  if (reading.session != session || reading.pull.attempt != attempt) return;  // of an earlier attempt
  if (reading.sending != count) throw Error(Code::internal, "data_sent does not match the SendData in progress");
  reading.sending = 0;
  reading.sent += count;
  reading.has_zero_copy |= is_zero_copy;
  lapse(grant, now, out);
  serve(grant, now, out);
}

void GrantTable::data_failed(const TransferId& id, uint64_t serial, Code code, const std::string& text, Nanos now, Effects& out) {
  const auto found = grants_.find(id);
  if (found == grants_.end() || (serial != 0 && serial != found->second.serial) || has_bug(Bug::confirm_unreadable)) return;
  Grant& grant = found->second;
  lapse(grant, now, out);
  if (const Reading* reading = reading_of(grant)) out.push_back(SendFrame{reading->session, ErrorFrame{id, reading->pull.attempt, code, text}});
  finish(grant, GrantEvent::Revoke, out);
}

}  // namespace kvxfer
