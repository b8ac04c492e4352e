// Rings of tiles in shared memory between one thread that loads and warps that use. Needs ptx_sm90.cuh.
//
// A stage has two mbarriers: `full` completes when its bytes have come, `empty` when every warp that reads it has
// released it. Both sides count tiles over the whole life of the thread block: the parities must not start anew.

#pragma once

// Tile i of a ring: it lies in stage i % kStages, and its phase is i / kStages.
template <int kStages>
struct Turn {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages>
struct Ring {
  static constexpr u32 kBytes = 16 * kStages;

  u32 barriers_smem;

  // By one thread. `releases`: how many come for each tile.
  __device__ __forceinline__ void init(u32 releases) const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers_smem + 16 * stage, 1);
      mbarrier_init(barriers_smem + 16 * stage + 8, releases);
    }
  }

  __device__ __forceinline__ u32 full(const Turn<kStages>& turn) const {
    return barriers_smem + 16 * turn.stage;
  }

  // Until the tile that had this stage is not needed any more.
  __device__ __forceinline__ void acquire(const Turn<kStages>& turn) const {
    mbarrier_wait(full(turn) + 8, turn.parity ^ 1);
  }

  // The same; then announces the bytes to come.
  __device__ __forceinline__ void acquire(const Turn<kStages>& turn, u32 bytes) const {
    acquire(turn);
    mbarrier_arrive_expect_tx(full(turn), bytes);
  }

  __device__ __forceinline__ void wait(const Turn<kStages>& turn) const {
    mbarrier_wait(full(turn), turn.parity);
  }

  // By one thread for all that it speaks for.
  __device__ __forceinline__ void release(const Turn<kStages>& turn) const {
    mbarrier_arrive(full(turn) + 8);
  }
};
