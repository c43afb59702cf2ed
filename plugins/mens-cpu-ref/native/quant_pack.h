// File blocks to the packed form, and rows of the packed form back to float32.
#pragma once
#include <stdint.h>

namespace vox {
namespace quant {

struct PackTask {
  int32_t format;
  const uint8_t* file;
  int64_t rows, columns;
  uint8_t* packed;
};
// Parts are groups of 16 rows; a fault is a row with a scale that is not finite.
int64_t pack_part(const void* task, int64_t begin, int64_t end, void*);

struct RowsTask {
  int32_t format;
  const uint8_t* packed;
  int64_t rows, columns;
  const int32_t* ids;
  float scale;
  float* out;
};
// Parts are the ids.
int64_t rows_part(const void* task, int64_t begin, int64_t end, void*);

}  // namespace quant
}  // namespace vox
