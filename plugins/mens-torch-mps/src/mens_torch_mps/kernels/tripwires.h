// One operation each, on operands that tell apart what a compiler or a GPU may do to it (mens_torch_mps.tripwires
// has the operands and what must come out). They come at run time, and each operation is alone in its kernel:
// nothing is computed beforehand, and none is another's neighbour.
#define VOX_TRIPWIRE(name, expression)                                               \
  VOX_KERNEL(vox_tripwire_##name)(VOX_IN(float, operands, 0), VOX_OUT(float, out, 1), \
                                  VOX_ARGS(RowArgs, 2)) {                            \
    if (VOX_THREAD_X >= args.width) return;                                          \
    const float a = operands[0], b = operands[1], c = operands[2];                   \
    (void)b, (void)c;                                                                \
    out[VOX_THREAD_X] = expression;                                                  \
  }
VOX_TRIPWIRE(product_and_sum, f_add(f_mul(a, b), c))
VOX_TRIPWIRE(two_sums, f_add(f_add(a, b), c))
VOX_TRIPWIRE(sum_less_term, f_sub(f_add(a, b), c))
VOX_TRIPWIRE(fma, f_fma(a, b, c))
VOX_TRIPWIRE(product, f_mul(a, b))
VOX_TRIPWIRE(quotient, f_div(a, b))
VOX_TRIPWIRE(root, f_sqrt(a))
#undef VOX_TRIPWIRE
