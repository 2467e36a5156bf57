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

struct LastWord {
  TransferId id;
  Nanos until = 0;  // no grant lives longer
  bool is_of_push = false;  // REVOKE, else RELEASE
};

// Oldest first; of too many the oldest are forgotten.
class LastWords {
 public:
  static constexpr size_t kMax = 1024;

  void add(const LastWord& word) {
    if (words_.size() == kMax) words_.pop_front();
    words_.push_back(word);
  }
  // All of them; those that are still of use are to be said.
  std::deque<LastWord> take() { return std::exchange(words_, {}); }

 private:
  std::deque<LastWord> words_;
};

}  // namespace kvxfer
