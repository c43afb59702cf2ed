// Attention of many rows: queries of one sequence that share a key/value head read its keys and values once.
//
// A group has 64 queries, (row, head) by (row, head), of a tile of rows. Both products are outer products of 8 x 8
// chains a thread, as in chains.h: eight queries by eight slots of a block while scores are made, channel by channel;
// eight queries by eight channels while values are summed, slot by slot. Every sum is one chain in one thread, as in
// vox_attention. Some channels of keys, or slots of values, are a stage in shared memory.

namespace vox {
namespace VOX_ISA {

struct AttendRowsArgs {  // group (tile of rows, key/value head)
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;  // at most kChunk, a multiple of four
  int32_t value_stride;
  int32_t blocks_per_sequence;
  int32_t window;
  int32_t tiles;
  int32_t floats_out;  // whether anyone reads them
  int32_t codes_out;   // of outputs in blocks of 32
  float scale;
  float softcap;
};

enum {
  kQueries = 64,  // of a group
  kCells = 8,     // a thread has so many queries by so many slots or channels
  kRowsPitch = kQueries + kSideGap,  // of weights: quads of neighbours go to different banks
  kRowsTerms = 16,  // of a stage
  kRowsStage = kRowsTerms * (int)kBlock,
  kRowsRing = 3,  // stages
  kRowsQueryFloats = (int)kChunk * kQueries,
  kRowsWeightFloats = (int)kBlock * kRowsPitch,
  kRowsPlaces = 16,  // threads that have some of a query's slots
  kRowsSideFloats = 4 * kQueries,
  kRowsFloats = kRowsQueryFloats + kRowsWeightFloats + kRowsRing * kRowsStage + kRowsSideFloats,
  kRowsQuads = kRowsFloats / 4,
  kRowsOutPitch = (int)kChunk + 4,  // of a query's outputs, where queries and weights were
};

struct AttendRows {
  const float *q, *keys, *values;
  const int32_t *positions, *sequences, *block_tables, *tiles;  // tiles [tiles][first row, rows]
  float* out;
  int8_t* codes;
  float* code_scales;
  int32_t* faults;
  float* query;    // [channels][queries], aligned as Quad
  float* weights;  // [slots][queries]; before, the greatest scores of each thread, [kRowsPlaces][queries]
  float* ring;
  float* highest;  // of the lower and the upper slots, [2][queries]; then the shares, old and new
  float* sums;     // l [queries]
  int32_t* places;  // positions [queries]

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

  // A thread's queries and its slots or channels: of each four, and four more so far behind. Two warps lie side by
  // side over the queries, two over the others; lanes as in Spread.
  enum { kQueriesApart = 16, kOthersApart = 32 };
  CANON int query_of(int i) {
    const int lane = VOX_LOCAL % 32;
    return VOX_LOCAL / 32 % 2 * 32 + (lane % 2 + lane / 4 % 2 * 2) * 4 + i / 4 * kQueriesApart + i % 4;
  }
  CANON int other_of(int j) {
    const int lane = VOX_LOCAL % 32;
    return VOX_LOCAL / 64 * 64 + (lane / 2 % 2 + lane / 8 * 2) * 4 + j / 4 * kOthersApart + j % 4;
  }
  CANON void term(const float* of_queries, const float* of_others, float (&p)[kCells][kCells]) {
    float x[kCells], w[kCells];
    quads_of<2, kQueriesApart>(of_queries, x);
    quads_of<2, kOthersApart>(of_others, w);
    outer(x, w, p);
  }
  CANON void set_zero(float (&p)[kCells][kCells]) {
#pragma unroll
    for (int i = 0; i < kCells; ++i)
#pragma unroll
      for (int j = 0; j < kCells; ++j) p[i][j] = 0.0f;
  }

  CANON void run(const AttendRows& at, const AttendRowsArgs& args) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
    const int32_t width = args.head_dim, sharing = args.heads / args.kv_heads;
    // The last tile of a sequence has most to do, and begins first.
    const int32_t tile = args.tiles - 1 - (int32_t)(VOX_GROUP_X / args.kv_heads);
    const int64_t kv_head = VOX_GROUP_X % args.kv_heads;
    wait_for_inputs();
    const int32_t first = at.tiles[2 * tile], rows = at.tiles[2 * tile + 1];
    // Positions ascend. Queries that are not there see what the last one sees, and are not written.
    const int32_t lowest = at.positions[first], last = at.positions[first + rows - 1];
    const int32_t queries = rows * sharing;
    for (int32_t i = VOX_LOCAL; i < kQueries * width / 4; i += kGroup) {
      const int32_t m = i % kQueries, c = i / kQueries * 4;
      Quad x = {};
      if (m < queries)
        x = *(const Quad*)(at.q + ((int64_t)(first + m / sharing) * args.heads + kv_head * sharing + m % sharing) * width + c);
#pragma unroll
      for (int k = 0; k < 4; ++k) at.query[(c + k) * kQueries + m] = x.values[k];
    }
    if (VOX_LOCAL < kQueries) at.places[VOX_LOCAL] = VOX_LOCAL < queries ? at.positions[first + VOX_LOCAL / sharing] : last;
    const int64_t table = (int64_t)at.sequences[first] * args.blocks_per_sequence;
    const int32_t of_keys = (width + kRowsTerms - 1) / kRowsTerms, last_block = last / (int32_t)kBlock;
    // What is sent next: stage `sending` of `stages` of block `to_send`, keys first, to a place of the ring; from
    // where the thread's part of it lies. Where the next stage is used.
    int32_t to_send = first_block(args, lowest), sending = 0, stages = 0, free = 0, used = 0;
    const float *keys = at.keys, *values = at.values;
    auto send = [&]() {
      if (to_send <= last_block) {
        if (sending == 0) {
          const int64_t cache = (int64_t)at.block_tables[table + to_send] * args.kv_heads + kv_head;
          keys = at.keys + cache * width * kBlock + VOX_LOCAL * 4;
          values = at.values + (cache * kBlock + warp) * args.value_stride + lane * 4;
          const int32_t left = last - to_send * (int32_t)kBlock + 1;
          stages = of_keys + ((left < (int32_t)kBlock ? left : (int32_t)kBlock) + kRowsTerms - 1) / kRowsTerms;
        }
        float* to = at.ring + free * kRowsStage + VOX_LOCAL * 4;
        if (sending < of_keys) {
          const int32_t left = width - sending * kRowsTerms - warp;
#pragma unroll
          for (int i = 0; i < kRowsTerms / 4; ++i)
            if (4 * i < left) sent<16>(to + i * 4 * kGroup, keys + i * 4 * kGroup);
          keys += kRowsStage;
        } else {
          // A block's room is whole: slots that nobody wrote may be read, and are not used.
          if (lane * 4 < width)
#pragma unroll
            for (int i = 0; i < kRowsTerms / 4; ++i) sent<16>(to + i * 4 * kGroup, values + i * 4 * args.value_stride);
          values += kRowsTerms * args.value_stride;
        }
        free = free + 1 == kRowsRing ? 0 : free + 1;
        sending += 1;
        if (sending == stages) {
          sending = 0;
          to_send += 1;
        }
      }
      end_of_stage();
    };
    // The next stage is there, and one more on its way.
    const int other = other_of(0), own = query_of(0);
    auto receive = [&]() {
      arrived_but<kRowsRing - 2>();
      VOX_BARRIER();
      send();
      const float* stage = at.ring + used * kRowsStage + other;
      used = used + 1 == kRowsRing ? 0 : used + 1;
      return stage;
    };
#pragma unroll
    for (int s = 0; s < kRowsRing - 1; ++s) send();
    float o[kCells][kCells], m = 0.0f, l = 0.0f;  // m and l of a query that a lane below 16 keeps
    const int kept = warp * 16 + lane % 16;
    set_zero(o);
    for (int32_t b = first_block(args, lowest); b <= last_block; ++b) {
      const int32_t start = b * (int32_t)kBlock, left = last - start + 1;
      const int32_t end = left < (int32_t)kBlock ? left : (int32_t)kBlock;  // of what any query sees
      const int32_t begin = seen(args, lowest, b).begin;
      // What every query of the tile sees: all of it, from `common.begin` to `common.end`.
      const Seen common = {seen(args, last, b).begin, seen(args, lowest, b).end};
      const bool sees_all = common.begin == 0 && common.end == (int32_t)kBlock;
      float p[kCells][kCells];
      set_zero(p);
#pragma unroll 1
      for (int32_t s = 0; s < of_keys; ++s) {
        const float* stage = receive();
        const float* query = at.query + s * kRowsTerms * kQueries + own;
        if (VOX_LOCAL / 64 * 64 >= end) continue;  // slots that nobody sees
        const int32_t terms = width - s * kRowsTerms;
        if (terms >= kRowsTerms) {
#pragma unroll
          for (int k = 0; k < kRowsTerms; ++k) term(query + k * kQueries, stage + k * (int)kBlock, p);
          continue;
        }
#pragma unroll 1
        for (int k = 0; k < terms; ++k) term(query + k * kQueries, stage + k * (int)kBlock, p);
      }
#pragma unroll
      for (int i = 0; i < kCells; ++i)
#pragma unroll
        for (int j = 0; j < kCells; ++j) p[i][j] = f_mul(p[i][j], args.scale);
      if (args.softcap != 0.0f) {
        // One slot's scores at a time, which go round: the text of a softcap is long.
#pragma unroll 1
        for (int turn = 0; turn < kCells; ++turn)
#pragma unroll
          for (int i = 0; i < kCells; ++i) {
            const float y = f_softcap(p[i][0], args.softcap);
#pragma unroll
            for (int j = 1; j < kCells; ++j) p[i][j - 1] = p[i][j];
            p[i][kCells - 1] = y;
          }
      }
      if (!sees_all) {
#pragma unroll
        for (int i = 0; i < kCells; ++i) {
          const Seen of = seen(args, at.places[query_of(i)], b);
#pragma unroll
          for (int j = 0; j < kCells; ++j)
            if (other_of(j) < of.begin || other_of(j) >= of.end) p[i][j] = f_from((int32_t)0xFF800000u);
        }
      }
      // The weights of the block before are read: a stage's barrier came since.
#pragma unroll
      for (int i = 0; i < kCells; i += 4) {
        Quad most;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          most.values[q] = p[i + q][0];
#pragma unroll
          for (int j = 1; j < kCells; ++j) most.values[q] = f_max(most.values[q], p[i + q][j]);
        }
        *(Quad*)(at.weights + other / 64 * 8 * kRowsPitch + other / 4 % 8 * kRowsPitch + own + i / 4 * kQueriesApart) = most;
      }
      VOX_BARRIER();
      {
        const float* of = at.weights + VOX_LOCAL / kQueries * 8 * kRowsPitch + VOX_LOCAL % kQueries;
        float most = of[0];
#pragma unroll
        for (int t = 1; t < 8; ++t) most = f_max(most, of[t * kRowsPitch]);
        at.highest[VOX_LOCAL] = most;
      }
      VOX_BARRIER();
#pragma unroll
      for (int i = 0; i < kCells; i += 4) {
        const Quad low = *(const Quad*)(at.highest + own + i / 4 * kQueriesApart);
        const Quad high = *(const Quad*)(at.highest + kQueries + own + i / 4 * kQueriesApart);
        Quad m_block;
#pragma unroll
        for (int q = 0; q < 4; ++q) m_block.values[q] = f_add(f_max(low.values[q], high.values[q]), 0.0f);  // -0 counts as +0
#pragma unroll
        for (int j = 0; j < kCells; ++j) {
          Quad w;
#pragma unroll
          for (int q = 0; q < 4; ++q) w.values[q] = f_exp(f_sub(p[i + q][j], m_block.values[q]));
          *(Quad*)(at.weights + other_of(j) * kRowsPitch + own + i / 4 * kQueriesApart) = w;
        }
      }
      const float m_block = f_add(f_max(at.highest[kept], at.highest[kQueries + kept]), 0.0f);
      set_zero(p);
      const int32_t position = at.places[kept];
      const Seen of_kept = seen(args, position, b);
      const float* of_query = at.weights + kept;
      float l_block = 0.0f;
#pragma unroll 1
      for (int32_t j0 = 0; j0 < end; j0 += kRowsTerms) {
        const float* stage = receive();
        // Channels that are not there, or slots that nobody sees.
        const bool is_whole = j0 >= common.begin && j0 + kRowsTerms <= common.end;
        const bool is_there = VOX_LOCAL / 64 * 64 < width && j0 + kRowsTerms > begin;
        const float* weights = at.weights + j0 * kRowsPitch + own;
        if (is_whole && is_there) {
#pragma unroll
          for (int k = 0; k < kRowsTerms; ++k) {
            term(weights + k * kRowsPitch, stage + k * (int)kBlock, p);
            l_block = PlainSum::step(of_query[(j0 + k) * kRowsPitch], l_block);
          }
          continue;
        }
#pragma unroll 4
        for (int32_t k = 0; k < kRowsTerms; ++k)
          if (j0 + k >= of_kept.begin && j0 + k < of_kept.end) l_block = PlainSum::step(of_query[(j0 + k) * kRowsPitch], l_block);
        if (!is_there) continue;
        Seen of[kCells];
#pragma unroll
        for (int i = 0; i < kCells; ++i) of[i] = seen(args, at.places[query_of(i)], b);
#pragma unroll 1
        for (int k = 0; k < kRowsTerms; ++k) {
          float x[kCells], w[kCells];
          quads_of<2, kQueriesApart>(weights + k * kRowsPitch, x);
          quads_of<2, kOthersApart>(stage + k * (int)kBlock, w);
#pragma unroll
          for (int i = 0; i < kCells; ++i) {
            if (j0 + k < of[i].begin || j0 + k >= of[i].end) continue;
#pragma unroll
            for (int j = 0; j < kCells; ++j) p[i][j] = f_fma(x[i], w[j], p[i][j]);
          }
        }
      }
      if (lane < 16 && of_kept.begin < of_kept.end) {
        const bool is_first = b == first_block(args, position);
        const Shares shares = shares_of(is_first ? m_block : m, m_block);
        l = is_first ? l_block : block_folded(l, shares.old_share, l_block, shares.new_share);
        m = shares.m;
        at.highest[kept] = shares.old_share;
        at.highest[kQueries + kept] = shares.new_share;
      }
      VOX_BARRIER();  // the shares are there
      const bool all_see = start <= lowest && b >= first_block(args, last);
      if (all_see && b > first_block(args, last)) {
#pragma unroll
        for (int i = 0; i < kCells; ++i) {
          const float old_share = at.highest[query_of(i)], new_share = at.highest[kQueries + query_of(i)];
#pragma unroll
          for (int j = 0; j < kCells; ++j) o[i][j] = block_folded(o[i][j], old_share, p[i][j], new_share);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const Seen of = seen(args, at.places[query_of(i)], b);
        if (of.begin >= of.end) continue;
        const bool is_first = b == first_block(args, at.places[query_of(i)]);
        const float old_share = at.highest[query_of(i)], new_share = at.highest[kQueries + query_of(i)];
#pragma unroll
        for (int j = 0; j < kCells; ++j)
          o[i][j] = is_first ? p[i][j] : block_folded(o[i][j], old_share, p[i][j], new_share);
      }
    }
    if (lane < 16) at.sums[kept] = l;
    VOX_BARRIER();
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int32_t m = query_of(i);
      if (m >= queries) continue;
      const int64_t row = first + m / sharing, head = kv_head * sharing + m % sharing;
      const float l = at.sums[m];
#pragma unroll
      for (int j = 0; j < kCells; j += 4) {
        if (other_of(j) >= width) continue;
        Quad y;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          y.values[q] = f_div(o[i][j + q], l);
          if (!is_finite(y.values[q])) at.faults[row] = 1;
        }
        if (args.floats_out != 0) *(Quad*)(at.out + (row * args.heads + head) * width + other_of(j)) = y;
        if (args.codes_out != kNoCodes) *(Quad*)(at.query + m * kRowsOutPitch + other_of(j)) = y;
      }
    }
    if (args.codes_out == kNoCodes) return;
    VOX_BARRIER();
    // A thread a block of codes.
    const int32_t blocks = width / 32, columns = args.heads * width;
    for (int32_t i = VOX_LOCAL; i < queries * blocks; i += kGroup) {
      const int32_t m = i / blocks, c = i % blocks * 32;
      const int64_t row = first + m / sharing, column = (kv_head * sharing + m % sharing) * width + c;
      const float* y = at.query + m * kRowsOutPitch + c;
      int32_t amax = 0;
#pragma unroll
      for (int k = 0; k < 32; k += 4) {
        const int32_t four = four_magnitude(*(const Quad*)(y + k));
        amax = four > amax ? four : amax;
      }
      const float d = activation_scale(amax), inverse = code_inverse(d, amax);
      at.code_scales[code_scale_at(args.codes_out != kCodesOfRows, row, column / 32, columns / 32)] = d;
#pragma unroll
      for (int k = 0; k < 32; k += 4)
        *(uint32_t*)(at.codes + code_in(args.codes_out, row, column + k, columns)) = four_codes(*(const Quad*)(y + k), inverse);
    }
  }
};

}  // namespace VOX_ISA
}  // namespace vox

VOX_ASKS(vox_step_attend_rows, kRowsQuads)
VOX_KERNEL_AT_ONCE(2, vox_step_attend_rows)(VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2),
                                            VOX_IN(int32_t, positions, 3), VOX_IN(int32_t, sequences, 4),
                                            VOX_IN(int32_t, block_tables, 5), VOX_IN(int32_t, tiles, 6),
                                            VOX_OUT(float, out, 7), VOX_OUT(int8_t, codes, 8), VOX_OUT(float, scales, 9),
                                            VOX_OUT(int32_t, faults, 10), VOX_ARGS(AttendRowsArgs, 11)) {
  VOX_ASKED(kRowsQuads, shared);
  float* query = (float*)(Quad*)shared;
  float* weights = query + kRowsQueryFloats;
  float* ring = weights + kRowsWeightFloats;
  float* highest = ring + kRowsRing * kRowsStage;
  const AttendRows at = {q,   keys,  values, positions, sequences, block_tables, tiles, out,
                         codes, scales, faults, query, weights, ring, highest, highest + 2 * kQueries,
                         (int32_t*)(highest + 3 * kQueries)};
  AttendRows::run(at, args);
}
