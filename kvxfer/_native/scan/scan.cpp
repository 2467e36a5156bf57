#include "scan/scan.hpp"

#include <cassert>

#include "scan/blocks.hpp"

namespace kvxfer {
namespace {

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

// Walks over JSON with a stack of one bit for each open object or array, so that no nesting is too deep for the thread's own stack.
class JsonWalk {
 public:
  explicit JsonWalk(std::string_view text) : begin_(text.data()), p_(begin_), end_(begin_ + text.size()) {}

  const JsonFault& fault() const { return fault_; }
  size_t offset() const { return static_cast<size_t>(p_ - begin_); }

  void skip_byte_order_mark() {
    if (std::string_view(p_, static_cast<size_t>(end_ - p_)).substr(0, kByteOrderMark.size()) == kByteOrderMark) p_ += kByteOrderMark.size();
  }
  void skip_spaces() {
    while (p_ < end_ && (*p_ == ' ' || *p_ == '\n' || *p_ == '\r' || *p_ == '\t')) ++p_;
  }
  // The next byte; 0, which is no part of a token, at the end.
  char peek() const { return p_ < end_ ? *p_ : '\0'; }
  bool take(char c) {
    if (peek() != c) return false;
    ++p_;
    return true;
  }
  bool fail(const char* what, JsonFaultKind kind = JsonFaultKind::Invalid) {
    fault_ = {what, p_, kind};
    return false;
  }
  // The value at `offset` is JSON, and no object.
  bool fail_as_no_object(size_t offset) {
    fault_ = {"another kind of value", begin_ + offset, JsonFaultKind::NotAnObject};
    return false;
  }
  bool is_at_end() {
    skip_spaces();
    return p_ == end_ || fail("bytes after the value");
  }

  bool key(bool& has_escapes) {
    if (peek() != '"') return fail("expected a name in quotes");
    return accept(skip_string(p_, end_, fault_, has_escapes));
  }
  bool colon() {
    skip_spaces();
    if (!take(':')) return fail("expected ':'");
    skip_spaces();
    return true;
  }

  // One value and all that is in it, `outer` containers deep.
  bool value(size_t outer) {
    const size_t floor = depth_ = outer;
    for (;;) {
      if (depth_ > floor && !is_object_[depth_ - 1] && is_digit(peek())) {
        p_ = skip_integers(p_, end_);
        skip_spaces();
      }
      bool is_open = false;
      if (!one(is_open)) return false;
      if (is_open) continue;
      // After a value: the ends of what it closes, then a comma and what it announces.
      for (;;) {
        if (depth_ == floor) return true;
        skip_spaces();
        const bool is_object = is_object_[depth_ - 1];
        if (take(',')) {
          skip_spaces();
          if (is_object && !name()) return false;
          break;
        }
        if (!take(is_object ? '}' : ']')) return fail(is_object ? "expected ',' or '}'" : "expected ',' or ']'");
        --depth_;
      }
    }
  }

  JsonKind kind() const {
    switch (peek()) {
      case '"': return JsonKind::String;
      case '{': return JsonKind::Object;
      case '[': return JsonKind::Array;
      case 't': return JsonKind::True;
      case 'f': return JsonKind::False;
      case 'n': return JsonKind::Null;
      default: return JsonKind::Number;
    }
  }

 private:
  bool accept(const char* after) {
    if (after == nullptr) return false;
    p_ = after;
    return true;
  }
  bool name() {
    bool has_escapes = false;
    return key(has_escapes) && colon();
  }

  // One scalar or empty container; or the begin of a container that has something, up to its first value (`is_open`).
  bool one(bool& is_open) {
    switch (peek()) {
      case '"': {
        bool has_escapes = false;
        return accept(skip_string(p_, end_, fault_, has_escapes));
      }
      case '{':
      case '[': {
        if (depth_ == kDepthMax) return fail("nested deeper than 512 levels", JsonFaultKind::TooComplex);
        const bool is_object = *p_++ == '{';
        skip_spaces();
        if (take(is_object ? '}' : ']')) return true;
        is_object_[depth_++] = is_object;
        is_open = true;
        return !is_object || name();
      }
      case 't': return accept(skip_literal(p_, end_, "true", fault_));
      case 'f': return accept(skip_literal(p_, end_, "false", fault_));
      case 'n': return accept(skip_literal(p_, end_, "null", fault_));
      case 'N': return fail("NaN, which is not JSON,");
      case 'I': return fail("Infinity, which is not JSON,");
      case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return accept(skip_number(p_, end_, fault_));
      default: return fail("expected a value");
    }
  }

  const char* begin_;
  const char* p_;
  const char* end_;
  JsonFault fault_;
  size_t depth_ = 0;
  bool is_object_[kDepthMax];  // by depth
};
static_assert(kDepthMax == 512, "the text above says so");

bool scan_members(JsonWalk& walk, std::string_view body, const JsonFields& fields, JsonScan& scan) {
  walk.skip_byte_order_mark();
  walk.skip_spaces();
  scan.open = walk.offset();
  // Of bytes that are not even JSON that is said, and not this.
  if (walk.peek() != '{') return walk.value(0) && walk.is_at_end() && walk.fail_as_no_object(scan.open);
  walk.take('{');
  walk.skip_spaces();
  if (walk.take('}')) return walk.is_at_end();
  for (;;) {
    if (scan.members.size() == kMembersMax) return walk.fail("more than 1024 members", JsonFaultKind::TooComplex);
    JsonMember member{};
    member.key_begin = walk.offset();
    if (!walk.key(member.has_escapes)) return false;
    member.key_end = walk.offset();
    if (!walk.colon()) return false;
    member.value_begin = walk.offset();
    member.kind = walk.kind();
    if (!walk.value(1)) return false;
    member.value_end = walk.offset();
    member.field = member.has_escapes ? fields.find(name_of(body, member)) : fields.find(body.substr(member.key_begin + 1, member.key_end - member.key_begin - 2));
    if (member.field != kNoField) scan.last[member.field] = static_cast<uint16_t>(scan.members.size());
    walk.skip_spaces();
    const size_t after = walk.offset();
    const bool is_more = walk.take(',');
    if (is_more) member.comma = after;
    scan.members.push_back(member);
    if (!is_more) return walk.take('}') ? walk.is_at_end() : walk.fail("expected ',' or '}'");
    walk.skip_spaces();
  }
}
static_assert(kMembersMax == 1024, "the text above says so");

}  // namespace

JsonFields::JsonFields(std::vector<std::string> names) : names_(std::move(names)) {
  assert(names_.size() <= kFieldsMax);
  for (size_t i = 0; i < names_.size(); ++i) numbers_.emplace(names_[i], static_cast<uint16_t>(i));
}

uint16_t JsonFields::find(std::string_view name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? kNoField : found->second;
}

JsonFault scan_object(std::string_view body, const JsonFields& fields, JsonScan& scan) {
  scan.members.clear();
  scan.last.assign(fields.names().size(), kNoMember);
  JsonWalk walk(body);
  return scan_members(walk, body, fields, scan) ? JsonFault{} : walk.fault();
}

JsonFault check_value(std::string_view text) {
  JsonWalk walk(text);
  walk.skip_spaces();
  return walk.value(0) && walk.is_at_end() ? JsonFault{} : walk.fault();
}

std::string name_of(std::string_view body, const JsonMember& member) {
  return decoded_string(body.substr(member.key_begin + 1, member.key_end - member.key_begin - 2));
}

JsonRest without(std::string_view body, const JsonScan& scan, const std::vector<bool>& is_removed) {
  const std::vector<JsonMember>& members = scan.members;
  assert(is_removed.size() == members.size());
  JsonRest rest;
  size_t at = scan.open + 1;
  const auto keep_until = [&](size_t end) {
    if (end > at) rest.ranges.emplace_back(at, end);
  };
  for (size_t i = 0; i < members.size(); ++i) {
    if (!is_removed[i]) {
      rest.has_members = true;
      continue;
    }
    size_t final = i;  // of a run of members that go
    while (final + 1 < members.size() && is_removed[final + 1]) ++final;
    // The comma behind the run goes with it; or, if nothing follows it, the one before it.
    const bool is_tail = final + 1 == members.size();
    keep_until(is_tail && i > 0 ? members[i - 1].comma : members[i].key_begin);
    at = is_tail ? members[final].value_end : members[final].comma + 1;
    i = final;
  }
  keep_until(body.size());
  return rest;
}

}  // namespace kvxfer
