// How far plain text goes, and lists of integers (token ids), sixteen bytes at a time. The only file of the scanner that knows the
// CPU: SSE2, which every x86-64 has, and otherwise words of eight bytes.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvxfer {

// ASCII, and none of those that mean something in a JSON string.
inline bool is_plain(char c) { return static_cast<signed char>(c) >= 0x20 && c != '"' && c != '\\'; }

#ifdef __SSE2__

// The first byte that is not plain, or `end`.
inline const char* skip_plain(const char* p, const char* end) {
  const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), space = _mm_set1_epi8(' ');
  for (; end - p >= 16; p += 16) {
    const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i special = _mm_or_si128(_mm_cmpeq_epi8(block, quote), _mm_cmpeq_epi8(block, backslash));
    // Bytes are signed here: what is not ASCII is less than a space too.
    const auto found = static_cast<unsigned>(_mm_movemask_epi8(_mm_or_si128(special, _mm_cmplt_epi8(block, space))));
    if (found != 0) return p + __builtin_ctz(found);
  }
  while (p < end && is_plain(*p)) ++p;
  return p;
}

// In a valid string: the first quote or backslash, or `end`.
inline const char* skip_unescaped(const char* p, const char* end) {
  const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\');
  const auto special = [&](const char* at) {
    const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm_or_si128(_mm_cmpeq_epi8(block, quote), _mm_cmpeq_epi8(block, backslash));
  };
  while (end - p >= 64 && _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(special(p), special(p + 16)), _mm_or_si128(special(p + 32), special(p + 48)))) == 0) p += 64;
  for (; end - p >= 16; p += 16) {
    const auto found = static_cast<unsigned>(_mm_movemask_epi8(special(p)));
    if (found != 0) return p + __builtin_ctz(found);
  }
  while (p < end && *p != '"' && *p != '\\') ++p;
  return p;
}

// `p` is at the begin of an item of a list. Returns the place behind the last comma of a valid run of integers without signs, each
// of at most 30 digits, with a comma and maybe spaces behind each; `p` if there is none. A bit of a mask stands for a byte.
inline const char* skip_integers(const char* p, const char* end) {
  const char* done = p;
  unsigned digit_before = 0, zero_before = 0;  // the byte before this block is a digit; it is the first of its number, and a zero
  for (; end - p >= 16; p += 16) {
    const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const auto equal = [&](char c) { return static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(block, _mm_set1_epi8(c)))); };
    const __m128i no_digit = _mm_or_si128(_mm_cmplt_epi8(block, _mm_set1_epi8('0')), _mm_cmpgt_epi8(block, _mm_set1_epi8('9')));
    const unsigned digits = ~static_cast<unsigned>(_mm_movemask_epi8(no_digit)) & 0xffff, commas = equal(','), spaces = equal(' ');
    const unsigned after_digit = digits << 1 | digit_before;
    const unsigned first_zeros = equal('0') & ~after_digit;
    const unsigned after_zero = first_zeros << 1 | zero_before;
    const bool is_list = (digits | commas | spaces) == 0xffff && commas != 0;
    if (!is_list || (commas & ~after_digit) != 0 || (spaces & after_digit) != 0 || (digits & after_zero) != 0) break;
    done = p + (32 - __builtin_clz(commas));
    digit_before = digits >> 15;
    zero_before = first_zeros >> 15;
  }
  return done;
}

#else

inline const char* skip_plain(const char* p, const char* end) {
  constexpr uint64_t kOnes = ~uint64_t{0} / 255, kHighs = kOnes * 0x80;
  // A high bit for the lowest byte that is less than `bound`, and maybe for bytes above it: enough to know that there is one.
  const auto has_less = [](uint64_t word, uint8_t bound) { return (word - kOnes * bound) & ~word & kHighs; };
  for (; end - p >= 8; p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    if ((word & kHighs) != 0 || has_less(word, 0x20) != 0 || has_less(word ^ (kOnes * '"'), 1) != 0 || has_less(word ^ (kOnes * '\\'), 1) != 0) break;
  }
  while (p < end && is_plain(*p)) ++p;
  return p;
}

inline const char* skip_unescaped(const char* p, const char* end) {
  while (p < end && *p != '"' && *p != '\\') ++p;
  return p;
}

inline const char* skip_integers(const char* p, const char*) { return p; }

#endif

}  // namespace kvxfer
