// JSON bodies, compared with a reader that is written the plainest way: which bodies are refused, which members there are, and what a
// body says when some of its members go. And the chain of each member as a prompt. The input is the body as it is; its length also says
// which members go.
#include <cctype>
#include <optional>

#include "input.hpp"
#include "scan/chain.hpp"
#include "scan/scan.hpp"

using namespace kvxfer;
using namespace kvxfer::fuzz;

namespace {

struct PlainMember {
  std::string key, value;  // as they are written
  bool operator==(const PlainMember& o) const { return key == o.key && value == o.value; }
};

// A recursive reader that throws itself out at the first wrong byte. It knows the outer object's members.
class PlainReader {
 public:
  struct Wrong {};

  explicit PlainReader(std::string_view text) : text_(text) {}

  std::vector<PlainMember> object() {
    std::vector<PlainMember> members;
    if (text_.substr(0, 3) == "\xef\xbb\xbf") at_ = 3;
    spaces();
    container('{', '}', 1, [&] {
      const size_t key = at_;
      string();
      const std::string name(text_.substr(key, at_ - key));
      spaces();
      need(':');
      spaces();
      const size_t value_begin = at_;
      value(2);
      members.push_back({name, std::string(text_.substr(value_begin, at_ - value_begin))});
    });
    spaces();
    if (at_ != text_.size() || members.size() > kMembersMax) throw Wrong{};
    return members;
  }

 private:
  int next() const { return at_ < text_.size() ? static_cast<uint8_t>(text_[at_]) : -1; }
  void need(int c) {
    if (next() != c) throw Wrong{};
    ++at_;
  }
  void spaces() {
    while (next() == ' ' || next() == '\t' || next() == '\n' || next() == '\r') ++at_;
  }
  template <class F>
  void container(char open, char close, size_t depth, F&& item) {
    need(open);
    if (depth > kDepthMax) throw Wrong{};
    spaces();
    if (next() == close) return need(close);
    for (;;) {
      item();
      spaces();
      if (next() == close) return need(close);
      need(',');
      spaces();
    }
  }
  void value(size_t depth) {
    if (next() == '"') return string();
    if (next() == '[') return container('[', ']', depth, [&] { value(depth + 1); });
    if (next() == '{') {
      return container('{', '}', depth, [&] {
        string();
        spaces();
        need(':');
        spaces();
        value(depth + 1);
      });
    }
    for (const char* literal : {"true", "false", "null"}) {
      if (next() != literal[0]) continue;
      for (const char* c = literal; *c != '\0'; ++c) need(*c);
      return;
    }
    number();
  }
  size_t digits() {
    size_t count = 0;
    for (; next() >= '0' && next() <= '9'; ++at_) ++count;
    if (count == 0) throw Wrong{};
    return count;
  }
  void number() {
    if (next() == '-') ++at_;
    const bool is_zero = next() == '0';
    const size_t before = digits();
    if (is_zero && before > 1) throw Wrong{};
    bool is_integer = true;
    if (next() == '.') {
      ++at_;
      digits();
      is_integer = false;
    }
    if (next() == 'e' || next() == 'E') {
      ++at_;
      if (next() == '+' || next() == '-') ++at_;
      digits();
      is_integer = false;
    }
    if (is_integer && before > kIntegerDigitsMax) throw Wrong{};
  }
  void string() {
    need('"');
    while (next() != '"') {
      if (next() < 0x20) throw Wrong{};
      next() == '\\' ? escape() : next() < 0x80 ? void(++at_) : letter();
    }
    ++at_;
  }
  void escape() {
    ++at_;
    const int c = next();
    ++at_;
    if (c == 'u') {
      for (int i = 0; i < 4; ++i, ++at_) {
        if (next() < 0 || std::isxdigit(next()) == 0) throw Wrong{};
      }
    } else if (c <= 0 || std::string_view("\"\\/bfnrt").find(static_cast<char>(c)) == std::string_view::npos) {
      throw Wrong{};
    }
  }
  // Decodes, and looks at the code point.
  void letter() {
    const int first = next();
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc0 || first > 0xf7) throw Wrong{};
    uint32_t point = static_cast<uint32_t>(first) & (0x3fU >> more);
    ++at_;
    for (int i = 0; i < more; ++i, ++at_) {
      if (next() < 0x80 || next() > 0xbf) throw Wrong{};
      point = point << 6 | (static_cast<uint32_t>(next()) & 0x3f);
    }
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (point < kLeast[more] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) throw Wrong{};
  }

  std::string_view text_;
  size_t at_ = 0;
};

std::optional<std::vector<PlainMember>> plain_members(std::string_view body) {
  try {
    return PlainReader(body).object();
  } catch (const PlainReader::Wrong&) {
    return std::nullopt;
  }
}

std::vector<PlainMember> written(std::string_view body, const JsonScan& scan) {
  std::vector<PlainMember> members;
  for (const JsonMember& m : scan.members)
    members.push_back({std::string(body.substr(m.key_begin, m.key_end - m.key_begin)), std::string(body.substr(m.value_begin, m.value_end - m.value_begin))});
  return members;
}

void try_rest(std::string_view body, const JsonScan& scan, const std::vector<PlainMember>& all, uint8_t pattern) {
  std::vector<bool> is_removed(all.size());
  std::vector<PlainMember> kept;
  for (size_t i = 0; i < all.size(); ++i) {
    is_removed[i] = (pattern >> (i % 8) & 1) != 0;
    if (!is_removed[i]) kept.push_back(all[i]);
  }
  const JsonRest rest = without(body, scan, is_removed);
  check(rest.has_members == !kept.empty(), "another answer to whether a member stays");
  std::string left(body.substr(0, scan.open + 1));
  size_t at = left.size();
  for (const auto& [begin, end] : rest.ranges) {
    check(at <= begin && begin < end && end <= body.size(), "ranges out of order");
    left += body.substr(begin, end - begin);
    at = end;
  }
  check(plain_members(left) == std::optional(kept), "the rest of a body has other members");
  if (kept.size() == all.size()) check(left == body, "a body changed from which nothing goes");
}

// Keys stand in order, at most an interval apart; and a value alone in memory has the same ones.
void try_chain(std::string_view body, const JsonMember& member) {
  const SipSecret secret(filled<16>(7));
  const std::string name = name_of(body, member);
  const std::string_view value = body.substr(member.value_begin, member.value_end - member.value_begin);
  const std::string alone = "[" + std::string(value) + "]";
  for (const PromptForm form : {PromptForm::Prompts, PromptForm::Items}) {
    const PromptChain chain = prompt_chain(secret, 1, {{name, value, form}});
    check(chain.keys.size() == chain.sizes.size() && chain.keys.size() <= kChainKeysMax, "another number of sizes than of keys");
    uint64_t before = 0;
    for (const uint64_t size : chain.sizes) {
      check(before <= size && size <= before + kChainBytes, "a key out of its place");
      before = size;
    }
    const PromptChain again = prompt_chain(secret, 1, {{name, std::string_view(alone).substr(1, value.size()), form}});
    check(again.keys == chain.keys && again.sizes == chain.sizes, "the chain of the same value is another one");
  }
  check(root_key(secret, {}, {{name, value}}) != root_key(secret, {name}, {{name, value}}), "a root that a text does not change");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  static const JsonFields fields({"model", "stream", "prompt", "\xc3\xa9", ""});
  JsonScan scan;
  const JsonFault fault = scan_object(body, fields, scan);
  const std::optional<std::vector<PlainMember>> all = plain_members(body);
  check((fault.what == nullptr) == all.has_value(), fault.what == nullptr ? "a body was accepted that is not JSON" : "a JSON object was refused");
  if (!all) {
    check(fault.at >= body.data() && fault.at <= body.data() + body.size(), "the fault lies outside of the body");
    return 0;
  }
  check(check_value(body).what == nullptr || body[0] == '\xef', "an object is not a value");
  check(written(body, scan) == *all, "other members");
  for (size_t field = 0; field < fields.names().size(); ++field) {
    uint16_t last = kNoMember;
    for (size_t i = 0; i < scan.members.size(); ++i) {
      const bool is_field = name_of(body, scan.members[i]) == fields.names()[field];
      check(is_field == (scan.members[i].field == field), "a member of another name");
      if (is_field) last = static_cast<uint16_t>(i);
    }
    check(scan.last[field] == last, "not the last member of a name");
  }
  for (const JsonMember& member : scan.members) try_chain(body, member);
  for (const unsigned pattern : {0U, 0xffU, static_cast<unsigned>(size * 37) & 0xffU})
    try_rest(body, scan, *all, static_cast<uint8_t>(pattern));
  return 0;
}
