// Runs every operator as kernel and as reference, compares bytes, and prints one FNV-1a digest of all
// outputs per line. Two machines agree when their lines do; under an emulator it checks an architecture that
// no Python is at hand for. Exit status 1 where kernel and reference differ.
//
//     vox_parity [instruction set]     the best that this machine has, where none is named
//     vox_parity interval              what this machine does just below 2^-126, where no bits are promised
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../abi.h"
#include "../backward_abi.h"
#include "../quant_abi.h"
#include "../update_abi.h"

namespace {

using Floats = std::vector<float>;

uint32_t g_state = 12345;
uint32_t word() { return g_state = g_state * 1664525u + 1013904223u; }
// Exact numbers of very different sizes in (-2, 2).
float number() {
  const float significand = static_cast<float>(static_cast<int32_t>(word() >> 8) - (1 << 23));
  return ldexpf(significand, -22 - static_cast<int>(word() >> 29));
}
Floats numbers(size_t count) {
  Floats x(count);
  for (float& v : x) v = number();
  return x;
}

uint64_t digest(const void* data, size_t bytes, uint64_t h = 1469598103934665603u) {
  for (size_t i = 0; i < bytes; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  return h;
}

bool g_differs = false;

template <class T>
void report(const char* name, const std::vector<T>& kernel, const std::vector<T>& reference, int64_t a, int64_t b) {
  const size_t bytes = kernel.size() * sizeof(T);
  const bool same = a == b && memcmp(kernel.data(), reference.data(), bytes) == 0;
  g_differs = g_differs || !same;
  printf("%-18s %016llx%s\n", name, static_cast<unsigned long long>(digest(kernel.data(), bytes)),
         same ? "" : "  KERNEL AND REFERENCE DIFFER");
}

// Both sides of an operator that writes `count` floats.
template <class Kernel, class Reference>
void compare(const char* name, size_t count, Kernel kernel, Reference reference) {
  Floats k(count), r(count);
  const int64_t a = kernel(k.data()), b = reference(r.data());
  report(name, k, r, a, b);
}
#define COMPARE_SIDES(name, count, kernel, reference) \
  compare(name, count, [&](float* out) { return kernel; }, [&](float* out) { return reference; })
#define COMPARE(name, count, call, ...)                                              \
  compare(name, count, [&](float* out) { return vox_##call(__VA_ARGS__, out); },     \
          [&](float* out) { return ref_##call(__VA_ARGS__, out); })

void linear(int32_t format, int64_t rows) {
  const int64_t outputs = 45, inputs = 651;
  const Floats x = numbers(static_cast<size_t>(rows * inputs));
  std::vector<uint32_t> w(static_cast<size_t>(outputs * inputs));
  for (auto& v : w) v = word();
  if (format == 0) {
    for (auto& v : w) {
      const float f = number();
      memcpy(&v, &f, 4);
    }
  } else {
    auto* halves = reinterpret_cast<uint16_t*>(w.data());
    for (size_t i = 0; i < 2 * w.size(); ++i)
      halves[i] = static_cast<uint16_t>(format == 1 ? (halves[i] & 0xBFFF) : (halves[i] & 0x807F) | 0x3E80);
  }
  std::vector<uint32_t> pk(static_cast<size_t>(48 * inputs)), pr(pk.size());
  vox_pack(format, w.data(), outputs, inputs, pk.data());
  ref_pack(format, w.data(), outputs, inputs, pr.data());
  char name[32];
  snprintf(name, sizeof name, "linear/%d/%d", format, static_cast<int>(rows));
  compare(name, static_cast<size_t>(rows * outputs),
          [&](float* out) { return vox_linear(format, pk.data(), outputs, inputs, x.data(), rows, out); },
          [&](float* out) { return ref_linear(format, pr.data(), outputs, inputs, x.data(), rows, out); });
  const Floats dy = numbers(static_cast<size_t>(rows * outputs));
  snprintf(name, sizeof name, "backward/%d/%d", format, static_cast<int>(rows));
  compare(name, static_cast<size_t>(rows * inputs),
          [&](float* out) { return vox_linear_backward(format, pk.data(), outputs, inputs, dy.data(), rows, out); },
          [&](float* out) { return ref_linear_backward(format, pr.data(), outputs, inputs, dy.data(), rows, out); });
  const int32_t ids[3] = {44, 0, 17};
  snprintf(name, sizeof name, "embed/%d", format);
  compare(name, static_cast<size_t>(3 * inputs),
          [&](float* out) { return vox_embed(format, pk.data(), outputs, inputs, ids, 3, 25.25f, out); },
          [&](float* out) { return ref_embed(format, pr.data(), outputs, inputs, ids, 3, 25.25f, out); });
}

// bf16 in twelve bits a weight beside bf16 as the reference has it: exponents of 16 values, some far from the others.
void compact(int64_t rows) {
  const int64_t outputs = 45, inputs = 651, panels = 3;
  std::vector<uint16_t> w(static_cast<size_t>(outputs * inputs));
  for (auto& v : w) {
    const uint32_t bits = word() >> 8;
    const uint32_t exponent = bits % 61 == 0 ? bits >> 8 & 0xFF : 110 + (bits >> 20 & 15);
    v = static_cast<uint16_t>((bits & 0x807F) | (exponent % 140) << 7);
  }
  std::vector<uint8_t> tables(static_cast<size_t>(16 * panels));
  std::vector<int64_t> kept(static_cast<size_t>(panels)), firsts(kept.size());
  const int64_t code = vox_compact_measure(w.data(), outputs, inputs, tables.data(), kept.data());
  int64_t total = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    firsts[i] = total;
    total += kept[i];
  }
  std::vector<uint8_t> memory(static_cast<size_t>(vox_compact_bytes(outputs, inputs, total)) + 64);
  uint8_t* packed = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  report("compact", kept, kept, code, vox_compact_pack(w.data(), outputs, inputs, tables.data(), firsts.data(), packed));
  std::vector<uint16_t> plain(static_cast<size_t>(48 * inputs));
  ref_pack(2, w.data(), outputs, inputs, plain.data());
  const Floats x = numbers(static_cast<size_t>(rows * inputs)), dy = numbers(static_cast<size_t>(rows * outputs));
  char name[32];
  snprintf(name, sizeof name, "compact/%d", static_cast<int>(rows));
  COMPARE_SIDES(name, static_cast<size_t>(rows * outputs),
                vox_linear(VOX_BF16_COMPACT, packed, outputs, inputs, x.data(), rows, out),
                ref_linear(2, plain.data(), outputs, inputs, x.data(), rows, out));
  const int32_t ids[3] = {44, 0, 17};
  COMPARE_SIDES("compact embed", static_cast<size_t>(3 * inputs),
                vox_embed(VOX_BF16_COMPACT, packed, outputs, inputs, ids, 3, 25.25f, out),
                ref_embed(2, plain.data(), outputs, inputs, ids, 3, 25.25f, out));
  COMPARE_SIDES("compact backward", static_cast<size_t>(rows * inputs),
                vox_linear_backward(VOX_BF16_COMPACT, packed, outputs, inputs, dy.data(), rows, out),
                ref_linear_backward(2, plain.data(), outputs, inputs, dy.data(), rows, out));
}

void attention(int64_t head_dim, int64_t window, float softcap) {
  const int64_t heads = 6, kv_heads = 2, stride = (head_dim + 15) / 16 * 16;
  const int32_t starts[3] = {0, 200, 201}, tables[4] = {2, 0, 1, -1};
  std::vector<int32_t> positions;
  for (int32_t p = 0; p < 200; ++p) positions.push_back(p);
  positions.push_back(100);
  const Floats q = numbers(static_cast<size_t>(201 * heads * head_dim));
  const Floats k = numbers(static_cast<size_t>(201 * kv_heads * head_dim)), v = numbers(k.size());
  Floats keys = numbers(static_cast<size_t>(3 * kv_heads * head_dim * 128));
  Floats values = numbers(static_cast<size_t>(3 * kv_heads * 128 * stride));
  Floats ref_keys = keys, ref_values = values;
  vox_kv_append(k.data(), v.data(), 201, kv_heads, head_dim, positions.data(), starts, tables, 2, 2, 3, keys.data(),
                values.data());
  ref_kv_append(k.data(), v.data(), 201, kv_heads, head_dim, positions.data(), starts, tables, 2, 2, 3,
                ref_keys.data(), ref_values.data());
  report("kv_append", keys, ref_keys, 0, 0);
  report("kv_append", values, ref_values, 0, 0);
  COMPARE("attention", q.size(), attention, q.data(), 201, heads, kv_heads, head_dim, positions.data(), starts, tables,
          2, 2, 3, keys.data(), values.data(), 0.125f, window, softcap);
}

// Two whole sequences, the second of one row; gradients of q, k and v in one array.
void attention_backward(int64_t head_dim, int64_t window, float softcap) {
  const int64_t rows = 201, heads = 6, kv_heads = 2, stride = (head_dim + 15) / 16 * 16;
  const int32_t starts[3] = {0, 200, 201}, tables[4] = {2, 0, 1, -1};
  std::vector<int32_t> positions;
  for (int32_t p = 0; p < 200; ++p) positions.push_back(p);
  positions.push_back(0);
  const size_t queries = static_cast<size_t>(rows * heads * head_dim), width = queries / 3;
  const Floats q = numbers(queries), dy = numbers(queries);
  const Floats keys = numbers(static_cast<size_t>(3 * kv_heads * head_dim * 128));
  const Floats values = numbers(static_cast<size_t>(3 * kv_heads * 128 * stride));
  Floats saved(queries + 2 * static_cast<size_t>(rows * heads));
  const auto saving = [&](auto attention, float* out) {
    return attention(q.data(), rows, heads, kv_heads, head_dim, positions.data(), starts, tables, 2, 2, 3, keys.data(),
                     values.data(), 0.125f, window, softcap, out, out + queries, out + queries + rows * heads);
  };
  compare("attention_saving", saved.size(), [&](float* out) { return saving(vox_attention_saving, out); },
          [&](float* out) { return saving(ref_attention_saving, out); });
  saving(ref_attention_saving, saved.data());
  const float* m = saved.data() + queries;
  const auto backward = [&](auto attention, float* out) {
    return attention(dy.data(), q.data(), saved.data(), m, m + rows * heads, rows, heads, kv_heads, head_dim,
                     positions.data(), starts, tables, 2, 2, 3, keys.data(), values.data(), 0.125f, window, softcap,
                     out, out + queries, out + queries + width);
  };
  compare("attention_backward", queries + 2 * width,
          [&](float* out) { return backward(vox_attention_backward, out); },
          [&](float* out) { return backward(ref_attention_backward, out); });
}

void quantised(int32_t format, int64_t rows) {
  const int64_t outputs = 37, columns = 768;
  std::vector<uint8_t> file(static_cast<size_t>(vox_quant_file_bytes(format, outputs, columns)));
  for (auto& byte : file) byte = static_cast<uint8_t>(word() >> 24);
  const int64_t block = format < 3 ? 32 : 256;
  const size_t sizes[6] = {34, 22, 18, 144, 176, 210}, size = sizes[format];
  // Scales: small positive float16.
  for (size_t at = 0; at < file.size(); at += size) {
    const size_t scale = format == 5 ? at + 208 : at;
    file[scale + 1] = static_cast<uint8_t>(0x10 | (file[scale + 1] & 7));
    if (format == 3 || format == 4) file[at + 3] = static_cast<uint8_t>(0x10 | (file[at + 3] & 7));
  }
  const Floats x = numbers(static_cast<size_t>(rows * columns));
  const auto side = [&](auto pack, auto packed_bytes, auto activation_bytes, auto activations, auto product) {
    return [=, &file, &x](float* out) {
      std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(format, outputs, columns)) + 64);
      std::vector<uint8_t> codes(static_cast<size_t>(activation_bytes(static_cast<int32_t>(block), rows, columns)) + 64);
      pack(format, file.data(), outputs, columns, packed.data());
      activations(static_cast<int32_t>(block), x.data(), rows, columns, codes.data());
      return product(format, packed.data(), outputs, columns, codes.data(), rows, out);
    };
  };
  char name[32];
  snprintf(name, sizeof name, "quantised/%d/%d", format, static_cast<int>(rows));
  compare(name, static_cast<size_t>(rows * outputs),
          side(vox_quant_pack, vox_quant_packed_bytes, vox_quant_activation_bytes, vox_quant_activations,
               vox_quant_linear),
          side(ref_quant_pack, ref_quant_packed_bytes, ref_quant_activation_bytes, ref_quant_activations,
               ref_quant_linear));
  const Floats dy = numbers(static_cast<size_t>(rows * outputs));
  const auto backward = [&](auto pack, auto packed_bytes, auto product) {
    return [=, &file, &dy](float* out) {
      std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(format, outputs, columns)) + 64);
      pack(format, file.data(), outputs, columns, packed.data());
      return product(format, packed.data(), outputs, columns, dy.data(), rows, out);
    };
  };
  snprintf(name, sizeof name, "q backward/%d/%d", format, static_cast<int>(rows));
  compare(name, static_cast<size_t>(rows * columns),
          backward(vox_quant_pack, vox_quant_packed_bytes, vox_quant_linear_backward),
          backward(ref_quant_pack, ref_quant_packed_bytes, ref_quant_linear_backward));
}

// Loss, gradients of parameters and update, on examples of 130, 0 and 71 rows.
void training() {
  const int32_t starts[4] = {0, 130, 130, 201};
  std::vector<int32_t> positions, examples, ids;
  for (int32_t r = 0; r < 201; ++r) {
    positions.push_back(r < 130 ? 3 * r : r);
    examples.push_back(r < 130 ? 0 : 2);
    ids.push_back(static_cast<int32_t>(word() >> 29));
  }
  const Floats a = numbers(201 * 21), b = numbers(201 * 75);
  COMPARE("example_products", 3 * 21 * 75, example_products, a.data(), b.data(), starts, 3, 21, 75);
  COMPARE("example_products", 3 * 21 * 75, example_products, b.data(), a.data(), starts, 3, 75, 21);
  COMPARE("embed_backward", 3 * 8 * 75, embed_backward, b.data(), ids.data(), starts, 3, 8, 75);
  COMPARE("example_sums", 3, example_sums, a.data(), positions.data(), starts, 3);
  COMPARE("scale", b.size(), scale, b.data(), 201, 75, 0.3f);
  COMPARE("add_scaled", 201 * 21, add_scaled, a.data(), b.data(), 201, 21, 0.3f);
  COMPARE("dropout", b.size(), dropout, b.data(), positions.data(), examples.data(), 201, 75, 0x123456789abcdefu, 7u, 9u,
          0x40000000u, 4.0f / 3);
  COMPARE("sum_of_squares", 1, sum_of_squares, b.data(), static_cast<int64_t>(b.size()));
  compare("cross_entropy", 201 * 76,
          [&](float* out) { return vox_cross_entropy(b.data(), ids.data(), 201, 75, out, out + 201); },
          [&](float* out) { return ref_cross_entropy(b.data(), ids.data(), 201, 75, out, out + 201); });
  const float constants[9] = {3e-4f, 0.9f, 0.1f, 0.999f, 1e-3f, 1e-8f, 0.99f, 0.1f, 1e-3f};
  const auto step = [&](auto adamw) {
    return [=, &b](float* out) {
      for (size_t i = 0; i < 3 * 1031; ++i) out[i] = i < 2 * 1031 ? b[i] : b[i] * b[i];
      return adamw(out, b.data() + 5000, out + 1031, out + 2 * 1031, 1, 1031, constants);
    };
  };
  compare("adamw", 3 * 1031, step(vox_adamw), step(ref_adamw));
}

// Elements of a float weight: any bits but infinities and NaNs, subnormals among them.
void widen(int32_t format) {
  std::vector<uint32_t> w(4096);
  for (auto& v : w) v = word() ^ word() >> 13;
  if (format == 0) {
    for (auto& v : w)
      if ((v & 0x7F800000u) == 0x7F800000u) v ^= 0x40000000u;
  } else {
    const uint16_t exponent = format == 1 ? 0x7C00 : 0x7F80;
    auto* halves = reinterpret_cast<uint16_t*>(w.data());
    for (size_t i = 0; i < 2 * w.size(); ++i)
      if ((halves[i] & exponent) == exponent) halves[i] = static_cast<uint16_t>(halves[i] ^ 0x4000);
  }
  const int64_t elements = format == 0 ? 4091 : 8187;
  for (int32_t add_one = 0; add_one < 2; ++add_one) {
    char name[32];
    snprintf(name, sizeof name, "widen/%d/%d", format, add_one);
    COMPARE(name, static_cast<size_t>(elements), widen, format, w.data(), elements, add_one);
  }
}

void rope(int64_t heads, int64_t pairs) {
  std::vector<uint64_t> frequencies;
  for (int64_t i = 0; i < pairs; ++i) {
    frequencies.push_back(static_cast<uint64_t>(word()) << 32 | word());
    frequencies.push_back(0x28be60db9391054aull / static_cast<uint64_t>(1 + 3 * i));
  }
  Floats table(static_cast<size_t>(2 * 128 * 2 * pairs));
  ref_rotary(frequencies.data(), pairs, 0, 1, 0, 128, table.data());
  ref_rotary(frequencies.data(), pairs, 0, 1, 3 * 128, 128, table.data() + 128 * 2 * pairs);
  const int32_t slots[4] = {0, -1, -1, 1}, positions[5] = {0, 1, 127, 384, 500};
  const Floats x = numbers(static_cast<size_t>(5 * heads * 2 * pairs));
  COMPARE("rope", x.size(), rope, x.data(), 5, heads, pairs, table.data(), slots, 4, positions);
}

void quantised_rows(int32_t format) {
  const int64_t rows = 37, columns = 512;
  std::vector<uint8_t> file(static_cast<size_t>(vox_quant_file_bytes(format, rows, columns)));
  for (auto& byte : file) byte = static_cast<uint8_t>(word() >> 24);
  const size_t sizes[6] = {34, 22, 18, 144, 176, 210}, size = sizes[format];
  // Any scale but an infinity or NaN: of both signs, subnormal, large.
  for (size_t at = 0; at < file.size(); at += size) {
    uint8_t* scale = &file[format == 5 ? at + 208 : at];
    if ((scale[1] & 0x7C) == 0x7C) scale[1] ^= 0x40;
    if ((format == 3 || format == 4) && (scale[3] & 0x7C) == 0x7C) scale[3] ^= 0x40;
  }
  const int32_t ids[4] = {36, 0, 16, 15};
  const auto side = [&](auto pack, auto packed_bytes, auto take) {
    return [=, &file](float* out) {
      std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(format, rows, columns)) + 64);
      pack(format, file.data(), rows, columns, packed.data());
      return take(format, packed.data(), rows, columns, ids, 4, 25.25f, out);
    };
  };
  char name[32];
  snprintf(name, sizeof name, "quantised rows/%d", format);
  compare(name, static_cast<size_t>(4 * columns), side(vox_quant_pack, vox_quant_packed_bytes, vox_quant_rows),
          side(ref_quant_pack, ref_quant_packed_bytes, ref_quant_rows));
}

// Q8_0 packed in halves beside Q8_0 as the reference has it, and the greatest output beside all of them.
void halves(int64_t rows) {
  const int64_t outputs = 1037, columns = 96;
  std::vector<uint8_t> file(static_cast<size_t>(vox_quant_file_bytes(0, outputs, columns)));
  for (auto& byte : file) byte = static_cast<uint8_t>(word() >> 24);
  for (size_t at = 0; at < file.size(); at += 34) file[at + 1] = static_cast<uint8_t>(0x10 | (file[at + 1] & 0x83));
  const int64_t upper = vox_quant_packed_bytes(VOX_Q8_0_UPPER, outputs, columns);
  std::vector<uint8_t> packed(static_cast<size_t>(upper + vox_quant_packed_bytes(VOX_Q8_0_LOWER, outputs, columns)));
  vox_quant_pack(VOX_Q8_0_UPPER, file.data(), outputs, columns, packed.data());
  vox_quant_pack(VOX_Q8_0_LOWER, file.data(), outputs, columns, packed.data() + upper);
  std::vector<uint8_t> whole(static_cast<size_t>(ref_quant_packed_bytes(0, outputs, columns)));
  ref_quant_pack(0, file.data(), outputs, columns, whole.data());
  const Floats x = numbers(static_cast<size_t>(rows * columns)), dy = numbers(static_cast<size_t>(rows * outputs));
  std::vector<uint8_t> codes(static_cast<size_t>(vox_quant_activation_bytes(32, rows, columns)) + 64), ref_codes = codes;
  vox_quant_activations(32, x.data(), rows, columns, codes.data());
  ref_quant_activations(32, x.data(), rows, columns, ref_codes.data());
  const auto product = [&](float* out) {
    return ref_quant_linear(0, whole.data(), outputs, columns, ref_codes.data(), rows, out);
  };
  char name[32];
  snprintf(name, sizeof name, "halves/%d", static_cast<int>(rows));
  compare(name, static_cast<size_t>(rows * outputs), [&](float* out) {
    return vox_quant_linear(VOX_Q8_0_UPPER, packed.data(), outputs, columns, codes.data(), rows, out);
  }, product);
  snprintf(name, sizeof name, "halves greatest/%d", static_cast<int>(rows));
  std::vector<int32_t> ids(static_cast<size_t>(rows)), ref_ids = ids;
  std::vector<uint8_t> memory(static_cast<size_t>(vox_quant_choose_bytes(outputs, columns, rows)));
  Floats all(static_cast<size_t>(rows * outputs));
  product(all.data());
  int64_t searched = 0;
  report(name, ids, ref_ids,
         vox_quant_choose(packed.data(), outputs, columns, x.data(), rows, memory.data(), ids.data(), &searched),
         ref_argmax(all.data(), rows, outputs, ref_ids.data()));
  const int32_t some[4] = {1036, 0, 16, 15};
  COMPARE_SIDES("halves rows", size_t{4 * columns},
                vox_quant_rows(VOX_Q8_0_UPPER, packed.data(), outputs, columns, some, 4, 25.25f, out),
                ref_quant_rows(0, whole.data(), outputs, columns, some, 4, 25.25f, out));
  COMPARE_SIDES("halves backward", static_cast<size_t>(rows * columns),
                vox_quant_linear_backward(VOX_Q8_0_UPPER, packed.data(), outputs, columns, dy.data(), rows, out),
                ref_quant_linear_backward(0, whole.data(), outputs, columns, dy.data(), rows, out));
}

void choose() {
  const int64_t width = 5003;
  Floats x = numbers(3 * width);
  for (int64_t i = 0; i < width; ++i) x[static_cast<size_t>(2 * width + i)] = i % 2 == 0 ? 0.0f : -0.0f;
  x[static_cast<size_t>(width + 700)] = x[static_cast<size_t>(width + 4999)] = 3.0f;
  std::vector<int32_t> best(3), ref_best(3);
  report("argmax", best, ref_best, vox_argmax(x.data(), 3, width, best.data()),
         ref_argmax(x.data(), 3, width, ref_best.data()));
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < width; i += 3) ids.push_back(i);
  Floats repetition = numbers(ids.size());
  for (float& r : repetition) r = 0.5f + fabsf(r);
  const Floats subtract = numbers(ids.size());
  Floats kernel(x.begin(), x.begin() + width), reference = kernel;
  const int64_t count = static_cast<int64_t>(ids.size());
  report("penalise", kernel, reference,
         vox_penalise(kernel.data(), width, ids.data(), count, repetition.data(), subtract.data()),
         ref_penalise(reference.data(), width, ids.data(), count, repetition.data(), subtract.data()));
}

// docs/numerics.md, ground rule 1: a product whose exact value is 2^-126 (1 - 2^-26). No bits are promised.
int interval() {
  const float scale[1] = {(1 + 0x1p-13f) * 0x1p-63f};
  const float weight[1] = {(1 - 0x1p-13f) * 0x1p-63f};
  float packed[16] = {}, kernel[1], reference[1];
  const int32_t id = 0;
  vox_pack(0, weight, 1, 1, packed);
  vox_embed(0, packed, 1, 1, &id, 1, scale[0], kernel);
  ref_pack(0, weight, 1, 1, packed);
  ref_embed(0, packed, 1, 1, &id, 1, scale[0], reference);
  uint32_t bits[2];
  memcpy(&bits[0], kernel, 4);
  memcpy(&bits[1], reference, 4);
  printf("kernel %08x, reference %08x\n", bits[0], bits[1]);
  return 0;
}

void functions() {
  const char* const names[5] = {"exp", "log", "silu", "gelu", "tanh"};
  Floats x;
  for (uint32_t bits = 0; bits < 0xFFFF0000u; bits += 9973u * 16) {
    float v;
    memcpy(&v, &bits, 4);
    if (isfinite(v)) x.push_back(v);
  }
  for (int32_t which = 0; which < 5; ++which) {
    Floats some;
    for (float v : x)
      if ((which != 0 || v <= 88.0f) && (which != 1 || v >= 0x1p-126f)) some.push_back(v);
    COMPARE(names[which], some.size(), function, which, some.data(), static_cast<int64_t>(some.size()));
  }
}

}  // namespace

int main(int, char** argv) {
  if (argv[1] != nullptr && strcmp(argv[1], "interval") == 0) return interval();
  if (vox_force_isa(argv[1] == nullptr ? "" : argv[1]) != 0 || vox_isa()[0] == '\0') {
    fprintf(stderr, "this instruction set is not here\n");
    return 2;
  }
  fprintf(stderr, "instruction set: %s\n", vox_isa());
  vox_set_threads(2);
  functions();
  for (int32_t format = 0; format < 3; ++format)
    for (int64_t rows : {1, 5, 30}) linear(format, rows);
  for (int64_t rows : {1, 5, 30}) compact(rows);
  for (int32_t format = 0; format < 6; ++format)
    for (int64_t rows : {1, 2, 7}) quantised(format, rows);
  attention(40, 0, 0.0f);
  attention(136, 70, 0.0f);
  attention(64, 0, 20.0f);
  for (int32_t format = 0; format < 6; ++format) quantised_rows(format);
  for (int64_t rows : {1, 2, 7}) halves(rows);
  for (int32_t format = 0; format < 3; ++format) widen(format);
  rope(3, 20);
  rope(1, 128);
  choose();
  const Floats a = numbers(9 * 1031), b = numbers(9 * 1031), w = numbers(1031);
  COMPARE("norm", a.size(), norm, a.data(), w.data(), 9, 1, 1031, 1e-6f);
  COMPARE("norm/heads", size_t{3 * 3 * 1031}, norm, a.data(), w.data(), 3, 3, 1031, 1e-6f);
  COMPARE("add", a.size(), add, a.data(), b.data(), 9, 1031);
  COMPARE("silu_gate", a.size(), silu_gate, a.data(), b.data(), 9, 1031);
  COMPARE("gelu_gate", a.size(), gelu_gate, a.data(), b.data(), 9, 1031);
  COMPARE("softcap", a.size(), softcap, a.data(), 9, 1031, 0.75f);
  attention_backward(40, 0, 0.0f);
  attention_backward(136, 70, 0.0f);
  attention_backward(64, 0, 20.0f);
  const Floats dy = numbers(a.size());
  COMPARE("norm_backward", a.size(), norm_backward, dy.data(), a.data(), w.data(), 9, 1, 1031, 1e-6f);
  COMPARE("softcap_backward", a.size(), softcap_backward, dy.data(), a.data(), 9, 1031, 0.75f);
  const auto gates = [&](auto backward) {
    return [&, backward](float* out) {
      return backward(dy.data(), a.data(), b.data(), 9, 1031, out, out + a.size());
    };
  };
  compare("silu_gate_backward", 2 * a.size(), gates(vox_silu_gate_backward), gates(ref_silu_gate_backward));
  compare("gelu_gate_backward", 2 * a.size(), gates(vox_gelu_gate_backward), gates(ref_gelu_gate_backward));
  const Floats angles = numbers(128 * 2 * 20);
  const int32_t slots[1] = {0}, places[3] = {0, 5, 127};
  COMPARE("rope_backward", 3 * 4 * 40, rope_backward, a.data(), 3, 4, 20, angles.data(), slots, 1, places);
  COMPARE("log_normaliser", 9, log_normaliser, a.data(), 9, 1031);
  training();
  const uint64_t frequencies[6] = {0x7f09d5f47d4d3770u, 0x28be60db9391054au, 0x1234567u, 0x123456789abcdu,
                                   0xa09a1a14357au,     0x2f9794e242f2u};
  COMPARE("rotary", 128 * 2 * 3, rotary, frequencies, 3, 0, 1, 1 << 20, 128);
  std::vector<uint64_t> weights(1031), ref_weights(1031);
  report("token_weights", weights, ref_weights, vox_token_weights(a.data(), 1031, 0.7f, weights.data()),
         ref_token_weights(a.data(), 1031, 0.7f, ref_weights.data()));
  return g_differs ? 1 : 0;
}
