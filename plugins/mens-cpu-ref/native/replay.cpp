// A recorded sequence of operators as one plan: called one by one they only note their work, then all of
// it runs. What they compute, and in which order an output is summed, stays theirs.
#include "abi.h"

#include <string.h>

#include <new>

#include "plan.h"
#include "quant_abi.h"
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

}  // namespace

extern "C" int64_t vox_replay(const int64_t* operations, int64_t count, const int64_t* buffers, int64_t rows,
                              const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                              int64_t sequences, int64_t blocks_per_sequence, int64_t blocks) {
  const Step step = {buffers, rows, positions, starts, block_tables, sequences, blocks_per_sequence, blocks};
  const auto* ops = reinterpret_cast<const Operation*>(operations);
  try {
    vox::Plan plan(count);
    for (int64_t i = 0; i < count; ++i) {
      plan.join(ops[i].joins != 0);
      if (const int64_t code = note(ops[i], step); code != 0) return code;
    }
    return plan.run();
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
}
