// Attention with a group for each KV block, its parts folded in their order by whichever group is the last to finish.

namespace vox {
namespace VOX_ISA {

struct AttendArgs {  // group (KV block of the row's, set of query heads), row
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_stride;
  int32_t blocks_per_sequence;
  int32_t window;
  int32_t codes_out;
  int32_t is_single;  // whether each sequence has one row in this step
  float scale;
  float softcap;
};

enum {
  kChannels = kWidestHead / kGroup,  // of a thread
  kQueryQuads1 = kWidestHead / 4,
  kQueryQuads2 = 2 * kQueryQuads1,
  kQueryQuads4 = 4 * kQueryQuads1,
  kWeightQuads1 = kGroup / 4,
  kWeightQuads2 = 2 * kWeightQuads1,
  kWeightQuads4 = 4 * kWeightQuads1,
  kHighest1 = 16,
  kHighest2 = 32,
  kHighest4 = 64,
};

// How many arrived before; what they wrote is there for the last.
CANON int32_t arrived(int32_t* counter) {
#if defined(__CUDA_ARCH__)
  __threadfence();
  return atomicAdd(counter, 1);
#else
  return (*counter)++;
#endif
}
CANON void see_all() {
#if defined(__CUDA_ARCH__)
  __threadfence();
#endif
}

}  // namespace VOX_ISA
}  // namespace vox

namespace vox {
namespace VOX_ISA {

struct Attend {
  const float *q, *keys, *values;
  const int32_t *positions, *sequences, *block_tables;
  float* parts;       // [rows][heads][blocks][head_dim, m, l]
  int32_t* counters;  // [rows][sets of heads], zero between kernels
  float* out;
  int8_t* codes;
  float* scales;
  int32_t* faults;
  float *query, *weights, *highest;  // aligned as Quad
  int32_t* magnitudes;
};

CANON void expect(const float* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

// Half a chunk of keys (of one slot, over channels) or of values (of one channel, over slots).
enum { kHalf = 64 };
struct HalfChunk {
  float terms[kHalf];
};
CANON void early_half(HalfChunk& to, const float* from, int64_t step, int32_t count) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i)
    if (i < count) to.terms[i] = early(from + i * step);
}

// Divide, write, and make codes of one head's channels.
CANON void attended(const Attend& at, const AttendArgs& args, int64_t head, const float* o, float l) {
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    const int32_t c = VOX_LOCAL + i * kGroup;
    const int64_t to = (VOX_GROUP_Y * args.heads + head) * args.head_dim + c;
    float y = 0.0f;
    if (c < args.head_dim) {
      y = f_div(o[i], l);
      at.out[to] = y;
      if (!is_finite(y)) at.faults[VOX_GROUP_Y] = 1;
    }
    if (args.codes_out == 0 || i * kGroup >= args.head_dim) continue;
    warp_barrier();  // a block is a warp's
    at.magnitudes[VOX_LOCAL] = f_bits(y) & 0x7FFFFFFF;
    warp_barrier();
    if (c >= args.head_dim) continue;
    int32_t amax = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int32_t magnitude = at.magnitudes[VOX_LOCAL / 32 * 32 + j];
      amax = magnitude > amax ? magnitude : amax;
    }
    const float d = activation_scale(amax);
    if (c % 32 == 0) at.scales[to / 32] = d;
    at.codes[to] = has_codes(d) ? (int8_t)activation_code(y, activation_inverse(amax)) : (int8_t)0;
  }
}

// The thread's i-th channel; a thread beyond the head reads one that is there.
CANON int32_t channel(int i, int32_t width) {
  const int32_t c = VOX_LOCAL + i * kGroup;
  return c < width ? c : 0;
}

// G query heads that share a key/value head, over one KV block; then, in the last group, the fold. C chunks of
// channels. Keys and values come in halves of chunks, two of which are on their way at any time.
template <int G, int C>
CANON void attend(const Attend& at, const AttendArgs& args) {
  const int32_t sets = args.heads / G;  // of query heads, a group each
  const int64_t set = VOX_GROUP_X % sets, index = VOX_GROUP_X / sets, row = VOX_GROUP_Y;
  const int64_t head = set * G, kv_head = head / (args.heads / args.kv_heads);
  const int32_t last = at.positions[row];
  const int32_t low = args.window > 0 && last >= args.window ? last - args.window + 1 : 0;
  const int32_t first_block = low / (int32_t)kBlock, b = first_block + (int32_t)index;
  const int32_t count = last / (int32_t)kBlock - first_block + 1;
  if (index >= count) {
    wait_for_inputs();
    return;
  }
  const int32_t width = args.head_dim;
  const int64_t table = (int64_t)at.sequences[row] * args.blocks_per_sequence;
  const int32_t start = b * (int32_t)kBlock;
  const int32_t begin = low > start ? low - start : 0;
  const int32_t end = last - start < (int32_t)kBlock ? last - start + 1 : (int32_t)kBlock;
  const int64_t cache = (int64_t)at.block_tables[table + b] * args.kv_heads + kv_head;
  const bool is_inside = VOX_LOCAL >= begin && VOX_LOCAL < end;
  const float* key = at.keys + cache * width * kBlock + VOX_LOCAL;
  const float* value = at.values + cache * kBlock * args.value_stride;
  HalfChunk halves[2];
  // Other positions than the row's own were stored by earlier steps, where a sequence has one row.
  if (args.is_single != 0) {
    early_half(halves[0], key, kBlock, width);
    early_half(halves[1], key + (int64_t)kHalf * kBlock, kBlock, width - kHalf);
    for (int32_t c = 0; c < width; c += 32) expect(value + (int64_t)VOX_LOCAL * args.value_stride + c);
  }
  wait_for_inputs();
  if (args.is_single == 0 || start + VOX_LOCAL == last) {
    early_half(halves[0], key, kBlock, width);
    early_half(halves[1], key + (int64_t)kHalf * kBlock, kBlock, width - kHalf);
  }
  for (int32_t c = VOX_LOCAL; c < G * width; c += kGroup) {
    // Each head's channels begin at a multiple of four floats.
    at.query[c / width * kWidestHead + c % width] = at.q[(row * args.heads + head) * width + c];
  }
  VOX_BARRIER();
  float y[G], p[G];
#pragma unroll
  for (int g = 0; g < G; ++g) y[g] = p[g] = 0.0f;
#pragma unroll
  for (int t = 0; t < 2 * C; ++t) {
    const HalfChunk& mine = halves[t & 1];
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      if (t * kHalf + i >= width) continue;  // a head has a multiple of four channels
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const Quad x = *(const Quad*)(at.query + g * kWidestHead + t * kHalf + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) p[g] = f_fma(x.values[j], mine.terms[i + j], p[g]);
      }
    }
    if (t % 2 == 1) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
        if (t == 1 || (t - 1) * kHalf < width) y[g] = chunk_folded(t == 1, y[g], p[g]);
        p[g] = 0.0f;
      }
    }
    // Two halves on: keys, then values.
    const int next = t + 2;
    if (next < 2 * C)
      early_half(halves[t & 1], key + (int64_t)next * kHalf * kBlock, kBlock, width - next * kHalf);
    else
      early_half(halves[t & 1], value + (int64_t)(next - 2 * C) * kHalf * args.value_stride + channel(0, width),
                 args.value_stride, kHalf);
  }
  float s[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    s[g] = f_from((int32_t)0xFF800000u);
    if (is_inside) {
      s[g] = f_mul(y[g], args.scale);
      if (args.softcap != 0.0f) s[g] = f_softcap(s[g], args.softcap);
    }
    at.weights[g * kGroup + VOX_LOCAL] = s[g];
  }
  VOX_BARRIER();
  if (VOX_LOCAL < 16 * G) {
    const float* of = at.weights + VOX_LOCAL / 16 * kGroup + VOX_LOCAL % 16;
    float most = of[0];
#pragma unroll
    for (int j = 1; j < kGroup / 16; ++j) most = f_max(most, of[16 * j]);
    at.highest[VOX_LOCAL] = most;
  }
  VOX_BARRIER();
  float m[G], l[G], o[G][kChannels];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    m[g] = at.highest[16 * g];
#pragma unroll
    for (int j = 1; j < 16; ++j) m[g] = f_max(m[g], at.highest[16 * g + j]);
    m[g] = f_add(m[g], 0.0f);  // -0 counts as +0
    if (is_inside) at.weights[g * kGroup + VOX_LOCAL] = f_exp(f_sub(s[g], m[g]));
  }
  VOX_BARRIER();
#pragma unroll
  for (int g = 0; g < G; ++g) {
    l[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) o[g][i] = 0.0f;
  }
#pragma unroll
  for (int t = 0; t < 2 * C; ++t) {
    const HalfChunk& mine = halves[t & 1];
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      const int32_t first = t % 2 * kHalf + i;
      if (first + 4 <= begin || first >= end) continue;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const Quad w = *(const Quad*)(at.weights + g * kGroup + first);
        if (first >= begin && first + 4 <= end) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (t < 2) l[g] = PlainSum::step(w.values[j], l[g]);
            o[g][t / 2] = f_fma(w.values[j], mine.terms[i + j], o[g][t / 2]);
          }
          continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first + j < begin || first + j >= end) continue;
          if (t < 2) l[g] = PlainSum::step(w.values[j], l[g]);
          o[g][t / 2] = f_fma(w.values[j], mine.terms[i + j], o[g][t / 2]);
        }
      }
    }
    const int next = t + 2;
    if (next < 2 * C)
      early_half(halves[t & 1], value + (int64_t)(next % 2) * kHalf * args.value_stride + channel(next / 2, width),
                 args.value_stride, kHalf);
  }
  if (count == 1) {
#pragma unroll
    for (int g = 0; g < G; ++g) attended(at, args, head + g, o[g], l[g]);
    return;
  }
  const int64_t part = (int64_t)width + 2;
#pragma unroll
  for (int g = 0; g < G; ++g) {
    float* mine = at.parts + ((row * args.heads + head + g) * args.blocks_per_sequence + index) * part;
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      if (VOX_LOCAL + i * kGroup < width) mine[VOX_LOCAL + i * kGroup] = o[g][i];
    if (VOX_LOCAL == 0) {
      mine[width] = m[g];
      mine[width + 1] = l[g];
    }
  }
  see_all();
  VOX_BARRIER();
  if (VOX_LOCAL == 0) at.magnitudes[0] = arrived(at.counters + row * sets + set);
  VOX_BARRIER();
  if (at.magnitudes[0] != count - 1) return;
  if (VOX_LOCAL == 0) at.counters[row * sets + set] = 0;
  see_all();
  VOX_BARRIER();  // before anything else stands where the number was
  for (int32_t k = 0; k < count; ++k) {
    const bool is_first = k == 0;
    float m_block[G], l_block[G], o_block[G][kChannels];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const float* other = at.parts + ((row * args.heads + head + g) * args.blocks_per_sequence + k) * part;
      m_block[g] = early(other + width);
      l_block[g] = early(other + width + 1);
#pragma unroll
      for (int i = 0; i < C; ++i) o_block[g][i] = early(other + channel(i, width));
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const Shares shares = shares_of(is_first ? m_block[g] : m[g], m_block[g]);
#pragma unroll
      for (int i = 0; i < C; ++i)
        o[g][i] = is_first ? o_block[g][i] : block_folded(o[g][i], shares.old_share, o_block[g][i], shares.new_share);
      l[g] = is_first ? l_block[g] : block_folded(l[g], shares.old_share, l_block[g], shares.new_share);
      m[g] = shares.m;
    }
  }
#pragma unroll
  for (int g = 0; g < G; ++g) attended(at, args, head + g, o[g], l[g]);
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_ATTEND(G, C)                                                                                        \
  VOX_KERNEL(vox_step_attend_##G##_##C)(VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2),       \
                                        VOX_IN(int32_t, positions, 3), VOX_IN(int32_t, sequences, 4),                \
                                        VOX_IN(int32_t, block_tables, 5), VOX_OUT(float, parts, 6),                  \
                                        VOX_OUT(int32_t, counters, 7), VOX_OUT(float, out, 8),                       \
                                        VOX_OUT(int8_t, codes, 9), VOX_OUT(float, scales, 10),                       \
                                        VOX_OUT(int32_t, faults, 11), VOX_ARGS(AttendArgs, 12)) {                    \
    VOX_SHARED Quad query[kQueryQuads##G];                                                                           \
    VOX_SHARED Quad weights[kWeightQuads##G];                                                                        \
    VOX_SHARED float highest[kHighest##G];                                                                           \
    VOX_SHARED int32_t magnitudes[kGroup];                                                                           \
    const Attend at = {q,   keys,  values, positions, sequences,           block_tables,           parts,            \
                       counters, out, codes, scales, faults, (float*)(Quad*)query, (float*)(Quad*)weights, highest,  \
                       magnitudes};                                                                                  \
    attend<G, C>(at, args);                                                                                          \
  }
VOX_STEP_ATTEND(1, 1)
VOX_STEP_ATTEND(1, 2)
#undef VOX_STEP_ATTEND

// --- the highest logit -------------------------------------------------------------------------------------------

namespace vox {
namespace VOX_ISA {

enum { kArgmaxPart = 2048 };  // logits of a group

// The greater of two, the lower id where they are equal, in thread 0; -0 equals +0.
CANON void group_highest(float* most, int32_t* ids, float best, int32_t id) {
  most[VOX_LOCAL] = best;
  ids[VOX_LOCAL] = id;
  for (int half = kGroup / 2; half > 0; half /= 2) {
    VOX_BARRIER();
    if (VOX_LOCAL >= half) continue;
    const float other = most[VOX_LOCAL + half];
    const int32_t other_id = ids[VOX_LOCAL + half];
    if (most[VOX_LOCAL] < other || (most[VOX_LOCAL] == other && other_id < ids[VOX_LOCAL])) {
      most[VOX_LOCAL] = other;
      ids[VOX_LOCAL] = other_id;
    }
  }
  VOX_BARRIER();
}

}  // namespace VOX_ISA
}  // namespace vox

// vox_argmax with many groups a row: parts [rows][groups] of (value, id); counters [rows], zero between kernels.
VOX_KERNEL(vox_step_argmax)(VOX_IN(float, x, 0), VOX_OUT(float, parts, 1), VOX_OUT(int32_t, counters, 2),
                            VOX_OUT(int32_t, out, 3), VOX_ARGS(RowArgs, 4)) {
  VOX_SHARED float most[kGroup];
  VOX_SHARED int32_t ids[kGroup];
  VOX_SHARED int32_t before[kSlices];
  wait_for_inputs();
  const int64_t row = VOX_GROUP_Y, groups = (args.width + kArgmaxPart - 1) / kArgmaxPart;
  const int32_t first = (int32_t)VOX_GROUP_X * kArgmaxPart;
  const int32_t end = first + kArgmaxPart < args.width ? first + kArgmaxPart : args.width;
  const float* logits = x + row * args.width;
  float best = logits[first];
  int32_t id = first;
#pragma unroll 4
  for (int32_t i = first + VOX_LOCAL; i < end; i += kGroup) {
    const float y = logits[i];
    if (best < y) {
      best = y;
      id = i;
    }
  }
  group_highest(most, ids, best, id);
  if (VOX_LOCAL == 0) {
    parts[2 * (row * groups + VOX_GROUP_X)] = most[0];
    ((int32_t*)parts)[2 * (row * groups + VOX_GROUP_X) + 1] = ids[0];
    before[0] = arrived(counters + row);
  }
  VOX_BARRIER();
  if (before[0] != groups - 1) return;
  see_all();
  const volatile float* values = parts + 2 * row * groups;
  const volatile int32_t* places = (const volatile int32_t*)values;
  best = values[0];
  id = places[1];
  for (int64_t g = VOX_LOCAL; g < groups; g += kGroup) {
    const float y = values[2 * g];
    if (best < y) {
      best = y;
      id = places[2 * g + 1];
    }
  }
  VOX_BARRIER();
  group_highest(most, ids, best, id);
  if (VOX_LOCAL != 0) return;
  counters[row] = 0;
  out[row] = ids[0];
}
