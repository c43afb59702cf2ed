// Gradients of attention as products over pairs of a query and a key (docs/numerics.md, attention_backward), made by
// kernels/broad.h. P and dS of some heads lie in memory, [head][row of the batch][stride], each pair made once.
//
// A tile is up to 64 rows of one sequence, in one block of positions: {its first row, how many, the
// sequence's first row, its length}. Keys and values were taken from the cache, [row][kv_heads * head_dim].

namespace vox {
namespace VOX_ISA {

struct PairsArgs {
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;  // a multiple of four
  int32_t window;    // 0: everything before
  int32_t stride;    // floats of a row of P and dS: a multiple of four
  int32_t first;     // key/value head whose pairs are there, the first of `count`
  int32_t count;
  int32_t number;    // which of the query heads that share one
  int32_t is_last;   // of them
  float scale;
  float softcap;  // 0: none
};

struct PairTile {
  int32_t first, count, begin, length;
};
CANON PairTile pair_tile(const int32_t* tiles, int64_t number) {
  const int32_t* tile = tiles + number * 4;
  return {tile[0], tile[1], tile[2], tile[3]};
}

// Which head a group works for, beside which it has `across` others.
struct PairHead {
  int64_t at;     // in P and dS
  int64_t query;  // first channel in rows of queries
  int64_t key;    // in rows of keys
};
CANON PairHead pair_head(const PairsArgs& args, int64_t at) {
  const int64_t kv = args.first + at;
  return {at, (kv * (args.heads / args.kv_heads) + args.number) * args.head_dim, kv * args.head_dim};
}

// Products q k, as they are; or from them, and from dy v, P in their place and dS.
template <bool IsGradient>
struct PairRule : AddedChunks {
  const PairsArgs* args;
  PairTile tile;
  int64_t pairs;  // of the tile's first row and the group's first key
  int32_t key;    // the group's first
  int64_t head;
  const float *m, *l, *deltas;
  float *shares, *slopes;

  CANON bool is_there(const PairRule& it, int row, int column) {
    return row < it.tile.count && it.key + column < it.tile.length;
  }
  CANON Quad* place(const PairRule& it, int row, int column) {
    return (Quad*)(it.shares + it.pairs + (int64_t)row * it.args->stride + column);
  }
  CANON void finish(const PairRule& it, int row, int column, const Quad& sum) {
    Quad* share = place(it, row, column);
    if (!IsGradient) {
      *share = sum;
      return;
    }
    const int64_t at = (int64_t)(it.tile.first + row) * it.args->heads + it.head;
    const Quad products = *share;
    Quad probabilities, gradients;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const PairGradients<float> pair = pair_gradients(products.values[q], sum.values[q], it.args->scale,
                                                       it.args->softcap != 0.0f, it.args->softcap, it.m[at], it.l[at],
                                                       it.deltas[at]);
      probabilities.values[q] = pair.probability;
      gradients.values[q] = pair.score;
    }
    *share = probabilities;
    *(Quad*)(it.slopes + it.pairs + (int64_t)row * it.args->stride + column) = gradients;
  }
};

template <bool IsGradient>
CANON void pair_products(const float* of_queries, const float* of_keys, const float* m, const float* l,
                         const float* deltas, const int32_t* tiles, float* shares, float* slopes,
                         const PairsArgs& args, float* shared) {
  const PairTile tile = pair_tile(tiles, VOX_GROUP_Y);
  const PairHead head = pair_head(args, VOX_GROUP_X % args.count);
  const int32_t key = (int32_t)(VOX_GROUP_X / args.count) * BroadFew::kN, position = tile.first - tile.begin;
  // Keys that no query of the tile sees.
  if (key >= position + tile.count || key + BroadFew::kN <= first_seen(position, args.window)) return;
  const int64_t wide = (int64_t)args.heads * args.head_dim, narrow = (int64_t)args.kv_heads * args.head_dim;
  FloatsAcross<BroadFew::kM, kBroadTerms> queries;
  FloatsAcross<BroadFew::kN, kBroadTerms> keys;
  queries.find(queries, of_queries + tile.first * wide + head.query, wide, tile.count);
  const int32_t left = tile.length - key;
  keys.find(keys, of_keys + (int64_t)(tile.begin + key) * narrow + head.key, narrow,
            left < BroadFew::kN ? left : (int32_t)BroadFew::kN);
  const PairRule<IsGradient> rule = {
      {},    &args, tile, (head.at * args.rows + tile.first) * args.stride + key, key, head.query / args.head_dim,
      m,     l,    deltas,
      shares, slopes};
  BroadFew::run(queries, keys, rule, 0, args.head_dim, shared);
}

// Which terms a row sees: keys, of queries; or queries, of keys.
template <bool IsOfKeys>
struct PairSpans : AddedChunks {
  enum { masks = 1 };
  const PairsArgs* args;
  PairTile tile;
  int32_t position;  // of the tile's first row
  float* out;        // of its first row, and the group's first channel
  int64_t stride;
  int32_t channels;  // of the group that are there
  bool goes_on;
  int32_t* faults;

  // Of row `row`: the first and the last position that takes part.
  CANON int32_t lowest(const PairSpans& it, int row) {
    return IsOfKeys ? it.position + row : first_seen(it.position + row, it.args->window);
  }
  CANON int32_t highest(const PairSpans& it, int row) {
    return IsOfKeys ? last_seeing(it.position + row, it.args->window, it.tile.length) : it.position + row;
  }
  CANON bool sees(const PairSpans& it, int row, int32_t term) {
    return term >= lowest(it, row) && term <= highest(it, row);
  }
  // Both ends move up with the row. Terms behind the sequence are not looked at.
  CANON bool is_whole(const PairSpans& it, int32_t chunk) {
    const int32_t start = chunk * (int32_t)kChunk, last = start + (int32_t)kChunk - 1;
    return start >= lowest(it, it.tile.count - 1) &&
           (last < it.tile.length ? last : it.tile.length - 1) <= highest(it, 0);
  }
  CANON ChunkGoes chunk_goes(const PairSpans& it, int row, int32_t chunk) {
    if (row >= it.tile.count) return kNowhere;
    const int32_t start = chunk * (int32_t)kChunk, low = lowest(it, row), high = highest(it, row);
    if (high < start || low >= start + (int32_t)kChunk) return kNowhere;
    if (low / (int32_t)kChunk != chunk) return kBehind;
    return it.goes_on ? kBehindMemory : kFirst;
  }
  CANON bool is_there(const PairSpans& it, int row, int column) { return row < it.tile.count && column < it.channels; }
  CANON Quad* place(const PairSpans& it, int row, int column) { return (Quad*)(it.out + row * it.stride + column); }
};

// Gradients.
template <bool IsOfKeys>
struct PairSumRule : PairSpans<IsOfKeys> {
  float scale;
  bool is_scaled, is_watched;

  CANON void finish(const PairSumRule& it, int row, int column, const Quad& sum) {
    Quad y = sum;
    int32_t* faults = it.faults;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (it.is_scaled) y.values[q] = f_mul(sum.values[q], it.scale);
      if (it.is_watched) VOX_WATCH(y.values[q], it.tile.first + row);
    }
    *PairSpans<IsOfKeys>::place(it, row, column) = y;
  }
};

// The forward's result: blocks of a row are joined by their shares of it, [row][head][blocks][old and new].
struct PairAttendRule : PairSpans<false> {
  const float *shares, *l;
  int64_t head;
  int32_t blocks;

  CANON Quad folded(const PairAttendRule& it, int row, int32_t chunk, const Quad& total, const Quad& fresh) {
    const float* share = it.shares + (((it.tile.first + row) * (int64_t)it.args->heads + it.head) * it.blocks + chunk) * 2;
    Quad y;
#pragma unroll
    for (int q = 0; q < 4; ++q) y.values[q] = block_folded(total.values[q], share[0], fresh.values[q], share[1]);
    return y;
  }
  CANON void finish(const PairAttendRule& it, int row, int column, const Quad& sum) {
    const float l = it.l[(it.tile.first + row) * (int64_t)it.args->heads + it.head];
    Quad y;
    int32_t* faults = it.faults;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      y.values[q] = f_div(sum.values[q], l);
      VOX_WATCH(y.values[q], it.tile.first + row);
    }
    *place(it, row, column) = y;
  }
};

}  // namespace VOX_ISA
}  // namespace vox

// group (head of the piece beside keys, tile)
VOX_KERNEL_AT_ONCE(3, vox_pairs_products)(VOX_IN(float, q, 0), VOX_IN(float, k, 1), VOX_IN(int32_t, tiles, 2),
                                          VOX_OUT(float, shares, 3), VOX_ARGS(PairsArgs, 4)) {
  VOX_SHARED Quad shared[kBroadFew];
  pair_products<false>(q, k, q, q, q, tiles, shares, shares, args, (float*)(Quad*)shared);
}
VOX_KERNEL_AT_ONCE(3, vox_pairs_gradients)(VOX_IN(float, dy, 0), VOX_IN(float, v, 1), VOX_IN(float, m, 2),
                                           VOX_IN(float, l, 3), VOX_IN(float, deltas, 4), VOX_IN(int32_t, tiles, 5),
                                           VOX_OUT(float, shares, 6), VOX_OUT(float, slopes, 7),
                                           VOX_ARGS(PairsArgs, 8)) {
  VOX_SHARED Quad shared[kBroadFew];
  pair_products<true>(dy, v, m, l, deltas, tiles, shares, slopes, args, (float*)(Quad*)shared);
}

// dq of a tile. group (head of the piece beside channels, tile); the last tiles have most to do, and begin first
VOX_KERNEL_AT_ONCE(3, vox_pairs_queries)(VOX_IN(float, slopes, 0), VOX_IN(float, k, 1), VOX_IN(int32_t, tiles, 2),
                                         VOX_OUT(float, dq, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(PairsArgs, 5)) {
  VOX_SHARED Quad shared[kBroadFew];
  const PairTile tile = pair_tile(tiles, VOX_GROUP_Y);
  const PairHead head = pair_head(args, VOX_GROUP_X % args.count);
  const int32_t channel = (int32_t)(VOX_GROUP_X / args.count) * BroadFew::kN, position = tile.first - tile.begin;
  const int64_t wide = (int64_t)args.heads * args.head_dim, narrow = (int64_t)args.kv_heads * args.head_dim;
  const int32_t left = args.head_dim - channel, channels = left < BroadFew::kN ? left : (int32_t)BroadFew::kN;
  FloatsAcross<BroadFew::kM, kBroadTerms> weights;
  FloatsAlong<BroadFew::kN, kBroadTerms> vectors;
  weights.find(weights, slopes + (head.at * args.rows + tile.first) * args.stride, args.stride, tile.count);
  vectors.find(vectors, k + tile.begin * narrow + head.key + channel, narrow, channels);
  const PairSumRule<false> rule = {
      {{}, &args, tile, position, dq + tile.first * wide + head.query + channel, wide, channels, false, faults},
      args.scale,
      true,
      true};
  BroadFew::run(weights, vectors, rule, first_seen(position, args.window) / (int32_t)kChunk * (int32_t)kChunk,
                 position + tile.count, (float*)(Quad*)shared);
}

// dv of a tile from P and dy, or dk from dS and q: a head of those that share keys behind the ones before it.
#define VOX_PAIRS_KEYS(name, is_scaled)                                                                                \
  VOX_KERNEL_AT_ONCE(3, name)(VOX_IN(float, pairs, 0), VOX_IN(float, of_queries, 1), VOX_IN(int32_t, tiles, 2),        \
                              VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(PairsArgs, 5)) {           \
    VOX_SHARED Quad shared[kBroadFew];                                                                                \
    const PairTile tile = pair_tile(tiles, VOX_GROUP_Y);                                                               \
    const PairHead head = pair_head(args, VOX_GROUP_X % args.count);                                                   \
    const int32_t channel = (int32_t)(VOX_GROUP_X / args.count) * BroadFew::kN, position = tile.first - tile.begin;   \
    const int64_t wide = (int64_t)args.heads * args.head_dim, narrow = (int64_t)args.kv_heads * args.head_dim;         \
    const int32_t left = args.head_dim - channel, channels = left < BroadFew::kN ? left : (int32_t)BroadFew::kN;     \
    FloatsAlong<BroadFew::kM, kBroadTerms> weights;                                                                             \
    FloatsAlong<BroadFew::kN, kBroadTerms> vectors;                                                                             \
    const int32_t keys = (tile.count + 3) / 4 * 4;                                                                     \
    weights.find(weights, pairs + (head.at * args.rows + tile.begin) * args.stride + position, args.stride, keys);     \
    vectors.find(vectors, of_queries + tile.begin * wide + head.query + channel, wide, channels);                      \
    const PairSumRule<true> rule = {{{}, &args, tile, position, out + tile.first * narrow + head.key + channel, narrow, \
                                     channels, args.number > 0, faults},                                               \
                                    args.scale, is_scaled && args.is_last != 0, args.is_last != 0};                    \
    const int32_t last = last_seeing(position + tile.count - 1, args.window, tile.length);                             \
    BroadFew::run(weights, vectors, rule, position / (int32_t)kChunk * (int32_t)kChunk, last + 1, (float*)(Quad*)shared);                                 \
  }
VOX_PAIRS_KEYS(vox_pairs_values, false)
VOX_PAIRS_KEYS(vox_pairs_keys, true)
#undef VOX_PAIRS_KEYS

// --- the forward ------------------------------------------------------------------------------------------------

namespace vox {
namespace VOX_ISA {

enum { kPairSlots = kSlots, kPairFloats = kSlotFloats };

// Where one block of a row's pairs lies.
struct PairBlock {
  int64_t row, head;  // of the batch
  int32_t low, high;  // of the block's keys
  float* pairs;       // from the block's first key on
  int64_t at;         // in [row][head][blocks]
};
CANON PairBlock pair_block(const int32_t* positions, float* pairs, int32_t blocks, const PairsArgs& args, int64_t number) {
  const int32_t b = (int32_t)(number % blocks);
  const int64_t row = number / blocks / args.count;
  const PairHead head = pair_head(args, number / blocks % args.count);
  const int32_t start = b * (int32_t)kBlock, position = positions[row];
  const int64_t of_query = head.query / args.head_dim;
  return {row, of_query, span_low(first_seen(position, args.window), start), span_high(position + 1, start),
          pairs + (head.at * args.rows + row) * args.stride + start, (row * args.heads + of_query) * blocks + b};
}

}  // namespace VOX_ISA
}  // namespace vox

// Products to weights exp(s - m) in their place, and the m and l of each block. group of kPairSlots blocks
VOX_KERNEL(vox_pairs_weights)(VOX_IN(int32_t, positions, 0), VOX_OUT(float, pairs, 1), VOX_OUT(float, block_m, 2),
                              VOX_OUT(float, block_l, 3), VOX_ARGS(PairsArgs, 4)) {
  VOX_SHARED float staged[kPairFloats];
  VOX_SHARED float highest[kPairSlots];
  const int32_t blocks = (args.stride - 1) / (int32_t)kBlock + 1;
  const int64_t all = (int64_t)args.rows * args.count * blocks, first = VOX_GROUP_X * kPairSlots;
  const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
  for (int slot = warp; slot < kPairSlots; slot += 4) {
    if (first + slot >= all) continue;
    const PairBlock block = pair_block(positions, pairs, blocks, args, first + slot);
    for (int32_t j = block.low + lane; j < block.high; j += 32) {
      float s = f_mul(block.pairs[j], args.scale);
      if (args.softcap != 0.0f) s = f_softcap(s, args.softcap);
      staged[slot * kSlotPitch + j] = s;
    }
  }
  VOX_BARRIER();
  const bool is_own = VOX_LOCAL < kPairSlots && first + VOX_LOCAL < all;
  PairBlock own = {0, 0, 0, 0, pairs, 0};
  if (is_own) own = pair_block(positions, pairs, blocks, args, first + VOX_LOCAL);
  if (own.low < own.high) {
    float most = staged[VOX_LOCAL * kSlotPitch + own.low];
#pragma unroll 8
    for (int32_t j = own.low; j < own.high; ++j) most = f_max(most, staged[VOX_LOCAL * kSlotPitch + j]);
    highest[VOX_LOCAL] = f_add(most, 0.0f);  // -0 counts as +0
  }
  VOX_BARRIER();
  for (int slot = warp; slot < kPairSlots; slot += 4) {
    if (first + slot >= all) continue;
    const PairBlock block = pair_block(positions, pairs, blocks, args, first + slot);
    for (int32_t j = block.low + lane; j < block.high; j += 32) {
      const float weight = f_exp(f_sub(staged[slot * kSlotPitch + j], highest[slot]));
      staged[slot * kSlotPitch + j] = weight;
      block.pairs[j] = weight;
    }
  }
  VOX_BARRIER();
  if (own.low >= own.high) return;
  float l = 0.0f;
#pragma unroll 8
  for (int32_t j = own.low; j < own.high; ++j) l = PlainSum::step(staged[VOX_LOCAL * kSlotPitch + j], l);
  block_m[own.at] = highest[VOX_LOCAL];
  block_l[own.at] = l;
}

// The m and l of rows from those of their blocks, and the blocks' shares. thread (head of the piece, row)
VOX_KERNEL(vox_pairs_ends)(VOX_IN(int32_t, positions, 0), VOX_IN(float, block_m, 1), VOX_IN(float, block_l, 2),
                           VOX_OUT(float, shares, 3), VOX_OUT(float, saved_m, 4), VOX_OUT(float, saved_l, 5),
                           VOX_ARGS(PairsArgs, 6)) {
  if (VOX_THREAD_X >= (int64_t)args.rows * args.count) return;
  const int64_t row = VOX_THREAD_X / args.count;
  const int64_t at = row * args.heads + pair_head(args, VOX_THREAD_X % args.count).query / args.head_dim;
  const int32_t blocks = (args.stride - 1) / (int32_t)kBlock + 1, position = positions[row];
  const int32_t first = first_seen(position, args.window) / (int32_t)kBlock;
  float m = 0.0f, l = 0.0f;
  for (int32_t b = first; b <= position / (int32_t)kBlock; ++b) {
    const float of_m = block_m[at * blocks + b], of_l = block_l[at * blocks + b];
    const bool is_first = b == first;
    const Shares share = shares_of(is_first ? of_m : m, of_m);
    l = is_first ? of_l : block_folded(l, share.old_share, of_l, share.new_share);
    m = share.m;
    shares[(at * blocks + b) * 2] = share.old_share;
    shares[(at * blocks + b) * 2 + 1] = share.new_share;
  }
  saved_m[at] = m;
  saved_l[at] = l;
}

// group (head of the piece beside channels, tile)
VOX_KERNEL_AT_ONCE(3, vox_pairs_attend)(VOX_IN(float, pairs, 0), VOX_IN(float, v, 1), VOX_IN(int32_t, tiles, 2),
                                        VOX_IN(float, shares, 3), VOX_IN(float, l, 4), VOX_OUT(float, out, 5),
                                        VOX_OUT(int32_t, faults, 6), VOX_ARGS(PairsArgs, 7)) {
  VOX_SHARED Quad shared[kBroadFew];
  const PairTile tile = pair_tile(tiles, VOX_GROUP_Y);
  const PairHead head = pair_head(args, VOX_GROUP_X % args.count);
  const int32_t channel = (int32_t)(VOX_GROUP_X / args.count) * BroadFew::kN, position = tile.first - tile.begin;
  const int64_t wide = (int64_t)args.heads * args.head_dim, narrow = (int64_t)args.kv_heads * args.head_dim;
  const int32_t left = args.head_dim - channel, channels = left < BroadFew::kN ? left : (int32_t)BroadFew::kN;
  FloatsAcross<BroadFew::kM, kBroadTerms> weights;
  FloatsAlong<BroadFew::kN, kBroadTerms> vectors;
  weights.find(weights, pairs + (head.at * args.rows + tile.first) * args.stride, args.stride, tile.count);
  vectors.find(vectors, v + tile.begin * narrow + head.key + channel, narrow, channels);
  const PairAttendRule rule = {
      {{}, &args, tile, position, out + tile.first * wide + head.query + channel, wide, channels, false, faults},
      shares,
      l,
      head.query / args.head_dim,
      (args.stride - 1) / (int32_t)kBlock + 1};
  BroadFew::run(weights, vectors, rule, first_seen(position, args.window) / (int32_t)kChunk * (int32_t)kChunk,
                position + tile.count, (float*)(Quad*)shared);
}
