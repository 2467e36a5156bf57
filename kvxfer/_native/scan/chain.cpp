#include "scan/chain.hpp"

#include <algorithm>

#include "scan/blocks.hpp"
#include "scan/scan.hpp"

namespace kvxfer {
namespace {

// What a word behind a piece of content says of it, in its low byte; above it is the piece's length in bytes.
enum class Mark : uint8_t {
  TextPart = 1,  // of a text that goes on behind a key
  Text,
  NamePart,
  Name,
  NumberPart,
  Number,
  Ids,
  True,
  False,
  Null,
  ObjectBegin,
  ObjectEnd,
  ListBegin,
  ListEnd,
  ItemEnd,
  Member,  // the name of a part
  Given,   // a text of a root
};

// A decoded text may end with three bytes behind a cut.
constexpr size_t kBufferBytes = kChainBytes + kEscapedBytesMax;

// Hashes content, and puts keys where they are due. Without a chain to fill it cuts in the same places, and there are no keys.
class ContentHash {
 public:
  ContentHash(const SipSecret& secret, uint64_t before, PromptChain* chain) : secret_(secret), hash_(secret), chain_(chain) { hash_.word(before); }

  // The chain has all the keys that it may have.
  bool is_full() const { return chain_ != nullptr && chain_->keys.size() == kChainKeysMax; }
  bool has_more() const { return held_ != 0; }
  uint64_t value() const { return hash_.value(); }

  void mark(Mark mark, uint64_t bytes = 0) { hash_.word(bytes << 8 | static_cast<uint64_t>(mark)); }

  // Content that is not counted, and never cut.
  void label(std::string_view text, Mark whole) {
    piece(text.data(), text.size());
    mark(whole, text.size());
  }

  // `p` is behind a string's first quote. Returns the place behind its last one, or any place once the chain is full.
  const char* text(const char* p, const char* end, Mark part, Mark whole) {
    char buffer[kBufferBytes];
    size_t ready = 0;  // bytes in the buffer
    while (!is_full()) {
      const size_t room = kChainBytes - held_;
      const char* content = buffer;
      if (ready == 0) {
        const char* stop = skip_unescaped(p, std::min(end, p + room));
        ready = static_cast<size_t>(stop - p);
        if (ready == room || *stop == '"') {
          content = p;
        } else {
          std::memcpy(buffer, p, ready);
        }
        p = stop;
      }
      while (ready < room && *p != '"') {
        if (*p == '\\') {
          p = decode_escape(p, end, buffer, ready);
        } else {
          const char* stop = skip_unescaped(p, std::min(end, p + (room - ready)));
          std::memcpy(buffer + ready, p, static_cast<size_t>(stop - p));
          ready += static_cast<size_t>(stop - p);
          p = stop;
        }
      }
      if (ready < room) {
        counted(content, ready, whole);
        return p + 1;
      }
      counted(content, room, part);
      cut();
      ready -= room;
      std::memmove(buffer, buffer + room, ready);
    }
    return p;
  }

  void number(const char* p, const char* end) {
    while (!is_full()) {
      const size_t left = static_cast<size_t>(end - p), room = kChainBytes - held_;
      if (left < room) return counted(p, left, Mark::Number);
      counted(p, room, Mark::NumberPart);
      cut();
      p += room;
    }
  }

  // `count` is no more than id_room().
  void ids(const uint32_t* from, size_t count) {
    if (count != 0) counted(reinterpret_cast<const char*>(from), count * kChainIdBytes, Mark::Ids);
    if (id_room() == 0) cut();
  }
  size_t id_room() const { return (kChainBytes - held_) / kChainIdBytes; }

  // A key, here.
  void cut() {
    held_ = 0;
    if (chain_ == nullptr || is_full()) return;
    const uint64_t key = hash_.value();
    chain_->keys.push_back(key);
    chain_->sizes.push_back(size_);
    hash_ = SipHash(secret_);
    hash_.word(key);
  }

 private:
  void piece(const char* from, size_t size) {
    hash_.words(from, size / 8);
    if (size % 8 != 0) hash_.word(loaded_tail(from + size / 8 * 8, size % 8));
  }
  void counted(const char* from, size_t size, Mark kind) {
    piece(from, size);
    mark(kind, size);
    size_ += size;
    held_ += size;
  }

  const SipSecret& secret_;
  SipHash hash_;
  PromptChain* chain_;
  uint64_t size_ = 0;
  size_t held_ = 0;  // bytes of content since the key before
};

// Walks over a value that is known to be valid.
class ChainWalk {
 public:
  ChainWalk(std::string_view text, ContentHash& hash) : p_(text.data()), end_(p_ + text.size()), hash_(hash) {}

  void prompts() {
    skip_spaces();
    if (peek() != '[') return one_text_or_item();
    ++p_;
    skip_spaces();
    if (peek() == ']') return;
    if (peek() == '"') return one_text_or_item();
    if (peek() == '[') ++p_;  // the first of a list of lists
    ids();
  }
  void items() {
    skip_spaces();
    if (peek() != '[') return one_text_or_item();
    ++p_;
    for (skip_separators(); peek() != ']' && !hash_.is_full(); skip_separators()) item();
  }
  // One value and all that is in it.
  void value() {
    bool is_name = false;
    depth_ = 0;
    do {
      skip_separators();
      const bool is_member = depth_ > 0 && is_object_[depth_ - 1];
      const char c = *p_++;
      switch (c) {
        case '"':
          p_ = is_name ? hash_.text(p_, end_, Mark::NamePart, Mark::Name) : hash_.text(p_, end_, Mark::TextPart, Mark::Text);
          is_name = is_member && !is_name;
          continue;
        case '{':
        case '[':
          hash_.mark(c == '{' ? Mark::ObjectBegin : Mark::ListBegin);
          is_name = is_object_[depth_++] = c == '{';
          continue;
        case '}':
        case ']':
          hash_.mark(c == '}' ? Mark::ObjectEnd : Mark::ListEnd);
          --depth_;
          break;
        case 't':
          p_ += 3;
          hash_.mark(Mark::True);
          break;
        case 'f':
          p_ += 4;
          hash_.mark(Mark::False);
          break;
        case 'n':
          p_ += 3;
          hash_.mark(Mark::Null);
          break;
        default: {
          const char* begin = p_ - 1;
          while (p_ < end_ && is_of_number(*p_)) ++p_;
          hash_.number(begin, p_);
        }
      }
      is_name = depth_ > 0 && is_object_[depth_ - 1];
    } while (depth_ > 0 && !hash_.is_full());
  }

 private:
  static bool is_of_number(char c) { return is_digit(c) || c == '.' || c == '-' || c == '+' || c == 'e' || c == 'E'; }
  char peek() const { return *p_; }
  void skip_spaces() {
    while (*p_ == ' ' || *p_ == '\n' || *p_ == '\r' || *p_ == '\t') ++p_;
  }
  // Between values: that they are apart is said by their marks.
  void skip_separators() {
    while (*p_ == ',' || *p_ == ' ' || *p_ == ':' || *p_ == '\n' || *p_ == '\r' || *p_ == '\t') ++p_;
  }
  void one_text_or_item() {
    if (peek() != '"') return item();
    hash_.text(p_ + 1, end_, Mark::TextPart, Mark::Text);
    if (hash_.has_more()) hash_.cut();
  }
  void item() {
    value();
    hash_.mark(Mark::ItemEnd);
    hash_.cut();
  }

  // Up to the list's end. What is no id of 32 bits is a value like any other.
  void ids() {
    uint32_t run[kChainBytes / kChainIdBytes];
    size_t count = 0;
    const auto put = [&] {
      hash_.ids(run, count);
      count = 0;
    };
    for (skip_separators(); peek() != ']' && !hash_.is_full(); skip_separators()) {
      if (const char* after = id(run[count]); after != nullptr) {
        p_ = after;
        if (++count == hash_.id_room()) put();
        continue;
      }
      put();
      value();
      if (hash_.id_room() == 0) hash_.cut();
    }
    put();
    hash_.mark(Mark::ListEnd);
    if (hash_.has_more()) hash_.cut();
  }
  // Behind an integer without a sign that has 32 bits, or null.
  const char* id(uint32_t& value) const {
    uint64_t number = 0;
    const char* p = p_;
    for (; is_digit(*p); ++p) {
      number = number * 10 + static_cast<uint64_t>(*p - '0');
      if (number > UINT32_MAX) return nullptr;
    }
    if (p == p_ || is_of_number(*p)) return nullptr;
    value = static_cast<uint32_t>(number);
    return p;
  }

  const char* p_;
  const char* end_;
  ContentHash& hash_;
  size_t depth_ = 0;
  bool is_object_[kDepthMax];  // by depth
};

}  // namespace

PromptChain prompt_chain(const SipSecret& secret, uint64_t root, const std::vector<PromptPart>& parts) {
  PromptChain chain;
  ContentHash hash(secret, root, &chain);
  for (const PromptPart& part : parts) {
    hash.label(part.name, Mark::Member);
    ChainWalk walk(part.value, hash);
    part.form == PromptForm::Items ? walk.items() : walk.prompts();
    if (hash.is_full()) break;
  }
  return chain;
}

uint64_t root_key(const SipSecret& secret, const std::vector<std::string_view>& texts, const std::vector<PromptPart>& members) {
  ContentHash hash(secret, 0, nullptr);
  for (const std::string_view text : texts) hash.label(text, Mark::Given);
  for (const PromptPart& member : members) {
    hash.label(member.name, Mark::Member);
    ChainWalk(member.value, hash).value();
  }
  return hash.value();
}

}  // namespace kvxfer
