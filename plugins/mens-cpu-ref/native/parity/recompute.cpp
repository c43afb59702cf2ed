// Repeats a capture of native calls (mens_cpu_ref/capture.py): a model's steps, on any machine this library
// runs on, without Python. Every value an operator makes is compared with the captured digest.
//
//     vox_recompute FOLDER [instruction set | reference]
//
// Prints the SHA-256 of each value that the capture names (logits, tokens). Exit status: 0 all as captured, 1 some
// operator differs (the first ones are named on stderr), 2 the capture can't be read.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../abi.h"
#include "../quant_abi.h"
#include "sha256.h"

namespace {

struct Release {
  void operator()(void* memory) const { free(memory); }
};
struct Value {
  std::shared_ptr<void> owned;
  void* bytes = nullptr;
  size_t size = 0;
};

[[noreturn]] void refuse(const std::string& what) {
  std::cerr << "error: " << what << "; the recompute was not finished\n";
  exit(2);
}

Value new_value(size_t size) {
  Value value;
  const size_t room = (size + 127) / 64 * 64;
  value.bytes = aligned_alloc(64, room);
  if (value.bytes == nullptr) refuse("no memory for " + std::to_string(size) + " bytes");
  memset(value.bytes, 0, room);
  value.owned = std::shared_ptr<void>(value.bytes, Release());
  value.size = size;
  return value;
}

// Four interleaved polynomials of the 64-bit words.
std::string digest(const void* data, size_t size) {
  constexpr uint64_t kPrime = 0x100000001B3u;
  uint64_t sums[4], words[4], total = size;
  for (uint64_t& sum : sums) sum = 0xCBF29CE484222325u;
  for (size_t at = 0; at < size; at += 32) {
    memset(words, 0, sizeof words);
    memcpy(words, static_cast<const char*>(data) + at, size - at < 32 ? size - at : 32);
    for (int i = 0; i < 4; ++i) sums[i] = sums[i] * kPrime + words[i];
  }
  for (const uint64_t sum : sums) total = total * kPrime + sum;
  char text[17];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(total));
  return text;
}

// --- calls ---------------------------------------------------------------------------------------

struct Argument {
  int64_t number = 0;
  float real = 0.0f;
  void* pointer = nullptr;
};

template <class T>
T passed(const Argument& a) {
  if constexpr (std::is_pointer_v<T>) return static_cast<T>(a.pointer);
  else if constexpr (std::is_same_v<T, float>) return a.real;
  else return static_cast<T>(a.number);
}
template <class... T, size_t... I>
int64_t invoke(int64_t (*function)(T...), const std::vector<Argument>& a, std::index_sequence<I...>) {
  if (a.size() != sizeof...(T)) refuse("a call has " + std::to_string(a.size()) + " arguments");
  return function(passed<T>(a[I])...);
}
template <class... T>
int64_t invoke(int64_t (*function)(T...), const std::vector<Argument>& a) {
  return invoke(function, a, std::index_sequence_for<T...>());
}

int64_t take_rows(const uint32_t* x, const int32_t* rows, int64_t count, int64_t width, uint32_t* out) {
  for (int64_t r = 0; r < count; ++r) memcpy(out + r * width, x + rows[r] * width, static_cast<size_t>(width) * 4);
  return 0;
}

using Call = int64_t (*)(bool reference, const std::vector<Argument>&);
#define VOX_CALL(name)                                                         \
  {#name, [](bool reference, const std::vector<Argument>& a) {                 \
     return reference ? invoke(ref_##name, a) : invoke(vox_##name, a);         \
   }}
const std::map<std::string, Call> kCalls = {
    VOX_CALL(widen), VOX_CALL(embed), VOX_CALL(linear), VOX_CALL(norm), VOX_CALL(rotary), VOX_CALL(rope),
    VOX_CALL(kv_append), VOX_CALL(attention), VOX_CALL(add), VOX_CALL(silu_gate), VOX_CALL(gelu_gate),
    VOX_CALL(softcap), VOX_CALL(penalise), VOX_CALL(argmax), VOX_CALL(token_weights), VOX_CALL(log_normaliser),
    VOX_CALL(quant_activations), VOX_CALL(quant_linear), VOX_CALL(quant_rows),
    {"take_rows", [](bool, const std::vector<Argument>& a) { return invoke(take_rows, a); }},
};

// --- the script ----------------------------------------------------------------------------------------

class Recompute {
 public:
  Recompute(const std::string& folder, bool reference) : reference_(reference) {
    const std::string path = folder + "/data";
    FILE* file = fopen(path.c_str(), "rb");
    struct stat about;
    if (file == nullptr || fstat(fileno(file), &about) != 0) refuse(path + " can't be read");
    size_ = static_cast<size_t>(about.st_size);
    void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, fileno(file), 0);
    if (mapped == MAP_FAILED) refuse(path + " can't be mapped");
    data_ = static_cast<uint8_t*>(mapped);
    fclose(file);
  }

  void line(const std::string& text) {
    std::istringstream words(text);
    std::string name;
    words >> name;
    if (name == "data") return data(words);
    if (name == "weight") return weight(words);
    if (name == "show") return show(words);
    call(name, words);
  }

  int calls() const { return calls_; }
  int differing() const { return differing_; }

 private:
  uint8_t* stored(size_t offset, size_t size) const {
    if (offset > size_ || size > size_ - offset) refuse("the script names bytes beyond the end of the data");
    return data_ + offset;
  }

  void data(std::istringstream& words) {
    int64_t number;
    size_t offset, size;
    words >> number >> offset >> size;
    Value& value = values_[number];
    value.bytes = stored(offset, size);
    value.size = size;
  }

  void weight(std::istringstream& words) {
    std::string number, kind;
    int32_t format;
    int64_t rows, columns;
    size_t offset, size;
    words >> number >> kind >> format >> rows >> columns >> offset >> size;
    const uint8_t* source = stored(offset, size);
    int64_t code;
    Value packed;
    if (kind == "quantised") {
      const auto bytes = reference_ ? ref_quant_packed_bytes : vox_quant_packed_bytes;
      packed = new_value(static_cast<size_t>(bytes(format, rows, columns)));
      code = (reference_ ? ref_quant_pack : vox_quant_pack)(format, source, rows, columns,
                                                            static_cast<uint8_t*>(packed.bytes));
    } else {
      packed = new_value(static_cast<size_t>((rows + 15) / 16 * 16 * columns * (format == 0 ? 4 : 2)));
      code = (reference_ ? ref_pack : vox_pack)(format, source, rows, columns, packed.bytes);
    }
    if (code != 0) refuse("weight " + number + " can't be packed");
    weights_[number] = packed;
  }

  void show(std::istringstream& words) {
    std::string label;
    int64_t number;
    words >> label >> number;
    const Value& value = at(number);
    std::cout << label << " " << parity::sha256(value.bytes, value.size);
    if (value.size == 4) std::cout << " " << *static_cast<const int32_t*>(value.bytes);
    std::cout << "\n" << std::flush;
  }

  const Value& at(int64_t number) const {
    const auto found = values_.find(number);
    if (found == values_.end()) refuse("value " + std::to_string(number) + " is read before it is made");
    return found->second;
  }

  void call(const std::string& name, std::istringstream& words) {
    const auto found = kCalls.find(name);
    if (found == kCalls.end()) refuse("unknown operator " + name);
    std::vector<Argument> arguments;
    std::vector<std::pair<int64_t, std::string>> made;
    std::string word;
    while (words >> word) {
      Argument a;
      const char kind = word[0];
      const std::string rest = word.substr(1);
      if (kind == 'i') a.number = stoll(rest);
      if (kind == 'f') {
        const auto bits = static_cast<uint32_t>(stoul(rest, nullptr, 16));
        memcpy(&a.real, &bits, 4);
      }
      if (kind == '<') a.pointer = at(stoll(rest)).bytes;
      if (kind == 'm') a.pointer = weights_.at(word).bytes;
      if (kind == 'q' && name == "quant_activations") {
        const auto bytes = reference_ ? ref_quant_activation_bytes : vox_quant_activation_bytes;
        const int64_t size = bytes(static_cast<int32_t>(arguments[0].number), arguments[2].number, arguments[3].number);
        activations_[word] = new_value(static_cast<size_t>(size));
      }
      if (kind == 'q') a.pointer = activations_.at(word).bytes;
      if (kind == '>' || kind == '=') {
        const std::vector<std::string> parts = split(rest);
        const size_t first = kind == '=' ? 1 : 0;
        const int64_t number = stoll(parts[first]);
        const Value value = new_value(stoull(parts[first + 1]));
        if (kind == '=') memcpy(value.bytes, at(stoll(parts[0])).bytes, value.size);
        a.pointer = value.bytes;
        values_[number] = value;
        made.emplace_back(number, parts[first + 2]);
      }
      arguments.push_back(a);
    }
    ++calls_;
    const int64_t code = found->second(reference_, arguments);
    bool same = code == 0;
    for (const auto& [number, expected] : made) {
      const Value& value = at(number);
      same = same && digest(value.bytes, value.size) == expected;
    }
    if (same) return;
    if (++differing_ <= 5) std::cerr << "differs: call " << calls_ << ", " << name << " (code " << code << ")\n";
  }

  static std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; getline(stream, part, ':');) parts.push_back(part);
    return parts;
  }

  bool reference_;
  uint8_t* data_;
  size_t size_;
  std::map<int64_t, Value> values_;
  std::map<std::string, Value> weights_, activations_;
  int calls_ = 0, differing_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count < 2) refuse("name the folder of a capture");
  const std::string isa = count > 2 ? words[2] : "";
  const bool reference = isa == "reference";
  if (vox_force_isa(reference ? "" : isa.c_str()) != 0 || vox_isa()[0] == '\0')
    refuse("instruction set '" + isa + "' is not here");
  std::cerr << "instruction set: " << (reference ? "none, the scalar reference" : vox_isa()) << "\n";
  vox_set_threads(2);
  Recompute recompute(words[1], reference);
  std::ifstream script(std::string(words[1]) + "/script");
  std::string line;
  if (!getline(script, line) || line != "vox-capture 1") refuse("this is no capture that can be read here");
  while (getline(script, line))
    if (!line.empty()) recompute.line(line);
  std::cout << recompute.calls() << " calls, " << recompute.differing() << " differ from the capture\n";
  if (recompute.calls() == 0) refuse("the capture has no calls");
  return recompute.differing() == 0 ? 0 : 1;
}
