// The keys of a prompt: hashes of what its JSON says, each of all that stands before it, so that two prompts share the keys of what
// they begin with in common. Decides where the keys of a chain are, and what is hashed; it must never know which worker holds what, nor
// what a field means. Depends on no other room, and keeps no reference to the bytes.
//
// What is hashed is the content that a parser reads, as words of 8 bytes: a piece of content, filled up with zeros to whole words, and
// behind it one word with the piece's kind and length. Read from its end, such a stream can mean one thing only. So neither spaces nor
// the spelling of a string matter, and the order of members does. A text is cut where a key is, and its length stands behind it:
// nothing in front of a key says how the text goes on.
//
//   key[i] = SipHash-2-4(secret, key[i - 1], the words between them), and key[-1] is the root.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "scan/siphash.hpp"

namespace kvxfer {

// So many bytes of content, or a quarter as many token ids, lie between two keys at most.
constexpr size_t kChainBytes = 2048;
constexpr size_t kChainIdBytes = 4;
// A longer chain ends there: 8 MiB of text without a break.
constexpr size_t kChainKeysMax = 4096;

enum class PromptForm : uint8_t {
  Prompts,  // a text or a list of token ids, or a list of such prompts, of which the first one counts
  Items,    // a text or a list of messages or items, each of which ends with a key
};

// A member of a body, all of whose bytes are valid JSON.
struct PromptPart {
  std::string_view name;  // decoded
  std::string_view value;
  PromptForm form = PromptForm::Items;
};

// `sizes`: the bytes of content in front of each key: those of decoded strings, of members' names and of numbers as they are written;
// and four for a token id.
struct PromptChain {
  std::vector<uint64_t> keys, sizes;
};

// The chain of parts that an engine reads in this order. A key stands behind every kChainBytes and at the end of each item, text or
// list of ids; there is none at an end where nothing lies between it and the key before.
PromptChain prompt_chain(const SipSecret& secret, uint64_t root, const std::vector<PromptPart>& parts);

// One key of some texts and members, in this order. No chain has it but as its root.
uint64_t root_key(const SipSecret& secret, const std::vector<std::string_view>& texts, const std::vector<PromptPart>& members);

}  // namespace kvxfer
