// Attention of many rows: queries of one sequence that share a key/value head read its keys and values once.
//
// A group has 32 queries, (row, head) by (row, head), of a tile of rows; a warp has eight of them, each lane four
// slots of a block while scores are made, and four channels while values are summed. Every sum is one chain in one
// lane, as in vox_attention. Eight channels of keys, or eight slots of values, are a stage in shared memory.

namespace vox {
namespace VOX_ISA {

struct AttendRowsArgs {  // group (tile of rows, key/value head)
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;  // at most kChunk, a multiple of kStageTerms
  int32_t value_stride;
  int32_t blocks_per_sequence;
  int32_t window;
  int32_t tiles;
  float scale;
  float softcap;
};

enum {
  kQueries = 32,  // of a group
  kOfWarp = 8,
  kLaneCells = 4,
  kStageTerms = 8,
  kStageFloats = kStageTerms * (int)kBlock,
  kHalfStage = kStageFloats / 2,  // what all threads send at once
  kRing = 3,  // stages
  kWeightPitch = (int)kBlock + 16,
  kQueryFloats = kQueries * (int)kChunk,
  kQueryQuadsOfRows = kQueryFloats / 4,
  kWeightQuadsOfRows = kQueries * kWeightPitch / 4,
  kRingQuads = kRing * kStageFloats / 4,
  kTwoQueries = 2 * kQueries,
};

struct AttendRows {
  const float *q, *keys, *values;
  const int32_t *positions, *sequences, *block_tables, *tiles;  // tiles [tiles][first row, rows]
  float* out;
  int32_t* faults;
  float *query, *weights, *ring;  // aligned as Quad
  float* highest;                 // [warps][kOfWarp][4]
  float* ends;                    // [warps][kOfWarp][2]

  // The slots of block `b` that a position sees.
  struct Seen {
    int32_t begin, end;
  };
  CANON Seen seen(const AttendRowsArgs& args, int32_t position, int32_t b) {
    const int32_t low = args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
    const int32_t start = b * (int32_t)kBlock, end = position - start + 1;
    return {low > start ? low - start : 0, end < (int32_t)kBlock ? end : (int32_t)kBlock};
  }
  CANON int32_t first_block(const AttendRowsArgs& args, int32_t position) {
    return args.window > 0 && position >= args.window ? (position - args.window + 1) / (int32_t)kBlock : 0;
  }

  CANON void run(const AttendRows& at, const AttendRowsArgs& args) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32, own = lane % kOfWarp;
    const int32_t width = args.head_dim, sharing = args.heads / args.kv_heads, of_tile = kQueries / sharing;
    // The last tile of a sequence has most to do, and begins first.
    const int32_t tile = args.tiles - 1 - (int32_t)(VOX_GROUP_X / args.kv_heads);
    const int64_t kv_head = VOX_GROUP_X % args.kv_heads;
    wait_for_inputs();
    const int32_t first = at.tiles[2 * tile], rows = at.tiles[2 * tile + 1];
    int32_t lowest = at.positions[first], last = lowest;
    for (int32_t r = 1; r < rows; ++r) {
      const int32_t position = at.positions[first + r];
      lowest = position < lowest ? position : lowest;
      last = position > last ? position : last;
    }
    int32_t position[kOfWarp];  // below 0: no such query
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const int32_t row = (warp * kOfWarp + i) / sharing;
      position[i] = row < of_tile && row < rows ? at.positions[first + row] : -1;
    }
    const int32_t own_row = (warp * kOfWarp + own) / sharing;
    const int32_t own_position = own_row < of_tile && own_row < rows ? at.positions[first + own_row] : -1;
    for (int32_t i = VOX_LOCAL * 4; i < kQueries * width; i += kGroup * 4) {
      const int32_t m = i / width, c = i % width, row = m / sharing;
      if (row < of_tile && row < rows)
        *(Quad*)(at.query + m * (int32_t)kChunk + c) =
            *(const Quad*)(at.q + ((int64_t)(first + row) * args.heads + kv_head * sharing + m % sharing) * width + c);
    }
    const int64_t table = (int64_t)at.sequences[first] * args.blocks_per_sequence;
    const int32_t of_keys = width / kStageTerms, last_block = last / (int32_t)kBlock;
    // What is sent next: stage `sending` of `stages` of block `to_send`, keys first, to a place of the ring; from
    // where the thread's part of it lies. Where the next stage is used.
    int32_t to_send = first_block(args, lowest), sending = 0, stages = 0, free = 0, used = 0;
    const float *keys = at.keys, *values = at.values;
    auto send = [&]() {
      if (to_send <= last_block) {
        if (sending == 0) {
          const int64_t cache = (int64_t)at.block_tables[table + to_send] * args.kv_heads + kv_head;
          keys = at.keys + cache * width * kBlock + VOX_LOCAL * 4;
          values = at.values + (cache * kBlock + VOX_LOCAL / 32) * args.value_stride + VOX_LOCAL % 32 * 4;
          const int32_t left = last - to_send * (int32_t)kBlock + 1;
          stages = of_keys + ((left < (int32_t)kBlock ? left : (int32_t)kBlock) + kStageTerms - 1) / kStageTerms;
        }
        float* to = at.ring + free * kStageFloats + VOX_LOCAL * 4;
        if (sending < of_keys) {
          sent<16>(to, keys);
          sent<16>(to + kHalfStage, keys + kHalfStage);
          keys += kStageFloats;
        } else {
          if (VOX_LOCAL % 32 * 4 < width) {
            sent<16>(to, values);
            sent<16>(to + kHalfStage, values + 4 * args.value_stride);
          }
          values += kStageTerms * args.value_stride;
        }
        free = free + 1 == kRing ? 0 : free + 1;
        sending += 1;
        if (sending == stages) {
          sending = 0;
          to_send += 1;
        }
      }
      end_of_stage();
    };
    // The next stage is there, and one more on its way.
    auto receive = [&]() {
      arrived_but<kRing - 2>();
      VOX_BARRIER();
      send();
      const float* stage = at.ring + used * kStageFloats + lane * kLaneCells;
      used = used + 1 == kRing ? 0 : used + 1;
      return stage;
    };
#pragma unroll
    for (int s = 0; s < kRing - 1; ++s) send();
    const float* query = at.query + warp * kOfWarp * (int)kChunk;
    float* weights = at.weights + warp * kOfWarp * kWeightPitch;
    float *highest = at.highest + warp * 32, *ends = at.ends + warp * kOfWarp * 2;
    float o[kOfWarp][kLaneCells], m = 0.0f, l = 0.0f;  // m and l of the lane's own query
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int t = 0; t < kLaneCells; ++t) o[i][t] = 0.0f;
    for (int32_t b = first_block(args, lowest); b <= last_block; ++b) {
      float p[kOfWarp][kLaneCells];
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
        for (int t = 0; t < kLaneCells; ++t) p[i][t] = 0.0f;
#pragma unroll 1
      for (int32_t s = 0; s < of_keys; ++s) {
        const float* stage = receive();
#pragma unroll
        for (int half = 0; half < kStageTerms; half += 4) {
          Quad x[kOfWarp];
#pragma unroll
          for (int i = 0; i < kOfWarp; ++i) x[i] = *(const Quad*)(query + i * (int)kChunk + s * kStageTerms + half);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const Quad key = *(const Quad*)(stage + (half + k) * (int)kBlock);
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
              for (int t = 0; t < kLaneCells; ++t) p[i][t] = f_fma(x[i].values[k], key.values[t], p[i][t]);
          }
        }
      }
      bool sees_all = true;  // every query of the warp the whole block
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const Seen of = seen(args, position[i], b);
        sees_all = sees_all && of.begin == 0 && of.end == (int32_t)kBlock;
        Quad s;
#pragma unroll
        for (int t = 0; t < kLaneCells; ++t) {
          const int32_t j = lane * kLaneCells + t;
          float y = f_mul(p[i][t], args.scale);
          if (args.softcap != 0.0f) y = f_softcap(y, args.softcap);
          p[i][t] = s.values[t] = j >= of.begin && j < of.end ? y : f_from((int32_t)0xFF800000u);
        }
        *(Quad*)(weights + i * kWeightPitch + lane * kLaneCells) = s;
      }
      warp_barrier();
      {
        const float* of = weights + lane / 4 * kWeightPitch + lane % 4 * 4;
        float most = of[0];
#pragma unroll
        for (int t = 0; t < (int)kBlock; t += 16) {
          const Quad s = *(const Quad*)(of + t);
#pragma unroll
          for (int k = 0; k < 4; ++k) most = f_max(most, s.values[k]);
        }
        highest[lane] = most;
      }
      warp_barrier();
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const Quad four = *(const Quad*)(highest + 4 * i);
        const float most = f_max(f_max(four.values[0], four.values[1]), f_max(four.values[2], four.values[3]));
        const float m_block = f_add(most, 0.0f);  // -0 counts as +0
        Quad w;
#pragma unroll
        for (int t = 0; t < kLaneCells; ++t) w.values[t] = f_exp(f_sub(p[i][t], m_block));
        *(Quad*)(weights + i * kWeightPitch + lane * kLaneCells) = w;
      }
      const Quad four = *(const Quad*)(highest + 4 * own);
      const float most = f_max(f_max(four.values[0], four.values[1]), f_max(four.values[2], four.values[3]));
      const float m_block = f_add(most, 0.0f);
      const Seen of_own = seen(args, own_position, b);
      warp_barrier();
      float l_block = 0.0f;
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
        for (int t = 0; t < kLaneCells; ++t) p[i][t] = 0.0f;
      const int32_t of_block = last - b * (int32_t)kBlock + 1;
      const int32_t end = of_block < (int32_t)kBlock ? of_block : (int32_t)kBlock;
#pragma unroll 1
      for (int32_t j0 = 0; j0 < end; j0 += kStageTerms) {
        const float* stage = receive();
        if (sees_all) {
#pragma unroll
          for (int half = 0; half < kStageTerms; half += 4) {
            Quad w[kOfWarp];
            const Quad mine = *(const Quad*)(weights + own * kWeightPitch + j0 + half);
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i) w[i] = *(const Quad*)(weights + i * kWeightPitch + j0 + half);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              l_block = PlainSum::step(mine.values[k], l_block);
              const Quad value = *(const Quad*)(stage + (half + k) * (int)kBlock);
#pragma unroll
              for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
                for (int t = 0; t < kLaneCells; ++t) p[i][t] = f_fma(w[i].values[k], value.values[t], p[i][t]);
            }
          }
          continue;
        }
#pragma unroll 1
        for (int k = 0; k < kStageTerms; ++k) {
          const int32_t j = j0 + k;
          const float mine = weights[own * kWeightPitch + j];
          if (j >= of_own.begin && j < of_own.end) l_block = PlainSum::step(mine, l_block);
          const Quad value = *(const Quad*)(stage + k * (int)kBlock);
#pragma unroll
          for (int i = 0; i < kOfWarp; ++i) {
            const Seen of = seen(args, position[i], b);
            if (j < of.begin || j >= of.end) continue;
            const float w = weights[i * kWeightPitch + j];
#pragma unroll
            for (int t = 0; t < kLaneCells; ++t) p[i][t] = f_fma(w, value.values[t], p[i][t]);
          }
        }
      }
      if (of_own.begin < of_own.end) {
        const bool is_first = b == first_block(args, own_position);
        const Shares shares = shares_of(is_first ? m_block : m, m_block);
        l = is_first ? l_block : block_folded(l, shares.old_share, l_block, shares.new_share);
        m = shares.m;
        if (lane < kOfWarp) {
          ends[2 * lane] = shares.old_share;
          ends[2 * lane + 1] = shares.new_share;
        }
      }
      warp_barrier();
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const Seen of = seen(args, position[i], b);
        if (of.begin >= of.end) continue;
        const bool is_first = b == first_block(args, position[i]);
#pragma unroll
        for (int t = 0; t < kLaneCells; ++t)
          o[i][t] = is_first ? p[i][t] : block_folded(o[i][t], ends[2 * i], p[i][t], ends[2 * i + 1]);
      }
    }
    warp_barrier();
    if (lane < kOfWarp) ends[lane] = l;
    warp_barrier();
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      if (position[i] < 0 || lane * kLaneCells >= width) continue;
      const int32_t query_of = warp * kOfWarp + i;
      const int64_t row = first + query_of / sharing, head = kv_head * sharing + query_of % sharing;
      Quad y;
#pragma unroll
      for (int t = 0; t < kLaneCells; ++t) {
        y.values[t] = f_div(o[i][t], ends[i]);
        if (!is_finite(y.values[t])) at.faults[row] = 1;
      }
      *(Quad*)(at.out + (row * args.heads + head) * width + lane * kLaneCells) = y;
    }
  }
};

}  // namespace VOX_ISA
}  // namespace vox

VOX_KERNEL_AT_ONCE(3, vox_step_attend_rows)(VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2),
                                            VOX_IN(int32_t, positions, 3), VOX_IN(int32_t, sequences, 4),
                                            VOX_IN(int32_t, block_tables, 5), VOX_IN(int32_t, tiles, 6),
                                            VOX_OUT(float, out, 7), VOX_OUT(int32_t, faults, 8),
                                            VOX_ARGS(AttendRowsArgs, 9)) {
  VOX_SHARED Quad query[kQueryQuadsOfRows];
  VOX_SHARED Quad weights[kWeightQuadsOfRows];
  VOX_SHARED Quad ring[kRingQuads];
  VOX_SHARED Quad highest[kQueries];
  VOX_SHARED float ends[kTwoQueries];
  const AttendRows at = {q,   keys,   values, positions, sequences, block_tables, tiles, out, faults, (float*)(Quad*)query,
                         (float*)(Quad*)weights, (float*)(Quad*)ring, (float*)(Quad*)highest, ends};
  AttendRows::run(at, args);
}
