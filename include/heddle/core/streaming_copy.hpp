#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace heddle {

/// Bytes of a result from which on it pays to write past the caches: no last-level cache that a core has
/// to itself holds it until somebody reads it.
inline constexpr std::int64_t streaming_bytes = std::int64_t{32} << 20;

/// memcpy past the caches, for payload that is far larger than they are: a plain store reads the line
/// it is about to overwrite, a third of the traffic.
///
/// alias     disjoint
/// specials  bytes = 0 is legal, whatever the pointers; any alignment
/// order     others may read the destination once fence_stores() has run on this thread
inline void streaming_copy(const void* source, void* destination, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t line = 64;
  const auto* from = static_cast<const std::byte*>(source);
  auto* to = static_cast<std::byte*>(destination);
  const std::size_t head =
      std::min(bytes, (line - reinterpret_cast<std::uintptr_t>(to) % line) % line);
  std::memcpy(to, from, head);
  from += head;
  to += head;
  bytes -= head;
  for (; bytes >= line; bytes -= line, from += line, to += line) {
    const auto load = [from](std::size_t part) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * part));
    };
    const __m128i first = load(0);
    const __m128i second = load(1);
    const __m128i third = load(2);
    const __m128i fourth = load(3);
    auto* const out = reinterpret_cast<__m128i*>(to);
    _mm_stream_si128(out, first);
    _mm_stream_si128(out + 1, second);
    _mm_stream_si128(out + 2, third);
    _mm_stream_si128(out + 3, fourth);
  }
  std::memcpy(to, from, bytes);
#else
  std::memcpy(destination, source, bytes);
#endif
}

/// Makes what streaming_copy wrote on this thread visible like any other store.
inline void fence_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace heddle
