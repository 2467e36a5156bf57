#include "driver_mutate.hpp"

#include <algorithm>
#include <cstring>

namespace fuzz {
namespace {

constexpr size_t kStepsMax = 6;
constexpr size_t kWordsMax = 512;
constexpr uint64_t kEdgesOfTypes[] = {0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 4095, 4096,
                                      0x7fff, 0x8000, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000,
                                      0x3fffffffffffffff, 0x4000000000000000, 0x7fffffffffffffff, 0x8000000000000000, ~0ull};

std::string bytes_of(uint64_t number, size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return bytes;
}

}  // namespace

void Mutator::add_word(std::string word) {
  if (word.empty() || std::find(words_.begin(), words_.end(), word) != words_.end()) return;
  if (words_.size() < kWordsMax) {
    words_.push_back(std::move(word));
  } else {
    words_[below(words_.size())] = std::move(word);
  }
}

// Short ones far more often than long ones.
size_t Mutator::some_length(size_t max) {
  if (max == 0) return 0;
  return 1 + below(std::min<size_t>(max, size_t{1} << below(11)));
}

void Mutator::put(std::string& input, const std::string& word) {
  const size_t at = below(input.size() + 1);
  if (one_in(2) || at + word.size() > input.size()) {
    input.insert(at, word);
  } else {
    input.replace(at, word.size(), word);
  }
}

void Mutator::change_number(std::string& input) {
  const size_t size = size_t{1} << below(4);
  if (input.size() < size) return;
  const size_t at = below(input.size() - size + 1);
  uint64_t number = 0;
  for (size_t i = 0; i < size; ++i) number |= uint64_t{static_cast<uint8_t>(input[at + i])} << (8 * i);
  switch (below(4)) {
    case 0: number += 1 + below(16); break;
    case 1: number -= 1 + below(16); break;
    case 2: number = kEdgesOfTypes[below(std::size(kEdgesOfTypes))]; break;
    default: number = ~number + below(2); break;
  }
  input.replace(at, size, bytes_of(number, size));
}

// Finds in the input a number that was compared with another one, and puts that, or a neighbour of it, in its place.
bool Mutator::answer_comparison(std::string& input, const Coverage& coverage) {
  const size_t count = coverage.comparison_count();
  for (int attempt = 0; attempt < 8 && count != 0; ++attempt) {
    const Comparison& comparison = coverage.comparison(below(count));
    const bool is_left = one_in(2);
    // A byte that was widened, or a number whose high bytes are zero, stands in the input with fewer bytes.
    const size_t size = std::min<size_t>(comparison.bytes, size_t{1} << below(4));
    const std::string known = bytes_of(is_left ? comparison.left : comparison.right, size);
    const std::string wanted = bytes_of((is_left ? comparison.right : comparison.left) + below(3) - 1, size);
    const size_t at = input.find(known, below(input.size() + 1));
    if (at == std::string::npos) continue;
    input.replace(at, size, wanted);
    if (size > 1) add_word(wanted);
    return true;
  }
  return false;
}

void Mutator::step(std::string& input, const std::string& other, const Coverage& coverage) {
  const size_t at = below(input.size());
  switch (below(13)) {
    case 0:
      if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
      return;
    case 1:
      if (!input.empty()) input[at] = static_cast<char>(random_());
      return;
    case 2:
    case 3: return change_number(input);
    case 4: input.erase(at, some_length(input.size() - at)); return;
    case 5: {
      std::string some(some_length(16), '\0');
      for (char& byte : some) byte = static_cast<char>(random_());
      return put(input, some);
    }
    case 6: return put(input, std::string(some_length(64), one_in(2) ? '\0' : static_cast<char>(random_())));
    case 7: return put(input, input.substr(at, some_length(input.size() - at)));
    case 8: {
      const size_t from = below(other.size());
      return put(input, other.substr(from, some_length(other.size() - from)));
    }
    case 9:  // the beginning of one, the end of the other
      input.resize(at);
      input += other.substr(below(other.size() + 1));
      return;
    case 10:
      if (!words_.empty()) put(input, words_[below(words_.size())]);
      return;
    default:
      if (!answer_comparison(input, coverage)) change_number(input);
      return;
  }
}

std::string Mutator::mutate(std::string input, const std::string& other, const Coverage& coverage) {
  for (size_t steps = 1 + below(kStepsMax); steps != 0; --steps) step(input, other, coverage);
  if (input.size() > size_max_) input.resize(size_max_);
  return input;
}

}  // namespace fuzz
