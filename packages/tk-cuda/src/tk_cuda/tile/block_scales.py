"""Scales of two-dimensional blocks: which of them a kernel writes where.

``T.import_source(SOURCE)`` (after ``tile.source``) brings functions that write the scale of block ``(row, column)`` of
``rows x columns`` blocks into a tensor with strides ``s0, s1``. The writer of the last block of a row or column also
writes the padding behind it: the unused bytes of a packed word, and in a column-major tensor the rows up to the stride.
"""

from __future__ import annotations

SOURCE = r"""
TK_FN void tk_put_sf(float* sf, long long s0, long long s1, int row, int column, int rows, bool padded, float value) {
  sf += column * s1;
  sf[row * s0] = value;
  if (padded && row == rows - 1) {
    for (int r = rows; r < s1; ++r) sf[r] = 0.0f;
  }
}
// Bytes packed along the columns.
TK_FN void tk_put_ue8m0(void* sf, long long s0, long long s1, int row, int column, int rows, int columns, bool padded,
                        unsigned biased) {
  unsigned char* word = static_cast<unsigned char*>(sf) + 4 * (row * s0 + column / 4 * s1);
  const int end = column == columns - 1 ? 4 : column % 4 + 1;
  word[column % 4] = (unsigned char)biased;
  for (int b = column % 4 + 1; b < end; ++b) word[b] = 0;
  if (padded && row == rows - 1) {
    for (int r = rows; r < s1; ++r) {
      word += 4;
      for (int b = column % 4; b < end; ++b) word[b] = 0;
    }
  }
}
// Bytes packed along the rows: those of kCount (1, 2 or 4) rows from a multiple of it on, of which the first exists.
template <int kCount>
TK_FN void tk_put_ue8m0_down(void* sf, long long s0, int row, int column, int rows, unsigned biased) {
  unsigned char* word = static_cast<unsigned char*>(sf) + 4 * (row / 4 * s0 + column);
  if constexpr (kCount == 4) {
    *reinterpret_cast<unsigned*>(word) = biased;
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<unsigned short*>(word + row % 4) = (unsigned short)biased;
    if (row + 2 >= rows && row % 4 == 0) *reinterpret_cast<unsigned short*>(word + 2) = 0;
  } else {
    word[row % 4] = (unsigned char)biased;
    if (row == rows - 1) {
      for (int b = row % 4 + 1; b < 4; ++b) word[b] = 0;
    }
  }
}
"""
