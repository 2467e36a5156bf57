// How values cross into Python: ids, nonces, keys and digests are `bytes` of their exact length.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "machines/endpoint.hpp"

namespace nanobind::detail {

template <size_t N>
struct bytes_caster {
  static bool load(handle src, uint8_t* to) noexcept {
    if (!PyBytes_Check(src.ptr()) || static_cast<size_t>(PyBytes_GET_SIZE(src.ptr())) != N) return false;
    std::memcpy(to, PyBytes_AS_STRING(src.ptr()), N);
    return true;
  }
  static handle store(const uint8_t* from) noexcept { return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(from), N); }
};

template <size_t N>
struct type_caster<std::array<uint8_t, N>> {
  using Bytes = std::array<uint8_t, N>;
  NB_TYPE_CASTER(Bytes, const_name("bytes"))
  bool from_python(handle src, uint8_t, cleanup_list*) noexcept { return bytes_caster<N>::load(src, value.data()); }
  static handle from_cpp(const Bytes& v, rv_policy, cleanup_list*) noexcept { return bytes_caster<N>::store(v.data()); }
};

template <>
struct type_caster<kvxfer::TransferId> {
  NB_TYPE_CASTER(kvxfer::TransferId, const_name("bytes"))
  bool from_python(handle src, uint8_t, cleanup_list*) noexcept { return bytes_caster<16>::load(src, value.raw.data()); }
  static handle from_cpp(const kvxfer::TransferId& v, rv_policy, cleanup_list*) noexcept { return bytes_caster<16>::store(v.raw.data()); }
};

}  // namespace nanobind::detail

namespace kvxfer {

namespace nb = nanobind;

// A share of ranges that can be dropped by any thread, which nanobind's own shared pointers cannot: they want the GIL.
struct PyRanges {
  std::shared_ptr<const Ranges> ranges;
};

inline std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
inline nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// The ids that are meant.
inline std::vector<uint32_t> ids_of(const Extent& extent) {
  if (!extent.ids) return {};
  const auto begin = extent.ids->begin() + extent.first;
  return {begin, begin + extent.count};
}

void bind_ranges(nb::module_& m);  // bind_frames.cpp
void bind_frames(nb::module_& m);

#ifndef KVXFER_SEEDED_BUGS
void bind_core(nb::module_& m);   // the IO half, in bind_core.cpp
void bind_lanes(nb::module_& m);  // what lanes tell beside the core, in bind_lanes.cpp
void bind_scan(nb::module_& m);   // the JSON scanner, in bind_scan.cpp
void bind_ucx(nb::module_& m);    // what a UCX library can do here, in bind_ucx.cpp
#endif

}  // namespace kvxfer

namespace kvxfer {

using SegmentTuple = std::tuple<uint64_t, uint64_t, uint64_t>;  // offset, stride, length

inline std::vector<Segment> to_segments(const std::vector<SegmentTuple>& tuples) {
  std::vector<Segment> segments;
  for (const auto& [offset, stride, length] : tuples) segments.push_back({offset, stride, length});
  return segments;
}

}  // namespace kvxfer
