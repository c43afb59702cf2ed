// Writes what came with the command itself: a few words from the host, in the order of the commands, without
// waiting for those before. words[0] is how many follow.
VOX_KERNEL(vox_write_words)(VOX_OUT(uint32_t, out, 0), constant uint32_t* words [[buffer(1)]],
                            uint3 vox_thread [[thread_position_in_grid]]) {
  if (vox_thread.x < words[0]) out[vox_thread.x] = words[1 + vox_thread.x];
}

// Moves words on the GPU: flags of rows to the other results of a step, to be read with them.
VOX_KERNEL(vox_copy_words)(VOX_IN(uint32_t, words, 0), VOX_OUT(uint32_t, out, 1), VOX_ARGS(RowArgs, 2)) {
  if (VOX_THREAD_X < args.width) out[VOX_THREAD_X] = words[VOX_THREAD_X];
}
