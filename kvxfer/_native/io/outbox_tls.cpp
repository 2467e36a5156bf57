// The queue of a connection that is encrypted. A payload is read, under its grant, when it is encrypted, and counts as sent only
// when the kernel has taken the last byte of its ciphertext: the verdict about it is judged after that.
#include <algorithm>

#include "lanes/owner_memory.hpp"
#include "outbox.hpp"

namespace kvxfer {
namespace {

constexpr size_t kIovecsMax = 1024;
constexpr size_t kSealBytesMax = 128 * 1024;  // in a call: the ciphertext is in a cache when the kernel copies it

}  // namespace

// Payloads whose ciphertext the kernel has taken.
void Outbox::settle(std::vector<Sent>& finished) {
  while (!sealed_.empty() && sealed_.front().first <= tls_->sent()) {
    finished.push_back(std::move(sealed_.front().second));
    sealed_.pop_front();
  }
}

// Memory that is not ours may be gone, and encrypting it in place would end the process. Replaces the vectors of blocks, from `begin`
// on, by a copy; their checksums may follow. False if not all of it could be read.
bool Outbox::copy_foreign(OutgoingBlocks& payload, iovec* vectors, size_t& count, size_t begin, size_t bytes) {
  static thread_local const std::unique_ptr<uint8_t[]> copy(new uint8_t[kSealBytesMax]);
  const size_t blocks = static_cast<size_t>(std::min<uint64_t>(bytes, payload.left));
  if (blocks == 0) return true;
  const bool has_trailer = bytes != blocks;
  const size_t there = copy_from_owner(copy.get(), vectors + begin, count - begin - (has_trailer ? 1 : 0));
  if (there != blocks) {
    const uint64_t at = payload.payload_bytes() - payload.left + there;
    abandon(payload, memory_gone("source", *payload.memory.layout, payload.extent, at).what());
    return false;
  }
  if (has_trailer) vectors[begin + 1] = vectors[count - 1];
  vectors[begin] = {copy.get(), blocks};
  count = begin + (has_trailer ? 2 : 1);
  return true;
}

bool Outbox::send_sealed(SharedEndpoint& shared, std::vector<Sent>& finished, bool may_cork) {
  tls_->start();
  const bool is_free = tls_->flush();
  settle(finished);
  if (!is_free || !tls_->is_up() || items_.empty()) return false;

  iovec vectors[kIovecsMax];
  size_t count = 0, bytes = 0;
  Sending sending(shared);
  for (Item& item : items_) {
    if (count >= kIovecsMax - 1 || bytes >= kSealBytesMax) break;
    if (const size_t left = item.bytes.size() - item.begin; left != 0) {
      vectors[count++] = {item.bytes.data() + item.begin, left};
      bytes += left;
    }
    if (!item.payload) continue;
    OutgoingBlocks& payload = *item.payload;
    try {
      const size_t begin = count, before = bytes;
      gather(item, sending, vectors, count, bytes, kSealBytesMax);
      const bool is_foreign = !payload.has_ended && !payload.is_staged && !payload.memory.is_ours;
      if (is_foreign && count != begin && !copy_foreign(payload, vectors, count, begin, bytes - before)) return true;
    } catch (const Error& error) {
      if (error.code() != Code::memory_gone) throw;
      abandon(payload, error.what());
      return true;
    }
    break;
  }
  if (count == 0) return false;
  const OutgoingBlocks* const last = items_.back().payload.get();
  may_cork = may_cork && last != nullptr && bytes == frame_bytes_ + last->left + last->trailer_left;
  tls_->seal(vectors, count);
  sending.end();
  std::vector<Sent> sealed;
  const bool has_more = took(static_cast<ssize_t>(bytes), 0, bytes, may_cork, sealed);
  for (Sent& one : sealed) sealed_.emplace_back(tls_->sealed(), std::move(one));
  const bool is_sent = tls_->flush(may_cork);
  if (!is_sent) is_corked_ = false;
  settle(finished);
  return is_sent && has_more;
}

}  // namespace kvxfer
