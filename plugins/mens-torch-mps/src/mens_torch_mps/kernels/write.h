// Writes what came with the command itself: a few words from the host, in the order of the commands, without
// waiting for those before. words[0] is how many follow.
VOX_KERNEL(vox_write_words)(VOX_OUT(uint32_t, out, 0), constant uint32_t* words [[buffer(1)]],
                            uint3 vox_thread [[thread_position_in_grid]]) {
  if (vox_thread.x < words[0]) out[vox_thread.x] = words[1 + vox_thread.x];
}
