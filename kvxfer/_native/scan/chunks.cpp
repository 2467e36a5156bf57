#include "scan/chunks.hpp"

#include <cstring>

namespace kvxfer {
namespace {

constexpr size_t kSizeDigitsMax = 7;  // chunks below 256 MiB; a longer size is left to the parser

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool has_mark(std::string_view body, const std::vector<std::string>& marks) {
  for (const std::string& mark : marks) {
    if (memmem(body.data(), body.size(), mark.data(), mark.size()) != nullptr) return true;
  }
  return false;
}

}  // namespace

size_t whole_event_bytes(std::string_view data, const std::vector<std::string>& marks) {
  size_t found = 0;
  while (!data.empty()) {
    size_t size = 0, digits = 0;
    while (digits < data.size() && digits < kSizeDigitsMax && digit(data[digits]) >= 0) size = size * 16 + static_cast<size_t>(digit(data[digits++]));
    if (digits == 0 || size == 0 || data.substr(digits, 2) != "\r\n") return 0;
    data.remove_prefix(digits + 2);
    if (data.size() < size + 2 || data.substr(size, 2) != "\r\n") return 0;
    const std::string_view body = data.substr(0, size);
    if (size < 2 || body.substr(size - 2) != "\n\n" || has_mark(body, marks)) return 0;
    found += size;
    data.remove_prefix(size + 2);
  }
  return found;
}

}  // namespace kvxfer
