// The matrix unit: copies between GM, L1, L0 and UB, and multiplication. Pointers to L1 and L0 are offsets.
#pragma once

#include "dma.h"
#include "machine.h"
#include "simd.h"
#include "types.h"

namespace emu {

// The address of `bytes` bytes of a memory of this core, checked and recorded; null when out of range.
uint8_t *touch(Memory memory, uint64_t offset, size_t bytes, bool writes, const char *instruction);
// UB of a vector core of this block.
uint8_t *vector_ub(int sub_block);

struct StoreMode {
  Update update;
  Element element;
};
StoreMode store_mode();
void store_global(uint8_t *to, const uint8_t *from, size_t bytes, StoreMode mode, const char *instruction);

} // namespace emu
