// Norms, their backward, and attention's deltas, of many short rows: heads. A group takes as many of them as have
// kSlots chunks together, reads them side by side, and makes every chunk in a thread of its own.

namespace vox {
namespace VOX_ISA {

enum {
  kSlots = 40,  // chunks of a group
  kSlotPitch = (int)kChunk + 1,  // threads of different chunks read different banks
  kSlotFloats = kSlots * kSlotPitch,
};

struct HeadsArgs {  // group of heads
  int32_t units;  // heads of all rows
  int32_t heads;  // of a row
  int32_t width;  // at most kSlots chunks
  float eps;
};

struct Heads {
  int64_t first;  // unit of the group
  int32_t chunks, units;

  CANON Heads of(const HeadsArgs& args) {
    const int32_t chunks = (args.width - 1) / (int32_t)kChunk + 1, together = kSlots / chunks;
    const int64_t first = VOX_GROUP_X * together, left = args.units - first;
    return {first, chunks, left < together ? (int32_t)left : together};
  }
  CANON int place(const Heads& of, const HeadsArgs& args, int32_t i) {
    const int32_t k = i % args.width;
    return (i / args.width * of.chunks + k / (int32_t)kChunk) * kSlotPitch + k % (int32_t)kChunk;
  }
  // Terms of a slot.
  CANON int32_t terms(const Heads& of, const HeadsArgs& args, int slot) {
    const int32_t left = args.width - slot % of.chunks * (int32_t)kChunk;
    return left < (int32_t)kChunk ? left : (int32_t)kChunk;
  }
  CANON float sum(const Heads& of, const float* sums, int unit) {
    float y = 0.0f;
    for (int32_t c = 0; c < of.chunks; ++c) y = chunk_folded(c == 0, y, sums[unit * of.chunks + c]);
    return y;
  }
};

}  // namespace VOX_ISA
}  // namespace vox

// vox_norm.
VOX_KERNEL(vox_heads_norm)(VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2),
                           VOX_OUT(int32_t, faults, 3), VOX_ARGS(HeadsArgs, 4)) {
  VOX_SHARED float staged[kSlotFloats];
  VOX_SHARED float sums[kSlots];
  VOX_SHARED float totals[kSlots];
  VOX_SHARED float inverses[kSlots];
  const Heads of = Heads::of(args);
  const int64_t start = of.first * args.width;
  const int32_t all = of.units * args.width;
  for (int32_t i = VOX_LOCAL; i < all; i += kGroup) staged[Heads::place(of, args, i)] = x[start + i];
  VOX_BARRIER();
  if (VOX_LOCAL < of.units * of.chunks) {
    const int32_t terms = Heads::terms(of, args, VOX_LOCAL);
    float p = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < terms; ++k) p = SumOfSquares::step(staged[VOX_LOCAL * kSlotPitch + k], p);
    sums[VOX_LOCAL] = p;
  }
  VOX_BARRIER();
  if (VOX_LOCAL < of.units) {
    const float sum = Heads::sum(of, sums, VOX_LOCAL);
    totals[VOX_LOCAL] = sum;
    inverses[VOX_LOCAL] = norm_inverse(sum, (float)args.width, args.eps);
  }
  VOX_BARRIER();
  for (int32_t i = VOX_LOCAL; i < all; i += kGroup) {
    const int32_t unit = i / args.width;
    // An infinite sum makes every output zero, and would hide: the row is NaN instead.
    const float y = is_finite(totals[unit])
                        ? normed(staged[Heads::place(of, args, i)], inverses[unit], weight[i % args.width])
                        : f_from(0x7FC00000);
    out[start + i] = y;
    if (!is_finite(y)) faults[(of.first + unit) / args.heads] = 1;
  }
}

// vox_norm_backward.
VOX_KERNEL(vox_heads_norm_backward)(VOX_IN(float, dy, 0), VOX_IN(float, x, 1), VOX_IN(float, weight, 2),
                                    VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(HeadsArgs, 5)) {
  VOX_SHARED float staged_x[kSlotFloats];
  VOX_SHARED float staged_g[kSlotFloats];
  VOX_SHARED float squares[kSlots];
  VOX_SHARED float products[kSlots];
  VOX_SHARED float totals[kSlots];
  VOX_SHARED float inverses[kSlots];
  VOX_SHARED float shares[kSlots];
  const Heads of = Heads::of(args);
  const int64_t start = of.first * args.width;
  const int32_t all = of.units * args.width, slots = of.units * of.chunks;
  for (int32_t i = VOX_LOCAL; i < all; i += kGroup) {
    const int at = Heads::place(of, args, i);
    staged_x[at] = x[start + i];
    staged_g[at] = f_mul(dy[start + i], weight[i % args.width]);
  }
  VOX_BARRIER();
  const int slot = VOX_LOCAL % 64;
  if (slot < slots) {
    const int32_t terms = Heads::terms(of, args, slot);
    const float* own = VOX_LOCAL < 64 ? staged_x : staged_g;
    float p = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < terms; ++k) p = f_fma(own[slot * kSlotPitch + k], staged_x[slot * kSlotPitch + k], p);
    if (VOX_LOCAL < 64)
      squares[slot] = p;
    else
      products[slot] = p;
  }
  VOX_BARRIER();
  if (VOX_LOCAL < of.units) {
    const float sum = Heads::sum(of, squares, VOX_LOCAL);
    const float inverse = norm_inverse(sum, (float)args.width, args.eps);
    totals[VOX_LOCAL] = sum;
    inverses[VOX_LOCAL] = inverse;
    shares[VOX_LOCAL] = norm_share(Heads::sum(of, products, VOX_LOCAL), inverse, (float)args.width);
  }
  VOX_BARRIER();
  for (int32_t i = VOX_LOCAL; i < all; i += kGroup) {
    const int32_t unit = i / args.width;
    const int at = Heads::place(of, args, i);
    // An infinite sum would make the inverse zero, and hide: the row is NaN instead.
    const float y = is_finite(totals[unit])
                        ? norm_gradient_of(staged_g[at], staged_x[at], inverses[unit], shares[unit])
                        : f_from(0x7FC00000);
    out[start + i] = y;
    if (!is_finite(y)) faults[(of.first + unit) / args.heads] = 1;
  }
}

// vox_attention_deltas.
VOX_KERNEL(vox_heads_deltas)(VOX_IN(float, dy, 0), VOX_IN(float, result, 1), VOX_OUT(float, out, 2),
                             VOX_ARGS(HeadsArgs, 3)) {
  VOX_SHARED float staged_dy[kSlotFloats];
  VOX_SHARED float staged_y[kSlotFloats];
  VOX_SHARED float sums[kSlots];
  const Heads of = Heads::of(args);
  const int64_t start = of.first * args.width;
  const int32_t all = of.units * args.width;
  for (int32_t i = VOX_LOCAL; i < all; i += kGroup) {
    const int at = Heads::place(of, args, i);
    staged_dy[at] = dy[start + i];
    staged_y[at] = result[start + i];
  }
  VOX_BARRIER();
  if (VOX_LOCAL < of.units * of.chunks) {
    const int32_t terms = Heads::terms(of, args, VOX_LOCAL);
    float p = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < terms; ++k)
      p = f_fma(staged_dy[VOX_LOCAL * kSlotPitch + k], staged_y[VOX_LOCAL * kSlotPitch + k], p);
    sums[VOX_LOCAL] = p;
  }
  VOX_BARRIER();
  if (VOX_LOCAL < of.units) out[of.first + VOX_LOCAL] = Heads::sum(of, sums, VOX_LOCAL);
}
