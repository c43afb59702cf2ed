// The constants of each grid kernel: fields of four bytes, so that a host packs them without padding.
#pragma once
#include "../sizes.h"

namespace vox {

enum { kGroup = 128 };  // threads of a group, in every kernel

struct ElementwiseArgs {  // thread (element of a row, row)
  int32_t width;
  float cap;  // of softcap
};

struct FunctionArgs {  // thread element
  int32_t elements;
  int32_t which;  // 0 exp, 1 log, 2 silu, 3 gelu, 4 tanh
};

struct WidenArgs {  // thread element
  int32_t elements;
  int32_t add_one;
  float one;  // told at run time: a compiler drops a multiplication by a 1 it knows, and the flush with it
};

struct EmbedArgs {  // thread (column, row)
  int32_t columns;
  float scale;
};

struct LinearArgs {  // thread (output, row)
  int32_t outputs;
  int32_t columns;
};

struct QuantiseArgs {  // thread (block of a row, row)
  int32_t columns;
};

struct NormArgs {  // group (head, row)
  int32_t heads;
  int32_t width;
  float eps;
};

struct RopeArgs {  // thread (pair of a row's heads, row)
  int32_t heads;
  int32_t pairs;
};

struct KvAppendArgs {  // thread (channel of a row's heads, row)
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_stride;
  int32_t blocks_per_sequence;
};

struct AttentionArgs {  // group (head, row)
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_stride;
  int32_t blocks_per_sequence;
  int32_t window;  // 0: everything before
  float scale;
  float softcap;  // 0: none
};

struct RowArgs {  // group row, or thread (element, row)
  int32_t width;
};

struct PenaliseArgs {  // thread token
  int32_t width;
  int32_t row;
  int32_t count;
};

struct TokenWeightsArgs {  // thread element
  int32_t width;
  int32_t row;
  float temperature;
};

}  // namespace vox
