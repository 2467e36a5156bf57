#include "ucx_key.hpp"

namespace kvxfer {
namespace {

constexpr uint8_t kKeyVersion = 1;
constexpr size_t kKeyHeader = 3;
constexpr size_t kAddressMax = 8 * 1024;

}  // namespace

std::string write_ucx_key(std::string_view address, std::string_view packed) {
  std::string key;
  key.push_back(static_cast<char>(kKeyVersion));
  key.push_back(static_cast<char>(address.size() & 0xff));
  key.push_back(static_cast<char>(address.size() >> 8));
  key += address;
  key += packed;
  if (address.size() > kAddressMax || key.size() > kMapKeyMax) throw Error(Code::no_lane, "UCX's address and key do not fit a MAP frame");
  return key;
}

UcxKeyParts read_ucx_key(const Map& map) {
  if (map.region_bytes == 0) throw Error(Code::no_lane, printable(map.key.substr(0, kTextMax)));
  if (map.key.size() <= kKeyHeader || map.key[0] != kKeyVersion) throw Error(Code::no_lane, "the peer's UCX key has another version than ours");
  const size_t size = static_cast<uint8_t>(map.key[1]) | static_cast<size_t>(static_cast<uint8_t>(map.key[2])) << 8;
  if (size == 0 || size > kAddressMax || size >= map.key.size() - kKeyHeader) throw Error(Code::no_lane, "the peer's UCX key is cut short");
  if (map.address == 0 || map.address + map.region_bytes < map.address) throw Error(Code::no_lane, "the peer's memory has no valid address");
  return {map.key.substr(kKeyHeader, size), map.key.substr(kKeyHeader + size)};
}

}  // namespace kvxfer
