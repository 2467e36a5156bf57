// The tokens of JSON (RFC 8259): where a string, a number or a literal ends, or what is wrong with it. Knows no nesting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvxfer {

// Python reads no longer integer (sys.int_info.default_max_str_digits): json.loads refuses one too.
constexpr size_t kIntegerDigitsMax = 4300;

enum class JsonFaultKind : uint8_t { Invalid, NotAnObject, TooComplex };

// What is wrong with bytes, in words that go on with "at byte 17". TooComplex: they may be JSON, but pass a bound of the scanner.
struct JsonFault {
  const char* what = nullptr;  // null: nothing is wrong
  const char* at = nullptr;
  JsonFaultKind kind = JsonFaultKind::Invalid;
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Each begins at the first byte of the token (a string's: its quote) and returns the place after its last one, or null and the fault.
const char* skip_string(const char* p, const char* end, JsonFault& fault, bool& has_escapes);
const char* skip_number(const char* p, const char* end, JsonFault& fault);
const char* skip_literal(const char* p, const char* end, std::string_view literal, JsonFault& fault);

constexpr size_t kEscapedBytesMax = 4;
// `p` is at the backslash of a valid escape. Adds to `text`, which has `size` bytes, what it means, and returns the place after it,
// which is after both halves of a pair of surrogates. At most kEscapedBytesMax bytes, as decoded_string has them.
const char* decode_escape(const char* p, const char* end, char* text, size_t& size);

// What a valid string means; `inner` has no quotes. UTF-8, but for escaped surrogates without a partner, which are encoded as UTF-8
// would encode them (Python's "surrogatepass").
std::string decoded_string(std::string_view inner);

}  // namespace kvxfer
