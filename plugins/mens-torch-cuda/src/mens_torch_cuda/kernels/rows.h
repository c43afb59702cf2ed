// What stands between the products of many rows: norm and int8 codes in one kernel, gate and codes in another.

namespace vox {
namespace VOX_ISA {

struct RowsArgs {  // group row
  int32_t columns;
  float eps;
};

struct GateArgs {  // thread (element, row)
  int32_t width;
  int32_t mode;  // kSiluGate or kGeluGate
};

}  // namespace VOX_ISA
}  // namespace vox

// The norm of x, as floats and as codes.
VOX_KERNEL(vox_step_rows)(VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2),
                          VOX_OUT(int8_t, out_codes, 3), VOX_OUT(float, out_scales, 4), VOX_OUT(int32_t, faults, 5),
                          VOX_ARGS(RowsArgs, 6)) {
  VOX_SHARED Quad staged[kNormStagedQuads];
  VOX_SHARED Quad ahead[kNormAheadQuads];
  VOX_SHARED Quad sums[kNormSumQuads];
  VOX_SHARED int32_t magnitudes[kTwoGroups];
  sent_norm(weight, args.columns, (float*)(Quad*)ahead);
  inputs_are_there();
  const int64_t row = VOX_GROUP_Y, first = row * args.columns;
  float* terms = (float*)(Quad*)staged;
  staged_norm(x + first, weight, args.columns, args.eps, (float*)(Quad*)ahead, terms, (float*)(Quad*)sums, faults,
              row, true);
  for (int32_t i = VOX_LOCAL * 4; i < args.columns; i += kGroup * 4)
    *(Quad*)(out + first + i) = *(const Quad*)(terms + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk);
  staged_codes(terms, args.columns, out_codes + first, out_scales + row * (args.columns / 32), magnitudes);
}

// A gate whose outputs are wanted as codes: four elements a thread, eight threads a block.
VOX_KERNEL(vox_step_gate)(VOX_IN(float, gate, 0), VOX_IN(float, up, 1), VOX_OUT(float, out, 2),
                          VOX_OUT(int8_t, out_codes, 3), VOX_OUT(float, out_scales, 4), VOX_OUT(int32_t, faults, 5),
                          VOX_ARGS(GateArgs, 6)) {
  VOX_SHARED int32_t magnitudes[kGroup];
  wait_for_inputs();
  const int64_t k = VOX_THREAD_X * 4, at = VOX_THREAD_Y * args.width + k;
  const bool is_inside = k < args.width;
  Quad y = {{0.0f, 0.0f, 0.0f, 0.0f}};
  int32_t amax = 0;
  if (is_inside) {
    const Quad g = *(const Quad*)(gate + at), u = *(const Quad*)(up + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y.values[i] = args.mode == kSiluGate ? silu_gated(g.values[i], u.values[i]) : gelu_gated(g.values[i], u.values[i]);
      VOX_WATCH(y.values[i], VOX_THREAD_Y);
      const int32_t magnitude = f_bits(y.values[i]) & 0x7FFFFFFF;
      amax = magnitude > amax ? magnitude : amax;
    }
    *(Quad*)(out + at) = y;
  }
  magnitudes[VOX_LOCAL] = amax;
  VOX_BARRIER();
  if (!is_inside) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t magnitude = magnitudes[VOX_LOCAL / 8 * 8 + i];
    amax = magnitude > amax ? magnitude : amax;
  }
  const float d = activation_scale(amax), inverse = has_codes(d) ? activation_inverse(amax) : 0.0f;
  if (k % 32 == 0) out_scales[VOX_THREAD_Y * (args.width / 32) + k / 32] = d;
  uint32_t word = 0;
  if (has_codes(d))
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= ((uint32_t)activation_code(y.values[i], inverse) & 255u) << 8 * i;
  *(uint32_t*)(out_codes + at) = word;
}
