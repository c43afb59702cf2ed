// A recorded sequence of operators as one plan: called one by one they only note their work, then all of
// it runs. What they compute, and in which order an output is summed, stays theirs.
#include "abi.h"

#include <string.h>

#include <initializer_list>
#include <new>
#include <vector>

#include "plan.h"
#include "quant_abi.h"
#include "quant_formats.h"
#include "quant_table.h"
#include "tasks.h"
#include "update_abi.h"

namespace {

// One operator of the recording; `docs` of the fields are in abi.h.
struct Operation {
  int64_t kind, joins;
  int64_t x, y, out;
  int64_t a[11];
};
static_assert(sizeof(Operation) == VOX_OPERATION_WORDS * sizeof(int64_t));

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

float f32(int64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  float f;
  memcpy(&f, &low, 4);
  return f;
}

struct Step {
  const int64_t* buffers;
  int64_t rows;
  const int32_t *positions, *starts, *block_tables;
  int64_t sequences, blocks_per_sequence, blocks;
};

int64_t note(const Operation& op, const Step& s) {
  const int64_t* a = op.a;
  const auto rows_of = [&s](int64_t buffer) { return buffer < 0 ? nullptr : at<float>(s.buffers[buffer]); };
  const auto bytes_of = [&s](int64_t buffer) { return at<uint8_t>(s.buffers[buffer]); };
  float *x = rows_of(op.x), *y = rows_of(op.y), *out = rows_of(op.out);
  const auto i32 = [](int64_t value) { return static_cast<int32_t>(value); };
  switch (op.kind) {
    case VOX_NORM: return vox_norm(x, at<float>(a[0]), s.rows, a[1], a[2], f32(a[3]), out);
    case VOX_ROPE: return vox_rope(x, s.rows, a[0], a[1], at<float>(a[2]), at<int32_t>(a[3]), a[4], s.positions, out);
    case VOX_KV_APPEND:
      return vox_kv_append(x, y, s.rows, a[0], a[1], s.positions, s.starts, s.block_tables, s.sequences,
                           s.blocks_per_sequence, s.blocks, at<float>(a[2]), at<float>(a[3]));
    case VOX_ATTENTION:
      return vox_attention(x, s.rows, a[0], a[1], a[2], s.positions, s.starts, s.block_tables, s.sequences,
                           s.blocks_per_sequence, s.blocks, at<float>(a[3]), at<float>(a[4]), f32(a[5]), a[6],
                           f32(a[7]), out);
    case VOX_ADD: return vox_add(x, y, s.rows, a[0], out);
    case VOX_SILU_GATE: return vox_silu_gate(x, y, s.rows, a[0], out);
    case VOX_GELU_GATE: return vox_gelu_gate(x, y, s.rows, a[0], out);
    case VOX_LINEAR: return vox_linear(i32(a[0]), at<void>(a[1]), a[2], a[3], x, s.rows, out);
    case VOX_QUANT_ACTIVATIONS: return vox_quant_activations(i32(a[0]), x, s.rows, a[1], bytes_of(op.out));
    case VOX_QUANT_LINEAR:
      return vox_quant_linear(i32(a[0]), at<uint8_t>(a[1]), a[2], a[3], bytes_of(op.x), s.rows, out);
    case VOX_ADD_SCALED: return vox_add_scaled(x, y, s.rows, a[0], f32(a[1]), out);
    default: return VOX_OUT_OF_RANGE;
  }
}

// Steps of more rows than this do operators that look at rows alone, and follow one another, sixteen rows at a time:
// as many positions lie in a line of the keys.
constexpr int64_t kChainedFrom = 32;
constexpr int64_t kUnitRows = 16;
static_assert(kUnitRows % vox::kNormRows == 0 && kUnitRows % vox::quant::kPanelRows == 0);

// Parts of the operator's work that are kUnitRows rows; 0: it looks at other rows too, or its parts end within rows.
int64_t share_of(const Operation& op) {
  switch (op.kind) {
    case VOX_NORM: return kUnitRows * op.a[1] / vox::kNormRows;
    case VOX_ROPE:
    case VOX_KV_APPEND: return kUnitRows;
    case VOX_ADD:
    case VOX_SILU_GATE:
    case VOX_GELU_GATE:
      return kUnitRows * op.a[0] % vox::kElementsPerPart == 0 ? kUnitRows * op.a[0] / vox::kElementsPerPart : 0;
    case VOX_QUANT_ACTIVATIONS: return kUnitRows / vox::quant::kPanelRows;
    default: return 0;
  }
}

// Whether nobody reads the buffer from operator i on.
bool is_dead(const Operation* ops, int64_t i, int64_t count, int64_t buffer) {
  constexpr int64_t kOutput = 1;  // of the replay
  if (buffer == kOutput) return false;
  for (; i < count; ++i) {
    if (ops[i].x == buffer || ops[i].y == buffer) return false;
    if (ops[i].out == buffer) return true;
  }
  return true;
}

// Whether operators i to i + 2 are two products of one x and their gate, and nobody else wants the products.
bool is_gated(const Operation* ops, int64_t i, int64_t count) {
  if (i + 2 >= count) return false;
  const Operation &gate = ops[i], &up = ops[i + 1], &last = ops[i + 2];
  if (gate.kind != VOX_QUANT_LINEAR || up.kind != VOX_QUANT_LINEAR) return false;
  if (last.kind != VOX_SILU_GATE && last.kind != VOX_GELU_GATE) return false;
  if (last.x != gate.out || last.y != up.out || gate.out == up.out) return false;
  for (const int64_t product : {gate.out, up.out})
    if (product != last.out && !is_dead(ops, i + 3, count, product)) return false;
  return gate.a[2] == up.a[2];
}

// Notes the operators of a recording, the works of neighbours that look at rows alone as one work.
class Noting {
 public:
  Noting(vox::Plan& plan, const Step& step) : plan_(plan), step_(step) {}

  // Notes the operators from `ops[i]` on that belong together, and moves i behind them.
  int64_t add(const Operation* ops, int64_t count, int64_t* i) {
    if (step_.rows > kChainedFrom && is_gated(ops, *i, count)) {
      const Operation* first = ops + *i;
      *i += 3;
      return add_gated(first[0], first[1], first[2]);
    }
    return add(ops[(*i)++]);
  }
  void end_chain() {
    if (shares_.size() > 1) {
      plan_.chain(first_, shares_, (step_.rows + kUnitRows - 1) / kUnitRows);
      is_behind_joined_ = true;
    }
    shares_.clear();
  }

 private:
  int64_t add(const Operation& op) {
    const int64_t share = step_.rows > kChainedFrom ? share_of(op) : 0;
    if (share == 0) end_chain();
    else if (shares_.empty()) first_ = plan_.works();
    // Behind what was joined stands no group that one could join: some of it may be what this one waits for.
    plan_.join(op.joins != 0 && !is_behind_joined_);
    is_behind_joined_ = false;
    const int64_t code = note(op, step_);
    if (share != 0) shares_.push_back(share);
    return code;
  }
  int64_t add_gated(const Operation& gate, const Operation& up, const Operation& last) {
    const auto product = [this](const Operation& op) -> vox::QuantProduct {
      return {static_cast<int32_t>(op.a[0]), at<uint8_t>(op.a[1]), op.a[2], op.a[3], at<uint8_t>(step_.buffers[op.x])};
    };
    end_chain();
    plan_.join(false);
    is_behind_joined_ = true;
    return vox::run_gated(product(gate), product(up), last.kind == VOX_SILU_GATE, step_.rows,
                          at<float>(step_.buffers[last.out]));
  }

  vox::Plan& plan_;
  const Step& step_;
  std::vector<int64_t> shares_;
  size_t first_ = 0;
  bool is_behind_joined_ = false;
};

}  // namespace

extern "C" int64_t vox_replay(const int64_t* operations, int64_t count, const int64_t* buffers, int64_t rows,
                              const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                              int64_t sequences, int64_t blocks_per_sequence, int64_t blocks) {
  const Step step = {buffers, rows, positions, starts, block_tables, sequences, blocks_per_sequence, blocks};
  const auto* ops = reinterpret_cast<const Operation*>(operations);
  try {
    vox::Plan plan(count);
    Noting noting(plan, step);
    for (int64_t i = 0; i < count;)
      if (const int64_t code = noting.add(ops, count, &i); code != 0) return code;
    noting.end_chain();
    return plan.run();
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
}
