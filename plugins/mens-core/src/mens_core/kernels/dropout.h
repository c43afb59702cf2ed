// Dropout: Philox words decide, so that an element's fate depends on where it is and nothing else.
#pragma once
#include "definitions_update.h"
#include "ends.h"
#include "transpose.h"
#include "update_tasks.h"

namespace vox {
namespace VOX_ISA {

// Both halves of the 64-bit products of sixteen words with one.
CANON WordProduct<VI> multiply_words(VI a, uint32_t by) {
#if defined(VOX_ISA_AVX512)
  const __m512i m = _mm512_set1_epi32((int32_t)by);
  const __m512i even = _mm512_mul_epu32(a.v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), m);
  return {{_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd)},
          {_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))}};
#elif defined(VOX_ISA_AVX2)
  const __m256i m = _mm256_set1_epi32((int32_t)by);
  const __m256i half[2] = {a.v, a.w};
  __m256i high[2], low[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i even = _mm256_mul_epu32(half[i], m), odd = _mm256_mul_epu32(_mm256_srli_epi64(half[i], 32), m);
    high[i] = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low[i] = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  }
  return {{high[0], high[1]}, {low[0], low[1]}};
#else
  WordProduct<VI> product;
  const uint32x2_t m = vdup_n_u32(by);
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t words = vreinterpretq_u32_s32(a.v[i]);
    const uint64x2_t first = vmull_u32(vget_low_u32(words), m), last = vmull_u32(vget_high_u32(words), m);
    product.high.v[i] = vreinterpretq_s32_u32(vcombine_u32(vshrn_n_u64(first, 32), vshrn_n_u64(last, 32)));
    product.low.v[i] = vreinterpretq_s32_u32(vcombine_u32(vmovn_u64(first), vmovn_u64(last)));
  }
  return product;
#endif
}

// Words of sixteen counters from `group` on, in the order of the columns they belong to.
CANON void words_of_columns(const DropoutTask& task, int64_t row, int64_t group, float* words) {
  const int32_t ascending[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto place = (int32_t)dropout_place((uint32_t)task.examples[row], (uint32_t)group);
  const Words<VI> counter = {{i_splat(task.positions[row]), i_add(i_splat(place), i_load(ascending)),
                              i_splat((int32_t)task.stream), i_splat((int32_t)task.step)}};
  const Words<VI> random = philox<VF>(counter, task.seed_low, task.seed_high);
  float by_word[4 * kLanes];
  for (int i = 0; i < 4; ++i) f_store(by_word + i * kLanes, f_from(random.word[i]));
  for (int i = 0; i < kLanes; i += 4) transpose_four(by_word + i, kLanes, words + 4 * i, 4);
}

static int64_t dropout_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const DropoutTask*>(opaque);
  const VF factor = f_splat(task.factor);
  const VI threshold = i_splat((int32_t)task.threshold);
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    const float* x = task.x + r * task.width;
    float* out = task.out + r * task.width;
    FiniteWatch watch;
    for (int64_t first = 0; first < task.width; first += 4 * kLanes) {
      float words[4 * kLanes];
      words_of_columns(task, r, first / 4, words);
      for (int64_t i = 0; i < 4 * kLanes && first + i < task.width; i += kLanes) {
        const int64_t left = task.width - first - i, count = left < kLanes ? left : kLanes;
        const VF y = dropped(load_up_to(x + first + i, count), f_bits(f_load(words + i)), threshold, factor);
        store_watched(out + first + i, y, count, watch);
      }
    }
    if (!watch.saw_only_finite() && fault == 0) fault = 1 + r;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
