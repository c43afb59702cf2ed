// Products that gradients are made of: dy W for every weight format, and a^T b of each example's rows.
#pragma once
#include "tall.h"

VOX_TALL(vox_linear_backward_f32, float, FloatColumns<F32>)
VOX_TALL(vox_linear_backward_f16, uint16_t, FloatColumns<F16>)
VOX_TALL(vox_linear_backward_bf16, uint16_t, FloatColumns<Bf16>)
VOX_TALL(vox_linear_backward_q8_0, uint8_t, BlockColumns32<FileQ8_0>)
VOX_TALL(vox_linear_backward_q5_0, uint8_t, BlockColumns32<FileQ5_0>)
VOX_TALL(vox_linear_backward_q4_0, uint8_t, BlockColumns32<FileQ4_0>)
VOX_TALL(vox_linear_backward_q4_k, uint8_t, BlockColumns256<FileQ4_K>)
VOX_TALL(vox_linear_backward_q5_k, uint8_t, BlockColumns256<FileQ5_K>)
VOX_TALL(vox_linear_backward_q6_k, uint8_t, BlockColumns256<FileQ6_K>)

// Example e owns the rows starts[e] to starts[e + 1] of both sides; chunks are counted from its first.
VOX_KERNEL(vox_example_products)(VOX_IN(float, tall, 0), VOX_IN(float, wide, 1), VOX_IN(int32_t, starts, 2),
                                 VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(ProductsArgs, 5)) {
  VOX_SHARED float left[kTallChunk];
  const int64_t example = VOX_GROUP_Y / args.tiles, first = VOX_GROUP_Y % args.tiles * kTall, column = VOX_THREAD_X;
  const int32_t begin = starts[example], end = starts[example + 1];
  const TallArgs of_wide = {args.tall, end - begin, args.wide, begin, end};
  TallSums total;
  for (int t = 0; t < kTall; ++t) total.v[t] = 0.0f;
  for (int32_t r = begin; r < end; r += (int32_t)kChunk) {
    const int32_t count = end - r < (int32_t)kChunk ? end - r : (int32_t)kChunk;
    VOX_BARRIER();
    for (int32_t i = VOX_LOCAL; i < kTallChunk; i += kGroup) {
      const int64_t n = i / kTall, t = first + i % kTall;
      left[i] = n < count && t < args.tall ? tall[(r + n) * args.tall + t] : 0.0f;
    }
    VOX_BARRIER();
    if (column < args.wide)
      total = tall_chunk_folded<FloatColumns<F32> >(r == begin, total, left, wide, r, column, of_wide, count);
  }
  if (column >= args.wide) return;
  VOX_DEVICE float* made = out + example * args.stride;
  for (int t = 0; t < kTall; ++t) {
    if (first + t >= args.tall) continue;
    made[args.is_wide_first != 0 ? column * args.tall + first + t : (first + t) * args.wide + column] = total.v[t];
    VOX_WATCH(total.v[t], example);
  }
}
