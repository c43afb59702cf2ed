// The greatest output of x W^T without all of W: the upper four bits of W bound every output, an output that is
// there is computed as a floor, and of the groups whose bound reaches it all outputs are computed.
//
// What is found is exact: the outputs that are compared are those of quant_linear.h, and a bound is above its output
// whatever either's roundings were (docs/numerics.md, section 10.5).
#pragma once
#include "quant_activations.h"
#include "quant_linear.h"

namespace vox {
namespace VOX_ISA {

using SplitQ8_0 = OfFormat<quant::kQ8_0Upper, CodesQ8_0Halves>;
constexpr quant::Layout kUpper = quant::layout_of(quant::kQ8_0Upper);

// Above it, an estimate could overflow.
constexpr uint32_t kMostActivationScale = 0x5D800000u;  // 2^60
// Above what flushes and the roundings of an estimate can take from twice a bound, beside a share of its radius.
constexpr uint32_t kLeastRadius = 0x1C800000u;  // 2^-70

CANON VF f_magnitude(VF a) { return f_from(i_and(f_bits(a), i_splat(0x7FFFFFFF))); }

// With S = sum of (16 upper + lower - 128) q: lower - 15/2 lies in [-15/2, 15/2], so
// |2 S - (32 sum of upper q - 241 sum of q)| <= 15 sum of |q|.
static quant::Reach reach_of(const quant::Block32& block, const int8_t* q, int64_t blocks) {
  int32_t magnitudes = 0;
  for (int i = 0; i < 32; ++i) magnitudes += q[i] < 0 ? -q[i] : q[i];
  const float most = f_from((int32_t)kMostActivationScale);
  if (!(block.d <= most)) return {block.d, f_from(0x7FC00000), 0};
  // Roundings are below (22.4 blocks + 142) 2^-24 of the radius.
  const float share = f_fma(i_to_f((int32_t)(blocks + 16)), f_from(0x36800000), f_from(0x3F800000));  // 1 + n 2^-18
  return {block.d, f_mul(f_mul(i_to_f(15 * magnitudes), block.d), share), 241 * block.negative_sum};
}

static int64_t lines_of(int64_t blocks) { return 4 * blocks < quant::kChooseLines ? 4 * blocks : quant::kChooseLines; }

static quant::Line line_of(float scale, const int8_t* q, int64_t block, int pair) {
  int32_t sum = 0, magnitudes = 0;
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i) {
      const int32_t code = q[4 * (pair + 4 * half) + i];
      sum += code;
      magnitudes += code < 0 ? -code : code;
    }
  return {(int32_t)block, pair, load_i32(q + 4 * pair), load_i32(q + 4 * (pair + 4)), -15 * sum, scale,
          f_mul(i_to_f(15 * magnitudes), scale)};
}

// The lines of x with the greatest radius, by insertion.
static void choose_lines(const quant::Block32* described, const int8_t* codes, int64_t blocks, quant::Line* lines) {
  const int64_t count = lines_of(blocks);
  int64_t kept = 0;
  for (int64_t b = 0; b < blocks; ++b)
    for (int pair = 0; pair < 4; ++pair) {
      const quant::Line line = line_of(described[b].d, codes + 32 * b, b, pair);
      if (kept == count && !(lines[count - 1].radius < line.radius)) continue;
      int64_t at = kept < count ? kept++ : count - 1;
      for (; at > 0 && lines[at - 1].radius < line.radius; --at) lines[at] = lines[at - 1];
      lines[at] = line;
    }
}

// Parts are rows.
static int64_t choose_prepare_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::ChooseTask*>(opaque);
  const int64_t blocks = task.columns / 32, bytes = quant::activation_bytes(32, 1, task.columns);
  for (int64_t r = begin; r < end; ++r) {
    auto* codes = reinterpret_cast<int8_t*>(task.activations + r * bytes);
    auto* described = reinterpret_cast<quant::Block32*>(task.activations + r * bytes +
                                                        quant::activation_codes_bytes(1, task.columns));
    const quant::ActivationTask row = {32, task.x + r * task.columns, 1, task.columns, codes, described};
    quantise_panel<32, quant::Block32>(row, 0);
    for (int64_t b = 0; b < blocks; ++b) task.reach[r * blocks + b] = reach_of(described[b], codes + 32 * b, blocks);
    choose_lines(described, codes, blocks, task.lines + r * quant::kChooseLines);
  }
  return 0;
}

// One row of x against all of W, as quant_linear.h wants it.
static quant::LinearTask product_of(const quant::ChooseTask& task, int64_t row) {
  const uint8_t* codes = task.activations + row * quant::activation_bytes(32, 1, task.columns);
  return {quant::kQ8_0Upper, task.packed, task.outputs, task.columns, reinterpret_cast<const int8_t*>(codes),
          codes + quant::activation_codes_bytes(1, task.columns), 1, nullptr};
}

// Twice the estimate and twice the radius of a group's outputs, for R rows.
template <int R>
static void estimate_tile(const quant::ChooseTask& task, const uint8_t* group, int64_t row, VF* estimate, VF* radius) {
  const int64_t blocks = task.columns / 32, bytes = quant::activation_bytes(32, 1, task.columns);
  constexpr int ahead = ahead_of(R, 32);
  const uint8_t *record = group, *codes = task.activations + row * bytes;
  const quant::Reach* reach = task.reach + row * blocks;
  for (int r = 0; r < R; ++r) {
    estimate[r] = f_splat(0.0f);
    radius[r] = F_CONST(VF, kLeastRadius);
  }
  for (int64_t first = 0; first < blocks; first += quant::kChunkBlocks) {
    const int64_t in_chunk = blocks - first < quant::kChunkBlocks ? blocks - first : quant::kChunkBlocks;
    const uint8_t* scales = record;
    record += quant::chunk_scale_bytes(in_chunk);
    prefetch_share<ahead>(scales, 128, 0, 1);
    for (int64_t b = 0; b < in_chunk; ++b, record += kUpper.record_bytes, scales += 32, codes += 32, ++reach) {
      VI sum[R];
      for (int r = 0; r < R; ++r) sum[r] = i_splat(0);
      unroll<4>([&](auto g) {
        constexpr int G = decltype(g)::value;
        prefetch_share<ahead>(record, kUpper.record_bytes, G, 4);
        const Bytes pair = load_bytes(record + G * quant::kKGroupBytes);
        const Bytes low = low_nibbles(pair), high = high_nibbles(pair);
        for (int r = 0; r < R; ++r) {
          sum[r] = dot_codes(sum[r], low, load_i32(codes + r * bytes + 4 * G));
          sum[r] = dot_codes(sum[r], high, load_i32(codes + r * bytes + 4 * (G + 4)));
        }
      });
      const VF d = load_scales(scales), magnitude = f_magnitude(d);
      for (int r = 0; r < R; ++r) {
        const quant::Reach& x = reach[r * blocks];
        const VI twice = i_add(i_shl<5>(sum[r]), i_splat(x.offset));
        estimate[r] = block_chained(estimate[r], d, f_splat(x.scale), twice);
        radius[r] = f_fma(magnitude, f_splat(x.radius), radius[r]);
      }
    }
  }
}

static float greatest_lane(VF a) {
  float lanes[kLanes];
  f_store(lanes, a);
  float m = lanes[0];
  for (int i = 1; i < kLanes; ++i) m = f_max(m, lanes[i]);
  return m;
}

template <int R>
static void bound_rows(const quant::ChooseTask& task, int64_t group, int64_t row, quant::Best* best) {
  const int64_t groups = quant::groups_of(task.outputs);
  VF estimate[R], radius[R];
  estimate_tile<R>(task, task.packed + group * quant::group_bytes(kUpper, task.columns / 32), row, estimate, radius);
  for (int r = 0; r < R; ++r) {
    f_store(task.bounds + ((row + r) * groups + group) * kLanes, f_add(estimate[r], radius[r]));
    const float highest = greatest_lane(estimate[r]);
    if (best[row + r].id < 0 || best[row + r].value < highest) best[row + r] = {highest, (int32_t)group};
  }
}

// Parts are kChooseGroups groups: bounds of all rows, and the highest estimate.
static int64_t choose_bound_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::ChooseTask*>(opaque);
  const int64_t groups = quant::groups_of(task.outputs);
  for (int64_t part = begin; part < end; ++part) {
    quant::Best* best = task.estimates + part * task.rows;
    for (int64_t r = 0; r < task.rows; ++r) best[r] = {0.0f, -1};
    const int64_t first = part * quant::kChooseGroups;
    const int64_t last = first + quant::kChooseGroups < groups ? first + quant::kChooseGroups : groups;
    for (int64_t group = first; group < last; ++group) {
      int64_t r = 0;
      for (; r + 4 <= task.rows; r += 4) bound_rows<4>(task, group, r, best);
      for (; r + 2 <= task.rows; r += 2) bound_rows<2>(task, group, r, best);
      if (r < task.rows) bound_rows<1>(task, group, r, best);
    }
  }
  return 0;
}

static bool reaches(const float* bounds, float floor) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= bounds[i] >= floor;
  return any;
}

// Where a line of a group's lower half is, and the scales of its block.
struct LinePlace {
  const uint8_t *codes, *scales;
};
CANON LinePlace place_of_line(const quant::ChooseTask& task, const quant::Line& line, int64_t group) {
  const int64_t blocks = task.columns / 32;
  return {task.packed + quant::lower_of(kUpper, task.outputs, blocks, group) + line.block * kUpper.lower_bytes +
              line.pair * quant::kKGroupBytes,
          task.packed + group * quant::group_bytes(kUpper, blocks) + quant::place_of(kUpper, blocks, line.block).scales};
}
static void prefetch_lines(const quant::ChooseTask& task, int64_t row, int64_t group) {
  const int64_t count = lines_of(task.columns / 32);
  for (int64_t i = 0; i < count; ++i) {
    const LinePlace place = place_of_line(task, task.lines[row * quant::kChooseLines + i], group);
    prefetch(place.codes);
    prefetch(place.scales);
  }
}

// Whether a group's bounds still reach the floor when a few lines of its lower half take the place of their radius.
static bool still_reaches(const quant::ChooseTask& task, int64_t row, int64_t group, const float* bounds, float floor) {
  const int64_t count = lines_of(task.columns / 32);
  VF bound = f_load(bounds);
  for (int64_t i = 0; i < count; ++i) {
    const quant::Line& line = task.lines[row * quant::kChooseLines + i];
    const LinePlace place = place_of_line(task, line, group);
    const Bytes codes = load_bytes(place.codes);
    VI sum = dot_codes(i_splat(0), low_nibbles(codes), line.low);
    sum = dot_codes(sum, high_nibbles(codes), line.high);
    const VF d = load_scales(place.scales);
    bound = block_chained(bound, d, f_splat(line.scale), i_add(i_shl<1>(sum), i_splat(line.offset)));
    bound = f_fnma(f_magnitude(d), f_splat(line.radius), bound);
  }
  float lanes[kLanes];
  f_store(lanes, bound);
  return reaches(lanes, floor);
}

// The outputs of a group, of which `best` keeps the greatest: the first of equal ones, where groups ascend.
static void choose_in_group(const quant::ChooseTask& task, const quant::LinearTask& product, int64_t group,
                            quant::Best* best) {
  const int64_t blocks = task.columns / 32;
  VF y[1];
  tile32<SplitQ8_0, 1>(task.packed + group * quant::group_bytes(kUpper, blocks),
                       task.packed + quant::lower_of(kUpper, task.outputs, blocks, group), blocks, product, 0, y);
  float lanes[kLanes];
  f_store(lanes, y[0]);
  for (int64_t i = 0; i < kLanes && group * kLanes + i < task.outputs; ++i)
    if (best->id < 0 || best->value < lanes[i]) *best = {lanes[i], (int32_t)(group * kLanes + i)};
}

// Parts are rows: the greatest output of the group whose estimate is the highest.
static int64_t choose_floor_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::ChooseTask*>(opaque);
  const int64_t groups = quant::groups_of(task.outputs);
  const int64_t parts = (groups + quant::kChooseGroups - 1) / quant::kChooseGroups;
  for (int64_t r = begin; r < end; ++r) {
    quant::Best highest = task.estimates[r], found = {0.0f, -1};
    for (int64_t part = 1; part < parts; ++part)
      if (const quant::Best& other = task.estimates[part * task.rows + r]; highest.value < other.value) highest = other;
    choose_in_group(task, product_of(task, r), highest.id, &found);
    task.floors[r] = f_add(found.value, found.value);  // as bounds are, twice
  }
  return 0;
}

// Parts are kChooseGroups groups: the greatest output among the groups whose bound reaches the floor.
static int64_t choose_search_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::ChooseTask*>(opaque);
  const int64_t groups = quant::groups_of(task.outputs);
  for (int64_t part = begin; part < end; ++part) {
    const int64_t first = part * quant::kChooseGroups;
    const int64_t last = first + quant::kChooseGroups < groups ? first + quant::kChooseGroups : groups;
    int64_t searched = 0;
    for (int64_t r = 0; r < task.rows; ++r) {
      const quant::LinearTask product = product_of(task, r);
      const float floor = task.floors[r];
      const float* bounds = task.bounds + r * groups * kLanes;
      // Few groups are looked at, far from one another: what the next ones need is asked for beforehand.
      constexpr int kReachAhead = 2;
      int64_t reaching[quant::kChooseGroups], count = 0;
      for (int64_t group = first; group < last; ++group)
        if (reaches(bounds + group * kLanes, floor)) reaching[count++] = group;
      for (int64_t i = 0; i < count && i < kReachAhead; ++i) prefetch_lines(task, r, reaching[i]);
      quant::Best found = {0.0f, -1};
      for (int64_t i = 0; i < count; ++i) {
        if (i + kReachAhead < count) prefetch_lines(task, r, reaching[i + kReachAhead]);
        if (!still_reaches(task, r, reaching[i], bounds + reaching[i] * kLanes, floor)) continue;
        choose_in_group(task, product, reaching[i], &found);
        ++searched;
      }
      task.found[part * task.rows + r] = found;
    }
    task.searched[part] = searched;
  }
  return 0;
}

// --- the greatest of all outputs -----------------------------------------------------------

// The greatest lane's output, of equal ones the lowest id.
static quant::Best best_lane(const float* values, const float* groups) {
  quant::Best best = {values[0], f_bits(groups[0]) * quant::kGroupRows};
  for (int i = 1; i < kLanes; ++i) {
    const int32_t id = f_bits(groups[i]) * quant::kGroupRows + i;
    if (best.value < values[i] || (best.value == values[i] && id < best.id)) best = {values[i], id};
  }
  return best;
}

// Parts are kGreatestGroups groups.
static int64_t greatest_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::GreatestTask*>(opaque);
  const int64_t rows = task.product.rows, groups = quant::groups_of(task.product.outputs);
  quant::Highest highest;
  quant::LinearTask product = task.product;
  product.highest = &highest;
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t first = part * quant::kGreatestGroups;
    const int64_t last = first + quant::kGreatestGroups < groups ? first + quant::kGreatestGroups : groups;
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < kLanes; ++i) highest.values[r][i] = f_from((int32_t)0xFF800000), highest.groups[r][i] = 0.0f;
    const int64_t found = quant_linear_part(&product, first, last, nullptr);
    if (found != 0 && (fault == 0 || found < fault)) fault = found;
    for (int64_t r = 0; r < rows; ++r) task.found[part * rows + r] = best_lane(highest.values[r], highest.groups[r]);
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
