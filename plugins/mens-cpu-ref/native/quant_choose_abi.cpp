// The C ABI of the greatest output: of all of them, or by a search, its working memory and its four rounds as one plan.
#include "plan.h"
#include "quant_abi.h"
#include "quant_formats.h"
#include "quant_kernels.h"
#include "quant_table.h"

#include <new>
#include <vector>

namespace {

using namespace vox::quant;

constexpr int64_t kAlignment = 64;

struct Sizes {
  int64_t blocks, groups, parts;
  Sizes(int64_t outputs, int64_t columns)
      : blocks(columns / 32),
        groups(groups_of(outputs)),
        parts((groups + kChooseGroups - 1) / kChooseGroups) {}
};

// Gives out pieces of the working memory, or only counts them.
struct Carver {
  uint8_t* memory;
  int64_t taken = 0;
  template <class Element>
  void take(Element** to, int64_t count) {
    *to = reinterpret_cast<Element*>(memory + taken);
    taken += (count * static_cast<int64_t>(sizeof(Element)) + kAlignment - 1) / kAlignment * kAlignment;
  }
};

int64_t carve(ChooseTask& task, uint8_t* memory) {
  const Sizes sizes(task.outputs, task.columns);
  Carver carver{memory};
  carver.take(&task.activations, task.rows * activation_bytes(32, 1, task.columns));
  carver.take(&task.reach, task.rows * sizes.blocks);
  carver.take(&task.lines, task.rows * kChooseLines);
  carver.take(&task.bounds, task.rows * sizes.groups * kGroupRows);
  carver.take(&task.estimates, task.rows * sizes.parts);
  carver.take(&task.floors, task.rows);
  carver.take(&task.found, task.rows * sizes.parts);
  carver.take(&task.searched, sizes.parts);
  return carver.taken;
}

bool is_possible(int64_t outputs, int64_t columns, int64_t rows) {
  return outputs > 0 && columns > 0 && columns % 32 == 0 && rows > 0;
}

int64_t search(const ChooseTask& task) {
  const vox::QuantKernels& kernels = vox::quant_kernels_in_use();
  const Sizes sizes(task.outputs, task.columns);
  vox::Plan plan(3);
  vox::Work bounds(kernels.choose_bound, &task, sizes.parts, kChooseGroups * task.columns * (8 + 2 * task.rows) / 16);
  bounds.reads(task.packed, kChooseGroups * group_bytes(layout_of(kQ8_0Upper), sizes.blocks));
  vox::run(bounds);
  vox::run({kernels.choose_floor, &task, task.rows, task.columns * 2});
  // How much of it there is to do is not known; most parts have nothing.
  vox::run({kernels.choose_search, &task, sizes.parts, 8000 * task.rows});
  return plan.run();
}

}  // namespace

extern "C" {

int64_t vox_quant_choose_bytes(int64_t outputs, int64_t columns, int64_t rows) {
  if (!is_possible(outputs, columns, rows)) return -1;
  ChooseTask task{};
  task.outputs = outputs;
  task.columns = columns;
  task.rows = rows;
  return carve(task, nullptr);
}

int64_t vox_quant_choose(const uint8_t* packed, int64_t outputs, int64_t columns, const float* x, int64_t rows,
                         uint8_t* memory, int32_t* ids, int64_t* searched) {
  if (!is_possible(outputs, columns, rows)) return VOX_OUT_OF_RANGE;
  ChooseTask task{};
  task.packed = packed;
  task.outputs = outputs;
  task.columns = columns;
  task.x = x;
  task.rows = rows;
  carve(task, memory);
  const Sizes sizes(outputs, columns);
  *searched = 0;
  for (int64_t r = 0; r < rows; ++r) ids[r] = -1;
  if (const int64_t code = vox::run({vox::quant_kernels_in_use().choose_prepare, &task, rows, columns}); code != 0)
    return code;
  for (int64_t i = 0; i < rows * sizes.blocks; ++i)
    if (!(task.reach[i].radius >= 0.0f)) return 0;
  try {
    if (const int64_t code = search(task); code != 0) return code;
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
  for (int64_t part = 0; part < sizes.parts; ++part) {
    *searched += task.searched[part];
    for (int64_t r = 0; r < rows; ++r) {
      const Best& found = task.found[part * rows + r];
      if (found.id < 0) continue;
      Best& best = task.found[r];
      if (best.id < 0 || best.value < found.value) best = found;
    }
  }
  for (int64_t r = 0; r < rows; ++r) ids[r] = task.found[r].id;
  return 0;
}

int64_t vox_quant_greatest(int32_t format, const uint8_t* packed, int64_t outputs, int64_t columns,
                           const uint8_t* activations, int64_t rows, int32_t* ids) {
  const Layout layout = layout_of(format);
  if (layout.block == 0 || outputs <= 0 || columns <= 0 || columns % layout.block != 0 || rows <= 0 || rows > kHighestRows)
    return VOX_OUT_OF_RANGE;
  const int64_t parts = (groups_of(outputs) + kGreatestGroups - 1) / kGreatestGroups;
  try {
    std::vector<Best> found(static_cast<size_t>(parts * rows));
    const GreatestTask task = {{format, packed, outputs, columns, reinterpret_cast<const int8_t*>(activations),
                                activations + activation_codes_bytes(rows, columns), rows, nullptr},
                               found.data()};
    vox::Work work(vox::quant_kernels_in_use().greatest, &task, parts, kGreatestGroups * columns * (16 + 2 * rows) / 16);
    work.reads(packed, kGreatestGroups * group_bytes(layout, columns / layout.block));
    if (const int64_t code = vox::run(work); code != 0) return code;
    for (int64_t r = 0; r < rows; ++r) {
      Best best = found[static_cast<size_t>(r)];
      for (int64_t part = 1; part < parts; ++part)
        if (const Best& other = found[static_cast<size_t>(part * rows + r)]; best.value < other.value) best = other;
      ids[r] = best.id;
    }
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
  return 0;
}
}
