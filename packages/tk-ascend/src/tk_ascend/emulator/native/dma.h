// Copies between GM and UB, and scalar access to GM.
#pragma once

#include "machine.h"
#include "types.h"

enum asc_load_l2_cache_mode : int {};
enum asc_store_l2_cache_mode : int {};

namespace emu {

// Rows of a padded copy from GM to UB, in bytes.
struct Load {
  uint8_t *to;
  const uint8_t *from;
  uint32_t rows, length, left_padding, right_padding;
  bool fill_padding;
  int64_t from_stride, to_stride;
  uint32_t element;
};
struct Store {
  uint8_t *to;
  const uint8_t *from;
  uint32_t rows, length;
  int64_t to_stride, from_stride;
};
void load(const Load &copy);
void store(const Store &copy);
void set_padding(uint64_t bits);
uint64_t padding();

// What stores to GM do to the values that are there.
enum class Update { none, add, max, min };
enum class Element { int8, int16, int32, float16, bfloat16, float32 };
void set_update(Update update, Element element);
// What a store issued now will do.
struct StoreMode {
  Update update = Update::none;
  Element element = Element::float32;
};
StoreMode store_mode();
void store_global(uint8_t *to, const uint8_t *from, size_t bytes, StoreMode mode, const char *instruction);

} // namespace emu

template <class T> inline void asc_set_copy_pad_val(T bits) { emu::set_padding(bits); }

template <class T>
inline void asc_copy_gm2ub_align(T *to, T *from, uint32_t rows, uint32_t length, uint32_t left, uint32_t right,
                                 int fill, asc_load_l2_cache_mode, int64_t from_stride, int64_t to_stride) {
  constexpr uint32_t size = sizeof(T);
  emu::load({reinterpret_cast<uint8_t *>(to), reinterpret_cast<const uint8_t *>(from), rows, length, left * size,
             right * size, fill != 0, from_stride, to_stride, size});
}
inline void asc_copy_ub2gm_align(uint8_t *to, uint8_t *from, uint32_t rows, uint32_t length, asc_store_l2_cache_mode,
                                 int64_t to_stride, int64_t from_stride) {
  emu::store({to, from, rows, length, to_stride, from_stride});
}

template <class T> inline T asc_load_dev(T *address) {
  T value;
  emu::read(&value, address, sizeof value, "asc_load_dev");
  return value;
}
template <class T> inline void asc_store_dev(T *address, T value) {
  emu::write(address, &value, sizeof value, "asc_store_dev");
}

#define EMU_ATOMIC_STORES(suffix, element)                                                                             \
  inline void asc_set_atomic_add_##suffix() { emu::set_update(emu::Update::add, emu::Element::element); }              \
  inline void asc_set_atomic_max_##suffix() { emu::set_update(emu::Update::max, emu::Element::element); }              \
  inline void asc_set_atomic_min_##suffix() { emu::set_update(emu::Update::min, emu::Element::element); }
EMU_ATOMIC_STORES(int8, int8)
EMU_ATOMIC_STORES(int16, int16)
EMU_ATOMIC_STORES(int32, int32)
EMU_ATOMIC_STORES(float16, float16)
EMU_ATOMIC_STORES(bfloat, bfloat16)
EMU_ATOMIC_STORES(float, float32)
inline void asc_set_atomic_none() { emu::set_update(emu::Update::none, emu::Element::float32); }
