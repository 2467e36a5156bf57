// Last words that may not have come. A reader says once that it needs a grant no more (RELEASE), a writer that nobody is to read for
// it any more (REVOKE); where the connection was cut behind that word, or there was none to say it over, the source would keep
// its promise to the expiry, and the destination would go on filling what the writer takes for its own again. So the word is
// said again over the next session to the same life, whoever opens it, and before anything else. Nobody dials for it: expiry and
// deadline are there for the rest.
#pragma once

#include <deque>
#include <utility>

#include "ids.hpp"

namespace kvxfer {

struct OwedRelease {
  TransferId id;
  Nanos until = 0;  // no grant lives longer
  bool is_of_push = false;
};

// Oldest first; of too many the oldest are forgotten.
class OwedReleases {
 public:
  static constexpr size_t kMax = 1024;

  void add(const OwedRelease& release) {
    if (releases_.size() == kMax) releases_.pop_front();
    releases_.push_back(release);
  }
  // All of them; those that are still of use are to be said.
  std::deque<OwedRelease> take() { return std::exchange(releases_, {}); }

 private:
  std::deque<OwedRelease> releases_;
};

}  // namespace kvxfer
