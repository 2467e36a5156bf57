#include "scan/tokens.hpp"

#include <cstring>

#include "scan/blocks.hpp"

namespace kvxfer {
namespace {

std::nullptr_t fail(JsonFault& fault, const char* what, const char* at) {
  fault = {what, at};
  return nullptr;
}

bool is_between(const char* p, uint8_t low, uint8_t high) {
  const auto byte = static_cast<uint8_t>(*p);
  return byte >= low && byte <= high;
}
bool is_continuation(const char* p) { return (static_cast<uint8_t>(*p) & 0xc0) == 0x80; }

// The length of the UTF-8 sequence at `p` (RFC 3629: no overlong form, no surrogate, nothing above U+10FFFF), which is not ASCII; 0: none.
size_t sequence_length(const char* p, size_t left) {
  const auto first = static_cast<uint8_t>(*p);
  if (first < 0xe0) return first >= 0xc2 && left >= 2 && is_continuation(p + 1) ? 2 : 0;
  if (first < 0xf0) {
    if (left < 3 || !is_continuation(p + 1) || !is_continuation(p + 2)) return 0;
    if (first == 0xe0) return is_between(p + 1, 0xa0, 0xbf) ? 3 : 0;
    if (first == 0xed) return is_between(p + 1, 0x80, 0x9f) ? 3 : 0;
    return 3;
  }
  if (first > 0xf4 || left < 4 || !is_continuation(p + 1) || !is_continuation(p + 2) || !is_continuation(p + 3)) return 0;
  if (first == 0xf0) return is_between(p + 1, 0x90, 0xbf) ? 4 : 0;
  if (first == 0xf4) return is_between(p + 1, 0x80, 0x8f) ? 4 : 0;
  return 4;
}

// Past all that is not ASCII.
const char* skip_letters(const char* p, const char* end, JsonFault& fault) {
  while (p < end && static_cast<signed char>(*p) < 0) {
    const size_t length = sequence_length(p, static_cast<size_t>(end - p));
    if (length == 0) return fail(fault, "invalid UTF-8", p);
    p += length;
  }
  return p;
}

int hex_value(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// `p` is at the backslash.
const char* skip_escape(const char* p, const char* end, JsonFault& fault) {
  if (end - p < 2) return fail(fault, "the string has no end", end);
  if (p[1] != 'u') return p[1] != '\0' && std::strchr("\"\\/bfnrt", p[1]) != nullptr ? p + 2 : fail(fault, "an invalid escape", p);
  if (end - p < 6) return fail(fault, "an invalid escape", p);
  for (int i = 2; i < 6; ++i) {
    if (hex_value(p[i]) < 0) return fail(fault, "an invalid escape", p);
  }
  return p + 6;
}

uint32_t escaped_unit(const char* p) {
  uint32_t unit = 0;
  for (int i = 2; i < 6; ++i) unit = unit << 4 | static_cast<uint32_t>(hex_value(p[i]));
  return unit;
}

size_t put_utf8(char* text, uint32_t point) {
  size_t size = 0;
  const auto put = [&](uint32_t byte) { text[size++] = static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
    return size;
  }
  if (point < 0x800) {
    put(0xc0 | point >> 6);
  } else {
    if (point < 0x10000) {
      put(0xe0 | point >> 12);
    } else {
      put(0xf0 | point >> 18);
      put(0x80 | (point >> 12 & 0x3f));
    }
    put(0x80 | (point >> 6 & 0x3f));
  }
  put(0x80 | (point & 0x3f));
  return size;
}

char unescaped(char c) {
  switch (c) {
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    default: return c;  // a quote, a slash or a backslash
  }
}

}  // namespace

const char* skip_string(const char* p, const char* end, JsonFault& fault, bool& has_escapes) {
  ++p;
  while (p != nullptr) {
    p = skip_plain(p, end);
    if (p == end) return fail(fault, "the string has no end", p);
    if (*p == '"') return p + 1;
    if (*p == '\\') {
      has_escapes = true;
      p = skip_escape(p, end, fault);
    } else if (static_cast<signed char>(*p) < 0) {
      p = skip_letters(p, end, fault);
    } else {
      return fail(fault, "a control character within a string", p);
    }
  }
  return nullptr;
}

const char* skip_number(const char* p, const char* end, JsonFault& fault) {
  const auto skip_digits = [&] {
    const char* first = p;
    while (p < end && is_digit(*p)) ++p;
    return static_cast<size_t>(p - first);
  };
  const char* begin = p;
  if (*p == '-') ++p;
  if (p < end && *p == 'I') return fail(fault, "-Infinity, which is not JSON,", begin);
  size_t digits = 1;
  if (p < end && *p == '0') {
    ++p;
  } else {
    digits = skip_digits();
    if (digits == 0) return fail(fault, "a number without digits", begin);
  }
  bool is_integer = true;
  if (p < end && *p == '.') {
    ++p;
    is_integer = false;
    if (skip_digits() == 0) return fail(fault, "a number without digits after its point", begin);
  }
  if (p < end && (*p == 'e' || *p == 'E')) {
    ++p;
    is_integer = false;
    if (p < end && (*p == '+' || *p == '-')) ++p;
    if (skip_digits() == 0) return fail(fault, "a number without digits in its exponent", begin);
  }
  if (is_integer && digits > kIntegerDigitsMax) {
    fault = {"an integer of more than 4300 digits", begin, JsonFaultKind::TooComplex};
    return nullptr;
  }
  return p;
}
static_assert(kIntegerDigitsMax == 4300, "the text above says so");

const char* skip_literal(const char* p, const char* end, std::string_view literal, JsonFault& fault) {
  if (std::string_view(p, static_cast<size_t>(end - p)).substr(0, literal.size()) != literal) return fail(fault, "expected a value", p);
  return p + literal.size();
}

const char* decode_escape(const char* p, const char* end, char* text, size_t& size) {
  if (p[1] != 'u') {
    text[size++] = unescaped(p[1]);
    return p + 2;
  }
  uint32_t point = escaped_unit(p);
  p += 6;
  if (point >= 0xd800 && point < 0xdc00 && end - p >= 6 && p[0] == '\\' && p[1] == 'u') {
    const uint32_t low = escaped_unit(p);
    if (low >= 0xdc00 && low < 0xe000) {
      point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
      p += 6;
    }
  }
  size += put_utf8(text + size, point);
  return p;
}

std::string decoded_string(std::string_view inner) {
  std::string text;
  text.reserve(inner.size());
  const char *p = inner.data(), *end = p + inner.size();
  while (p < end) {
    const auto* backslash = static_cast<const char*>(std::memchr(p, '\\', static_cast<size_t>(end - p)));
    text.append(p, backslash == nullptr ? end : backslash);
    if (backslash == nullptr) break;
    char escaped[kEscapedBytesMax];
    size_t size = 0;
    p = decode_escape(backslash, end, escaped, size);
    text.append(escaped, size);
  }
  return text;
}

}  // namespace kvxfer
