// The classic bugs of KV transfer, put back by name in a test build so that the simulation can prove it catches them.
// A production build has no switch: every call folds to `false`.
#pragma once

namespace kvxfer {

enum class Bug {
  none,
  skip_confirm,               // destination commits when the last byte landed, without asking
  verdict_before_last_byte,   // source judges when it queues the last bytes, not when they are out
  verdict_of_zero_copy,       // source judges when the kernel has references to the last bytes, not when they are read
  free_before_drain,          // destination gives blocks back while a read may still write to them
  commit_twice,               // a repeated verdict commits again
  renew_revives,              // a late renewal brings an expired grant back
  mix_two_sources,            // destination takes frames for a transfer from another source
  push_without_offer,         // destination fills a region that was removed, because a peer pushes to it
  notify_before_commit,       // a push's notification is told when the push comes, not when its bytes are committed
  confirm_unreadable,         // source confirms what went out in place of bytes that it could not read
  verdict_of_before,          // destination asks again, after a read, with a nonce that it made before that read
};

#ifdef KVXFER_SEEDED_BUGS
inline Bug& seeded_bug() {
  static Bug bug = Bug::none;
  return bug;
}
inline bool has_bug(Bug bug) { return seeded_bug() == bug; }
#else
constexpr bool has_bug(Bug) { return false; }
#endif

}  // namespace kvxfer
