// Copies between GM and UB.

#include "dma.h"

#include <algorithm>
#include <vector>

namespace emu {
namespace {

constexpr uint8_t undefined_byte = 0xff; // NaN in every float format

} // namespace

void load(const Load &copy) {
  uint64_t value = padding();
  issue(PIPE_MTE2, "asc_copy_gm2ub_align", [copy, value] {
    const char *name = "asc_copy_gm2ub_align";
    uint32_t row_bytes = copy.left_padding + copy.length + copy.right_padding;
    std::vector<uint8_t> row((row_bytes + 31) / 32 * 32, undefined_byte);
    std::vector<uint64_t> undefined((row.size() + 63) / 64, 0);
    for (size_t i = row_bytes; i < row.size(); ++i) undefined[i / 64] |= uint64_t{1} << i % 64;
    if (copy.fill_padding) {
      for (size_t i = 0; i < row_bytes; ++i) row[i] = reinterpret_cast<const uint8_t *>(&value)[i % copy.element];
    }
    // Rows that are not 32 bytes apart are packed; else each fills its last block, with undefined bytes.
    bool packed = copy.rows > 1 && copy.to_stride % 32 != 0;
    for (uint32_t i = 0; i < copy.rows; ++i) {
      uint8_t *to = copy.to + i * copy.to_stride;
      read(row.data() + copy.left_padding, copy.from + i * copy.from_stride, copy.length, name);
      bool last = i + 1 == copy.rows;
      size_t bytes = row.size();
      if (packed) bytes = last ? (static_cast<size_t>(to - ub()) + row_bytes + 31) / 32 * 32 - (to - ub()) : row_bytes;
      row.resize(std::max(row.size(), bytes), undefined_byte);
      undefined.resize((row.size() + 63) / 64, ~uint64_t{0});
      for (size_t k = row_bytes; k < bytes; ++k) undefined[k / 64] |= uint64_t{1} << k % 64;
      write(to, row.data(), bytes, name, i == 0 ? 32 : 1, undefined.data());
    }
  });
}

namespace {

template <class T> T combine(Update update, T old, T value) {
  switch (update) {
  case Update::add: return static_cast<T>(old + value);
  case Update::max: return old < value ? value : old;
  case Update::min: return value < old ? value : old;
  case Update::none: break;
  }
  return value;
}
template <class T> void update_elements(Update update, uint8_t *to, const uint8_t *from, size_t bytes) {
  for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    T old, value;
    std::memcpy(&old, to + i, sizeof old);
    std::memcpy(&value, from + i, sizeof value);
    T result = combine(update, old, value);
    std::memcpy(to + i, &result, sizeof result);
  }
}

} // namespace

void store_global(uint8_t *to, const uint8_t *from, size_t bytes, StoreMode mode, const char *name) {
  if (mode.update == Update::none) {
    write(to, from, bytes, name);
    return;
  }
  if (!atomic(to, bytes, name)) return;
  switch (mode.element) {
  case Element::int8: return update_elements<int8_t>(mode.update, to, from, bytes);
  case Element::int16: return update_elements<int16_t>(mode.update, to, from, bytes);
  case Element::int32: return update_elements<int32_t>(mode.update, to, from, bytes);
  case Element::float16: return update_elements<half>(mode.update, to, from, bytes);
  case Element::bfloat16: return update_elements<bfloat16_t>(mode.update, to, from, bytes);
  case Element::float32: return update_elements<float>(mode.update, to, from, bytes);
  }
}

void store(const Store &copy) {
  StoreMode mode = store_mode();
  issue(PIPE_MTE3, "asc_copy_ub2gm_align", [copy, mode] {
    const char *name = "asc_copy_ub2gm_align";
    std::vector<uint8_t> row(copy.length);
    std::vector<uint64_t> undefined((copy.length + 63) / 64);
    for (uint32_t i = 0; i < copy.rows; ++i) {
      const uint8_t *from = copy.from + i * copy.from_stride;
      std::fill(undefined.begin(), undefined.end(), 0);
      read(row.data(), from, copy.length, name, i == 0 ? 32 : 1, undefined.data());
      for (size_t k = 0; k < copy.length; ++k) {
        if (!(undefined[k / 64] >> k % 64 & 1)) continue;
        size_t at = static_cast<size_t>(from - ub()) + k;
        size_t end = at;
        while (k < copy.length && undefined[k / 64] >> k % 64 & 1) ++k, ++end;
        fail(name, "uninitialised: stores UB bytes [%zu, %zu), to which nothing defined was written", at, end);
        break;
      }
      store_global(copy.to + i * copy.to_stride, row.data(), copy.length, mode, name);
    }
  });
}

} // namespace emu
