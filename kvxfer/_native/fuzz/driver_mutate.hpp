// New inputs out of old ones: bytes flipped, numbers moved by a little or replaced by the edges of their type, parts erased,
// doubled, moved or taken from another input, and numbers that the target compared put where the other side of the comparison
// stood. Deterministic by its seed.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "driver_coverage.hpp"

namespace fuzz {

class Mutator {
 public:
  Mutator(uint64_t seed, size_t size_max) : random_(seed), size_max_(size_max) {}

  // `other`: to take parts from; may be the same input. `coverage`: of the last run. Never longer than size_max.
  std::string mutate(std::string input, const std::string& other, const Coverage& coverage);
  void add_word(std::string word);
  size_t below(size_t bound) { return bound == 0 ? 0 : static_cast<size_t>(random_() % bound); }
  bool one_in(size_t count) { return below(count) == 0; }

 private:
  void step(std::string& input, const std::string& other, const Coverage& coverage);
  void change_number(std::string& input);
  void put(std::string& input, const std::string& word);
  bool answer_comparison(std::string& input, const Coverage& coverage);
  size_t some_length(size_t max);

  std::mt19937_64 random_;
  const size_t size_max_;
  std::vector<std::string> words_;
};

}  // namespace fuzz
