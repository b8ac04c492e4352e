// The one kernel argument of every forward family. Mirrored by PARAMS_FIELDS in codegen/plan/plan.py, which a test compares.
//
// q: (batch, seqlen_q, num_heads, head_dim); k: (batch, seqlen_k, num_heads_kv, head_dim); v and out as k and q, with
// head_dim_v columns. Strides count elements, and the last dimension has stride 1. lse: contiguous (batch, num_heads,
// seqlen_q), or null if not wanted.
// workspace: device memory of this launch alone, laid out by the family, or null; num_splits: thread blocks that share
// the keys of one tile of queries; heads_per_section: heads whose tiles are listed together, where blocks take several.

#pragma once
struct Params {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;
  void* workspace;
  i64 q_stride_batch;
  i64 q_stride_row;
  i64 q_stride_head;
  i64 k_stride_batch;
  i64 k_stride_row;
  i64 k_stride_head;
  i64 v_stride_batch;
  i64 v_stride_row;
  i64 v_stride_head;
  i64 out_stride_batch;
  i64 out_stride_row;
  i64 out_stride_head;
  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads;
  int num_heads_kv;
  int num_splits;
  int heads_per_section;
  float scale;
};
