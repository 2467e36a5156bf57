// Looks at a JSON object once: is it JSON, and where are its members. Decides what `json.loads` of Python decides about the bytes,
// with the exceptions that kvxfer/openai/scanner.py lists; it must never know what a member means, nor what follows from it. Depends on no other
// room, and keeps no reference to the bytes.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scan/tokens.hpp"

namespace kvxfer {

// How many objects and arrays may be open at once. Python's own parser gives up at about 1000, less what its caller's stack holds.
constexpr size_t kDepthMax = 512;
// How many members the outer object may have, each occurrence of a name counted. It bounds the memory of a scan: 48 KiB.
constexpr size_t kMembersMax = 1024;
constexpr size_t kFieldsMax = 1024;
constexpr uint16_t kNoField = UINT16_MAX;
constexpr uint16_t kNoMember = UINT16_MAX;
static_assert(kMembersMax < kNoMember && kFieldsMax < kNoField);

enum class JsonKind : uint8_t { String, Number, Object, Array, True, False, Null };

// Offsets in the body; a key, and a string, has its quotes.
struct JsonMember {
  size_t key_begin, key_end, value_begin, value_end;
  size_t comma = 0;  // the one after it; 0: it is the last member
  JsonKind kind = JsonKind::Null;
  bool has_escapes = false;  // in its key
  uint16_t field = kNoField;
};

static_assert(sizeof(JsonMember) * kMembersMax <= 48 << 10, "the text above says so");

// Names to look for, and their numbers.
class JsonFields {
 public:
  // Distinct, valid UTF-8, at most kFieldsMax.
  explicit JsonFields(std::vector<std::string> names);
  JsonFields(const JsonFields&) = delete;
  JsonFields& operator=(const JsonFields&) = delete;

  const std::vector<std::string>& names() const { return names_; }
  uint16_t find(std::string_view name) const;

 private:
  std::vector<std::string> names_;
  std::unordered_map<std::string_view, uint16_t> numbers_;
};

struct JsonScan {
  size_t open = 0;                  // where the object's brace is
  std::vector<JsonMember> members;  // in the order of the body
  std::vector<uint16_t> last;       // by field: the member that counts, the last of that name; or kNoMember
};

// Fills `scan`, unless the fault that is returned names what is wrong. `body` may begin with UTF-8's byte order mark.
JsonFault scan_object(std::string_view body, const JsonFields& fields, JsonScan& scan);
// Whether `text` is one JSON value of any kind.
JsonFault check_value(std::string_view text);

// The decoded name of a member.
std::string name_of(std::string_view body, const JsonMember& member);

// A body without some of its members: the ranges of bytes that stay, in order, the first one from behind the brace. The commas are
// right again: one between two members that stay, none elsewhere.
struct JsonRest {
  std::vector<std::pair<size_t, size_t>> ranges;
  bool has_members = false;
};
JsonRest without(std::string_view body, const JsonScan& scan, const std::vector<bool>& is_removed);

}  // namespace kvxfer
