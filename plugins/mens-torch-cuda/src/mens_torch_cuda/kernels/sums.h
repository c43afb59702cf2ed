// Sums over many tensors, or over many examples, in one launch.

namespace vox {
namespace VOX_ISA {

// The aligned tree over 2^Levels neighbours: left + right.
template <int Levels>
struct TreeOf {
  CANON float sum(const float* leaf, int64_t stride) {
    return f_add(TreeOf<Levels - 1>::sum(leaf, stride),
                 TreeOf<Levels - 1>::sum(leaf + (stride << (Levels - 1)), stride));
  }
};
template <>
struct TreeOf<0> {
  CANON float sum(const float* leaf, int64_t) { return *leaf; }
};

struct TreeArgs {  // thread element
  int32_t rows;
  int32_t width;
  int32_t stride;  // elements from one leaf to the next
};

struct ManyArgs {  // group (kGroup chunks, tensor), or group tensor
  int32_t most;  // chunks of the largest tensor
};

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_TREE(name, Levels)                                                                                   \
  VOX_KERNEL(name)(VOX_IN(float, leaves, 0), VOX_OUT(float, out, 1), VOX_OUT(int32_t, faults, 2),                \
                   VOX_ARGS(TreeArgs, 3)) {                                                                      \
    const int64_t at = VOX_THREAD_X;                                                                             \
    if (at >= (int64_t)args.rows * args.width) return;                                                           \
    const float y = TreeOf<Levels>::sum(leaves + at, args.stride);                                               \
    out[at] = y;                                                                                                 \
    VOX_WATCH(y, at / args.width);                                                                               \
  }
VOX_TREE(vox_tree_2, 1)
VOX_TREE(vox_tree_4, 2)
VOX_TREE(vox_tree_8, 3)
#undef VOX_TREE

// vox_chunk_squares of tensors that lie in one buffer: `places` has the first element of each and how many it has.
VOX_KERNEL(vox_many_squares)(VOX_IN(float, x, 0), VOX_IN(int32_t, places, 1), VOX_OUT(float, out, 2),
                             VOX_ARGS(ManyArgs, 3)) {
  VOX_SHARED float pieces[kPieces];
  const int64_t first = VOX_GROUP_X * kGroup, width = places[VOX_GROUP_Y * 2 + 1];
  if (first * kChunk >= width) return;
  const float p = chunk_of_group<SumOfSquares>(x + places[VOX_GROUP_Y * 2], width, first, pieces, VOX_LOCAL);
  if ((first + VOX_LOCAL) * kChunk < width) out[VOX_GROUP_Y * args.most + first + VOX_LOCAL] = p;
}

// vox_chunks_folded of each; a tensor has four flags, of which a fault sets the first.
VOX_KERNEL(vox_many_folded)(VOX_IN(float, chunks, 0), VOX_IN(int32_t, places, 1), VOX_OUT(float, out, 2),
                            VOX_OUT(int32_t, faults, 3), VOX_ARGS(ManyArgs, 4)) {
  VOX_SHARED float shared[kGroup];
  const int64_t tensor = VOX_GROUP_X;
  const int32_t count = (places[tensor * 2 + 1] - 1) / (int32_t)kChunk + 1;
  const float y = chunks_folded(chunks + tensor * args.most, count, shared, VOX_LOCAL);
  if (VOX_LOCAL != 0) return;
  out[tensor] = y;
  VOX_WATCH(y, tensor * 4);
}
