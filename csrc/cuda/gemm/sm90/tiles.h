// The tiles of the grouped products on Hopper.
//
// The host chooses by the operands' type alone. No size, no timing and no environment variable
// decides, so equal calls run equal kernels; whatever depends on group sizes is decided on the
// device: by rows, tiles are narrow where the GPU has room for all of them at once. An output's bits
// do not depend on it.
#pragma once

namespace grouped_linear::cuda {

// One block's part of an output, and how much of the sum it keeps on its way at a time.
struct GemmTile {
  int rows, cols;
  int depth;    // of one stage, elements: 128 bytes
  int stages;   // that are loaded ahead
  int cluster;  // blocks that share an operand
};

constexpr GemmTile kTile16Bit{128, 256, 64, 3, 2};
constexpr GemmTile kTileFp8{128, 192, 128, 4, 2};
constexpr int kNarrowCols = 64;

}  // namespace grouped_linear::cuda
