// Bytes of a chunked HTTP/1.1 body that can be passed on as they came. Pure.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvxfer {

// The bytes of body in `data` where it is whole chunks and nothing else (RFC 9112, section 7.1: no extensions, not the last
// chunk), where each chunk is whole events (it ends with an empty line), and where none of `marks` occurs in it. Otherwise 0.
size_t whole_event_bytes(std::string_view data, const std::vector<std::string>& marks);

}  // namespace kvxfer
