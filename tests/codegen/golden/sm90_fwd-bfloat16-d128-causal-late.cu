// dtype=bfloat16,head_dim=128,causal=true
// sm90_fwd(warpgroups=2,block_n=128,num_stages=2,q_buffers=2,softmax=late,early_columns=32,ping_pong=false,scheduler=dynamic,blocks_per_sm=1)
// digest 610008f4321edab3bf364651115f84a7122e018d9c390174b98b521fd510d30a



// A thread block owns kBlockM query rows of one head at a time and walks the keys in blocks of kBlockN. One warpgroup loads:
// a single thread of it asks TMA for tiles and waits where the rings are full. The others compute, each with 64 rows:
//
//   S = Q K^T           wgmma, Q and K in shared memory
//   P = exp(S - m)      m: a reference per row, near the maximum so far
//   l = l + rowsum(P)
//   O = O + P V         wgmma, P in registers, V in shared memory
//
// The product with V of one block is under way together with the product with K of the next one, and beside the softmax
// of that. O leaves through the shared memory of Q.
#include "lib/types.cuh"
#include "lib/ptx.cuh"
#include "lib/ptx_sm90.cuh"
#include "lib/descriptor.cuh"
#include "lib/wgmma.cuh"
#include "lib/params.cuh"
#include "lib/pipeline.cuh"
#include "lib/online_softmax.cuh"
#include "lib/row_softmax.cuh"

using Element = BFloat16;
constexpr int kHeadDim = 128;
constexpr int kValueDim = 128;       // columns of V and O
constexpr int kWarpgroups = 2;  // that compute
constexpr int kBlockM = 64 * kWarpgroups;
constexpr int kBlockN = 128;
constexpr int kNumStages = 2;
constexpr int kQBuffers = 2;
constexpr bool kExact = false;  // references are exact maxima
constexpr bool kLate = true;    // scores are weighed, then looked at
constexpr int kEarlyColumns = 32;  // of a block, weighed beside the product with V
constexpr bool kPingPong = false;          // warpgroups issue products in turns
constexpr bool kOverlapTiles = false;  // the next S beside the last O
constexpr bool kDynamic = true;  // tiles are taken from a counter
constexpr int kBlocksPerSm = 1;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kThreads = 128 * (kWarpgroups + 1);

constexpr bool kCausal = true;
#include "blocks/mask.cuh"
#include "blocks/scheduler_persistent.cuh"
#include "blocks/wgmma_attention.cuh"
#include "blocks/load_tiles.cuh"
#include "blocks/masked_values.cuh"

__device__ __forceinline__ void compute(const Shared& shared, const Params& params, const TensorMaps& maps,
                                        int warpgroup) {
  const Mask mask{params.seqlen_q, params.seqlen_k};
  // A scale that is not positive goes into Q as a factor of -1 or 0.
  const float sign = params.scale > 0.0f ? 1.0f : params.scale < 0.0f ? -1.0f : 0.0f;
  const float scale = sign == 0.0f ? 1.0f : fabsf(params.scale);
  const float scale_log2 = scale * kLog2E;
  const bool speaks = lane() == 0;  // for its warp
  const bool stores = threadIdx.x % 128 == 0;
  const auto release = [&](const auto& ring, auto& turn) {
    if (speaks) {
      ring.release(turn);
    }
    turn.advance();
  };
  const auto take_turn = [&] {
    if constexpr (kPingPong) {
      named_barrier_sync(kTurnBarrier + warpgroup, 256);
    }
  };
  const auto pass_turn = [&] {
    if constexpr (kPingPong) {
      named_barrier_arrive(kTurnBarrier + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
    }
  };
  if (warpgroup == kWarpgroups - 1) {
    pass_turn();  // the first begins
  }

  Turn<kQBuffers> q, drained;
  Turn<kNumStages> k, v;
  bool storing = false;
  const auto drain = [&] {
    if (stores) {
      bulk_wait_read<0>();
      shared.queries.release(drained);
    }
    drained.advance();
    storing = false;
  };
  Scores scores;    // S of a block of keys
  Weights weights;  // P of the block before

  // The next tile, when its Q has come; false where nothing is left.
  const auto next_work = [&](Work& work) {
    shared.queries.wait(q);
    // From lane 0, so that the compiler knows it to be the same for all.
    const Tile found = shared.tile(q.stage);
    work.tile = {__shfl_sync(0xffffffffu, found.row_begin, 0), __shfl_sync(0xffffffffu, found.head, 0),
                 __shfl_sync(0xffffffffu, found.head_kv, 0), __shfl_sync(0xffffffffu, found.batch, 0)};
    work.q_offset = shared.q_offset(q.stage, warpgroup);
    q.advance();
    if (work.tile.row_begin == kNoTile) {
      return false;
    }
    work.query_begin = work.tile.row_begin + warpgroup * kWarpgroupRows;
    work.empty = work.query_begin >= params.seqlen_q;
    work.blocks = KeyBlocks(mask, work.tile.row_begin, work.query_begin);
    if (sign != 1.0f) {
      fold_scale(shared.memory + work.q_offset, sign);
      named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    }
    return true;
  };
  const auto start_scores = [&](const Work& work) {
    shared.keys.wait(k);
    take_turn();
    wgmma_fence();
    multiply_keys<kBlockN>(scores, shared.smem + work.q_offset, shared.k(k.stage));
    pass_turn();
  };

  Work work;
  bool more = next_work(work);
  if constexpr (kOverlapTiles) {
    start_scores(work);
    wgmma_wait<0>();
  }
#pragma unroll 1
  while (more) {
    RowSoftmax softmax;
    Output out = {};  // O
    if constexpr (!kOverlapTiles) {
      start_scores(work);
      wgmma_wait<0>();
    }
    release(shared.keys, k);
    if (work.blocks.full_end == 0) {
      apply_mask<kBlockN>(scores, mask, work.query_begin, 0);
    }
    softmax.move<0, kScores>(scores, scale_log2);
    softmax.subtract<0, kScores>(scores);
    weigh_rest<0, kBlockN>(weights, scores, softmax, scale_log2);
    softmax.accept();
    if (storing) {  // the last O has left its place, so that another Q can come
      drain();
    }

    const auto step = [&](int block, auto masked, auto half) {
      constexpr int kKeys = half.value ? kHalfBlock : kBlockN;
      // The first kEarly scores are weighed beside the product with V. The rest are looked at before, or afterwards.
      constexpr bool kUnseen = kLate && !masked.value;
      constexpr int kEarly = masked.value ? 0 : kEarlyColumns / 2;
      constexpr int kSeen = kUnseen ? kEarly : kKeys / 2;
      shared.keys.wait(k);
      take_turn();
      wgmma_fence();
      multiply_keys<kKeys>(scores, shared.smem + work.q_offset, shared.k(k.stage));
      shared.values.wait(v);
      multiply_values<kBlockN>(out, weights, shared.v(v.stage));
      pass_turn();
      wgmma_wait<1>();  // S is there, the product with V under way.
      release(shared.keys, k);
      if constexpr (masked.value) {
        apply_mask<kKeys>(scores, mask, work.query_begin, block * kBlockN);
      }
      bool moves = kExact || (kSeen > 0 && softmax.outgrown<kSeen>(scores, scale_log2));
      if (kUnseen && softmax.careful) {
        moves = softmax.outgrown<kKeys / 2>(scores, scale_log2);
      }
      if (moves) {
        softmax.move<0, kKeys / 2>(scores, scale_log2);
      }
      softmax.subtract<0, kKeys / 2>(scores);
      weigh_in_place<kEarly>(scores, softmax, scale_log2);
      shared.values.wait(v);  // Again, and never long: the compiler moves the next wait no further up than here.
      wgmma_wait<0>();
      release(shared.values, v);
      if (moves) {
        scale_rows(out, softmax.rescale);
      }
      weigh_rest<kEarly, kKeys>(weights, scores, softmax, scale_log2);
      if (kUnseen && !softmax.careful && softmax.surpassed()) {
        softmax.move<kEarly, kKeys / 2>(scores, scale_log2);
        softmax.subtract<kEarly, kKeys / 2>(scores);
        scale_rows(out, softmax.rescale);
        rescale_in_place<kEarly>(scores, softmax);
        weigh_rest<kEarly, kKeys>(weights, scores, softmax, scale_log2);
      }
      softmax.accept();
    };
    int block = 1;
#pragma unroll 1
    for (; block < work.blocks.full_end; ++block) {
      step(block, Flag<false>{}, Flag<false>{});
    }
#pragma unroll 1
    for (; block < work.blocks.end - work.blocks.half; ++block) {
      step(block, Flag<true>{}, Flag<false>{});
    }
    if constexpr (kHalves) {
      if (work.blocks.half) {
        step(block, Flag<true>{}, Flag<true>{});
      }
    }
    shared.values.wait(v);
    wgmma_fence();
    if (kHalves && work.blocks.half) {
      multiply_values<kHalfBlock>(out, weights, shared.v(v.stage));
    } else {
      multiply_values<kBlockN>(out, weights, shared.v(v.stage));
    }
    Work next;
    if constexpr (kOverlapTiles) {
      more = next_work(next);
      start_scores(next);
      wgmma_wait<1>();
      release(shared.values, v);
    } else {
      wgmma_wait<0>();
      release(shared.values, v);
#pragma unroll 1
      for (block = work.blocks.end; block < work.blocks.tile_end; ++block) {  // that other warpgroups' rows see
        shared.keys.wait(k);
        take_turn();
        pass_turn();
        __syncwarp();  // all lanes have seen the phase that one of them now ends
        release(shared.keys, k);
        shared.values.wait(v);
        __syncwarp();
        release(shared.values, v);
      }
    }

    softmax.reduce();
    if (params.lse != nullptr) {
      store_log_sum_exp(params, softmax, scale, work);
    }
    const bool again = hidden_values_leaked(out, params, mask, work);
    const float normalisers[2] = {softmax.normaliser(0), softmax.normaliser(1)};
    scale_rows(out, normalisers);
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // all four warps are done with Q
    stage_output(shared.smem + work.q_offset, out);
    if (again) {
      compute_rows_again(shared.memory + work.q_offset, params, mask, work, sign, scale_log2);
    }
    fence_proxy_async();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (stores) {
      store_panels(maps.out, shared.smem + work.q_offset, work);
      bulk_commit();
    }
    storing = true;
    if constexpr (kOverlapTiles) {
      wgmma_wait<0>();
      work = next;
    } else {
      if constexpr (kQBuffers == 1) {
        drain();
      }
      more = next_work(work);
    }
  }
  if (storing) {
    drain();
  }
  if constexpr (!kOverlapTiles) {
    shared.keys.wait(k);  // comes for nothing
  }
  if (stores) {
    bulk_wait<0>();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sm90_fwd(const __grid_constant__ Params params, const __grid_constant__ TensorMap q_map,
             const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
             const __grid_constant__ TensorMap out_map) {
  extern __shared__ __align__(1024) char smem[];
  const Shared shared(smem);
  const TensorMaps maps{&q_map, &k_map, &v_map, &out_map};
  if (threadIdx.x == 0) {
    shared.init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same for the compiler too
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32 && elect_one()) {
      load(shared, params, maps);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    compute(shared, params, maps, warpgroup - 1);
  }
}
