// The matrix unit.

#include "cube.h"

#include <algorithm>
#include <vector>

namespace emu {
namespace {

constexpr int fractal_rows = 16;
constexpr int block_bytes = 32;
constexpr int fractal_bytes = fractal_rows * block_bytes;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

uint32_t fractal_pitch = 0;
bool hf32 = false;

int bits_of(Operand operand) {
  switch (operand) {
  case Operand::f32: return 32;
  case Operand::f16:
  case Operand::bf16: return 16;
  case Operand::e4m3:
  case Operand::e5m2:
  case Operand::s8: return 8;
  case Operand::e2m1: return 4;
  }
  return 8;
}

template <class T> T load_as(const uint8_t *from) {
  T value;
  std::memcpy(static_cast<void *>(&value), from, sizeof value);
  return value;
}

float decode(Operand operand, const uint8_t *tile, size_t element) {
  switch (operand) {
  case Operand::f32: return load_as<float>(tile + 4 * element);
  case Operand::f16: return static_cast<float>(load_as<half>(tile + 2 * element));
  case Operand::bf16: return load_as<bfloat16_t>(tile + 2 * element);
  case Operand::e4m3: return E4M3::decode(tile[element]);
  case Operand::e5m2: return E5M2::decode(tile[element]);
  case Operand::e2m1: return E2M1::decode(tile[element / 2] >> element % 2 * 4 & 15);
  case Operand::s8: return static_cast<float>(static_cast<int8_t>(tile[element]));
  }
  return 0;
}

float decode_scale(uint8_t code) { return code == 255 ? NAN : std::ldexp(1.0f, code - 127); }

// An operand as rows by depth numbers, scaled in groups of 32 when the unit does that.
bool load_operand(const Multiply &product, bool left, std::vector<float> &values, const char *name) {
  int rows = left ? product.rows : product.columns;
  int bits = bits_of(product.operand);
  size_t c0 = static_cast<size_t>(8 * block_bytes / bits);
  size_t pitch = round_up(static_cast<size_t>(rows), fractal_rows);
  size_t bytes = pitch * round_up(static_cast<size_t>(product.depth), c0) * static_cast<size_t>(bits) / 8;
  uint64_t address = left ? product.left : product.right;
  const uint8_t *tile = touch(left ? Memory::l0a : Memory::l0b, address, bytes, false, name);
  if (!tile) return false;
  size_t pairs = round_up(static_cast<size_t>(product.depth), 64) / 64;
  const uint8_t *scales = nullptr;
  if (product.scaled) {
    Memory memory = left ? Memory::l0a_scale : Memory::l0b_scale;
    scales = touch(memory, address / 16, pitch * pairs * 2, false, name);
    if (!scales) return false;
  }
  values.resize(static_cast<size_t>(rows) * product.depth);
  for (size_t k = 0; k < static_cast<size_t>(product.depth); ++k) {
    for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
      float value = decode(product.operand, tile, (k / c0 * pitch + i) * c0 + k % c0);
      if (scales) value *= decode_scale(scales[(i / 16 * pairs + k / 64) * 32 + i % 16 * 2 + k / 32 % 2]);
      // The left operand row by row, the right one depth by depth.
      values[left ? i * product.depth + k : k * rows + i] = value;
    }
  }
  return true;
}

// Adds the products in ascending depth; C is fractals of 16 columns of 4-byte numbers.
template <class A>
void accumulate(const Multiply &product, const std::vector<float> &left, const std::vector<float> &right, uint8_t *to) {
  size_t pitch = round_up(static_cast<size_t>(product.rows), fractal_rows);
  auto columns = static_cast<size_t>(product.columns);
  std::vector<A> sums(columns);
  for (size_t i = 0; i < static_cast<size_t>(product.rows); ++i) {
    auto at = [&](size_t j) { return to + ((j / 16 * pitch + i) * 16 + j % 16) * sizeof(A); };
    for (size_t j = 0; j < columns; ++j) sums[j] = product.clear ? A(0) : load_as<A>(at(j));
    for (size_t k = 0; k < static_cast<size_t>(product.depth); ++k) {
      float a = left[i * product.depth + k];
      const float *b = right.data() + k * columns;
      for (size_t j = 0; j < columns; ++j) sums[j] += static_cast<A>(a * b[j]);
    }
    for (size_t j = 0; j < columns; ++j) std::memcpy(at(j), &sums[j], sizeof(A));
  }
}

// One row of L0C in the type of the destination.
void convert_row(const Drain &copy, const uint8_t *row, int columns, size_t column_pitch, uint8_t *to,
                 const char *name) {
  enum { none = 0, to_half = 1, to_bfloat16 = 16 };
  for (int j = 0; j < columns; ++j) {
    const uint8_t *from = row + static_cast<size_t>(j / 16) * column_pitch + static_cast<size_t>(j % 16) * 4;
    uint8_t *element = to + static_cast<size_t>(j) * copy.element;
    if (copy.integer && copy.conversion == none && copy.element == 4) {
      int32_t value = load_as<int32_t>(from);
      if (copy.relu) value = std::max(value, 0);
      std::memcpy(element, &value, 4);
      continue;
    }
    auto value = load_as<float>(from);
    if (copy.relu && !(value > 0)) value = std::isnan(value) ? value : 0;
    if (copy.conversion == none && copy.element == 4) {
      std::memcpy(element, &value, 4);
    } else if (copy.conversion == to_half && copy.element == 2) {
      auto result = static_cast<half>(value);
      std::memcpy(element, &result, 2);
    } else if (copy.conversion == to_bfloat16 && copy.element == 2) {
      auto result = bfloat16_t(value);
      std::memcpy(element, &result, 2);
    } else {
      fail(name, "conversion %d to %u-byte elements is not emulated", copy.conversion, copy.element);
      return;
    }
  }
}

using StoreRow = std::function<void(int row, const uint8_t *data, size_t bytes)>;

void drain(const Drain &copy, int first_row, int first_column, int rows, int columns, const char *name,
           const StoreRow &store) {
  size_t pitch = static_cast<size_t>(copy.from_pitch) * fractal_rows * 4;
  size_t bytes = round_up(static_cast<size_t>(copy.columns), 16) / 16 * pitch;
  const uint8_t *tile = touch(Memory::l0c, copy.from, bytes, false, name);
  if (!tile) return;
  std::vector<uint8_t> line(static_cast<size_t>(columns) * copy.element);
  for (int i = 0; i < rows; ++i) {
    const uint8_t *row = tile + static_cast<size_t>(first_column / 16) * pitch +
                         static_cast<size_t>(first_row + i) * fractal_rows * 4;
    convert_row(copy, row, columns, pitch, line.data(), name);
    store(i, line.data(), line.size());
  }
}

} // namespace

void set_fractal_pitch(uint32_t rows) { fractal_pitch = rows; }

void load_fractals(const Fractals &copy) {
  const char *name = copy.transpose ? "asc_copy_gm2l1_dn2nz" : "asc_copy_gm2l1_nd2nz";
  uint32_t pitch = fractal_pitch;
  issue(PIPE_MTE2, name, [copy, pitch, name] {
    uint32_t c0 = block_bytes / copy.element;
    std::vector<uint8_t> source(static_cast<size_t>(copy.rows) * copy.columns * copy.element);
    uint32_t lines = copy.transpose ? copy.columns : copy.rows, length = copy.transpose ? copy.rows : copy.columns;
    for (uint32_t i = 0; i < lines; ++i) {
      read(source.data() + static_cast<size_t>(i) * length * copy.element, copy.from + i * copy.row_bytes,
           static_cast<size_t>(length) * copy.element, name);
    }
    for (uint32_t group = 0; group * c0 < copy.columns; ++group) {
      uint32_t width = std::min(c0, copy.columns - group * c0);
      uint64_t begin = copy.to + static_cast<uint64_t>(group) * pitch * block_bytes;
      uint8_t *to = touch(Memory::l1, begin, static_cast<size_t>(copy.rows) * block_bytes, true, name);
      if (!to) return;
      for (uint32_t r = 0; r < copy.rows; ++r) {
        for (uint32_t c = 0; c < width; ++c) {
          size_t column = static_cast<size_t>(group) * c0 + c;
          size_t from = copy.transpose ? column * length + r : static_cast<size_t>(r) * length + column;
          std::memcpy(to + static_cast<size_t>(r) * block_bytes + c * copy.element, source.data() + from * copy.element,
                      copy.element);
        }
        // The rest of a block is filled with zeros.
        std::memset(to + static_cast<size_t>(r) * block_bytes + width * copy.element, 0, (c0 - width) * copy.element);
      }
    }
  });
}

void fill_l1(uint64_t to, uint32_t word, uint32_t word_bytes, uint64_t repeat, uint64_t blocks, uint64_t gap) {
  issue(PIPE_MTE2, "asc_fill_l1", [=] {
    for (uint64_t i = 0; i < repeat; ++i) {
      uint8_t *at = touch(Memory::l1, to + i * (blocks + gap) * block_bytes, blocks * block_bytes, true, "asc_fill_l1");
      if (!at) return;
      for (uint64_t k = 0; k < blocks * block_bytes; k += word_bytes) std::memcpy(at + k, &word, word_bytes);
    }
  });
}

void store_l1(uint64_t to, const uint8_t *from, int bursts, int length, int from_gap, int to_gap) {
  issue(PIPE_MTE3, "asc_copy_ub2l1", [=] {
    size_t bytes = static_cast<size_t>(length) * block_bytes;
    std::vector<uint8_t> data(bytes);
    for (int i = 0; i < bursts; ++i) {
      const uint8_t *source = from + static_cast<int64_t>(i) * (length + from_gap) * block_bytes;
      read(data.data(), source, bytes, "asc_copy_ub2l1", 32);
      uint64_t at = to + static_cast<uint64_t>(i) * (length + to_gap) * block_bytes;
      uint8_t *target = touch(Memory::l1, at, bytes, true, "asc_copy_ub2l1");
      if (!target) return;
      std::memcpy(target, data.data(), bytes);
    }
  });
}

void load_l0(Memory memory, const Tile &tile) {
  const char *name = memory == Memory::l0a ? (tile.transpose ? "asc_copy_l12l0a_transpose" : "asc_copy_l12l0a")
                                           : (tile.transpose ? "asc_copy_l12l0b_transpose" : "asc_copy_l12l0b");
  issue(PIPE_MTE1, name, [memory, tile, name] {
    int c0 = block_bytes / static_cast<int>(tile.element);
    int to_rows = tile.transpose ? tile.columns * c0 / fractal_rows : tile.rows;
    int to_groups = tile.transpose ? tile.rows * fractal_rows / c0 : tile.columns;
    if (tile.to_pitch < to_rows) {
      fail(name, "destination pitch of %d fractals is less than the %d rows of fractals", tile.to_pitch, to_rows);
      return;
    }
    std::vector<const uint8_t *> from(static_cast<size_t>(tile.columns));
    for (int k = 0; k < tile.columns; ++k) {
      uint64_t at = tile.from + static_cast<uint64_t>((tile.column + k) * tile.from_pitch + tile.row) * fractal_bytes;
      from[k] = touch(Memory::l1, at, static_cast<size_t>(tile.rows) * fractal_bytes, false, name);
      if (!from[k]) return;
    }
    for (int group = 0; group < to_groups; ++group) {
      uint64_t at = tile.to + static_cast<uint64_t>(group) * tile.to_pitch * fractal_bytes;
      uint8_t *to = touch(memory, at, static_cast<size_t>(to_rows) * fractal_bytes, true, name);
      if (!to) return;
      if (!tile.transpose) {
        std::memcpy(to, from[group], static_cast<size_t>(to_rows) * fractal_bytes);
        continue;
      }
      for (int row = 0; row < to_rows * fractal_rows; ++row) {
        for (int c = 0; c < c0; ++c) {
          // Element (row, group * c0 + c) of the result is element (group * c0 + c, row) of the source.
          const uint8_t *source = from[row / c0] + (group * c0 + c) * block_bytes + row % c0 * tile.element;
          std::memcpy(to + row * block_bytes + c * tile.element, source, tile.element);
        }
      }
    }
  });
}

void load_scales(Memory memory, uint64_t to, uint64_t from, int row, int pair, int rows, int pairs, int from_pitch,
                 int to_pitch) {
  const char *name = memory == Memory::l0a_scale ? "asc_copy_l12l0a_mx" : "asc_copy_l12l0b_mx";
  issue(PIPE_MTE1, name, [=] {
    for (int i = 0; i < rows; ++i) {
      size_t bytes = static_cast<size_t>(pairs) * block_bytes;
      uint64_t source_at = from + static_cast<uint64_t>((row + i) * from_pitch + pair) * block_bytes;
      const uint8_t *source = touch(Memory::l1, source_at, bytes, false, name);
      uint8_t *target = touch(memory, to + static_cast<uint64_t>(i) * to_pitch * block_bytes, bytes, true, name);
      if (!source || !target) return;
      std::memcpy(target, source, bytes);
    }
  });
}

void multiply(const Multiply &product) {
  if (product.unit_flag) lock_unit(PIPE_M);
  const char *name = product.scaled ? "asc_mmad_mx" : "asc_mmad";
  if (hf32 && product.operand == Operand::f32) fail(name, "HF32 mode is not emulated");
  issue(PIPE_M, name, [product, name] {
    multiplications += static_cast<uint64_t>(product.rows) * product.depth * product.columns;
    std::vector<float> left, right;
    if (!load_operand(product, true, left, name) || !load_operand(product, false, right, name)) return;
    size_t bytes = round_up(product.rows, fractal_rows) * round_up(product.columns, 16) * 4;
    if (!product.clear && !touch(Memory::l0c, product.to, bytes, false, name)) return;
    uint8_t *to = touch(Memory::l0c, product.to, bytes, true, name);
    if (!to) return;
    if (product.integer) {
      accumulate<int32_t>(product, left, right, to);
    } else {
      accumulate<float>(product, left, right, to);
    }
  });
  if (product.unit_flag) unlock_unit(PIPE_M);
}

void drain_to_ub(uint8_t *to, const Drain &copy, int sub_block, int dual) {
  if (copy.unit_flag) lock_unit(PIPE_FIX);
  int64_t offset = to - ub();
  issue(PIPE_FIX, "asc_copy_l0c2ub", [=] {
    const char *name = "asc_copy_l0c2ub";
    int rows = dual == 1 ? copy.rows / 2 : copy.rows, columns = dual == 2 ? copy.columns / 2 : copy.columns;
    for (int part = 0; part < (dual ? 2 : 1); ++part) {
      uint8_t *base = vector_ub(dual ? part : sub_block);
      if (!base) {
        fail(name, "this kernel has no vector core %d", dual ? part : sub_block);
        return;
      }
      int first_row = dual == 1 ? part * rows : 0, first_column = dual == 2 ? part * columns : 0;
      drain(copy, first_row, first_column, rows, columns, name, [&](int row, const uint8_t *data, size_t bytes) {
        write(base + offset + static_cast<int64_t>(row) * copy.to_pitch * copy.element, data, bytes, name);
      });
    }
  });
  if (copy.unit_flag) unlock_unit(PIPE_FIX);
}

void drain_to_gm(uint8_t *to, const Drain &copy) {
  if (copy.unit_flag) lock_unit(PIPE_FIX);
  StoreMode mode = store_mode();
  issue(PIPE_FIX, "asc_copy_l0c2gm", [=] {
    const char *name = "asc_copy_l0c2gm";
    drain(copy, 0, 0, copy.rows, copy.columns, name, [&](int row, const uint8_t *data, size_t bytes) {
      store_global(to + static_cast<int64_t>(row) * copy.to_pitch * copy.element, data, bytes, mode, name);
    });
  });
  if (copy.unit_flag) unlock_unit(PIPE_FIX);
}

void enable_hf32(bool on) { hf32 = on; }

} // namespace emu
