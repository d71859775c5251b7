// SPDX-License-Identifier: Apache-2.0
// Which warp of a block is what. Plain C++.
#pragma once

#include "exact_math.h"

namespace grouped_linear::cuda::sm90 {

enum class Role {
  kProducer,   // loads a and b
  kScales,     // prepares b's block scales
  kScheduler,  // finds tiles
  kStore,      // writes out, after elementwise arithmetic if there is any
};

// The warps of the first warpgroup. The others do the products.
//
//   operands                      warp 0     warp 1     warps 2 and 3  scheduler
//   no block scales               producer   scheduler  store          warp 1
//   block scales                  producer   scales     store          warp 3
//   gathered rows                 producer   producer   store          warp 3
//   elementwise work              producer   store      store          warp 1
//   elementwise, gathered rows    producer   producer   store          warp 1
//
// The last store warp schedules beside its stores. With elementwise work warps 2 and 3 may take
// longer than the tile's products. There warp 1 schedules, which gathers, or has fewer rows to work
// on. A warp 1 that gathers prepares the block scales too.
struct Roles {
  Role warp[4];
  int scheduler;  // the warp that schedules, by one thread
  int zeros;      // the warp that zeroes between tiles, by one thread. Elementwise: all that store

  GROUPED_LINEAR_DEVICE constexpr int count(Role role) const {
    int warps = 0;
    for (const Role other : warp) warps += other == role;
    return warps;
  }
  GROUPED_LINEAR_DEVICE constexpr int first(Role role) const {
    int w = 0;
    while (warp[w] != role) ++w;
    return w;
  }
  // Whether a warp of this role schedules, or zeroes.
  GROUPED_LINEAR_DEVICE constexpr bool schedules(Role role) const {
    return warp[scheduler] == role;
  }
  GROUPED_LINEAR_DEVICE constexpr bool zeroes(Role role) const { return warp[zeros] == role; }
};

constexpr Roles roles_of(bool block_scaled, bool gathers, bool elementwise) {
  const Role second = gathers        ? Role::kProducer
                      : elementwise  ? Role::kStore
                      : block_scaled ? Role::kScales
                                     : Role::kScheduler;
  const bool alone = second == Role::kScheduler;
  return {.warp = {Role::kProducer, second, Role::kStore, Role::kStore},
          .scheduler = alone || elementwise ? 1 : 3,
          .zeros = alone ? 1 : 2};
}

}  // namespace grouped_linear::cuda::sm90
