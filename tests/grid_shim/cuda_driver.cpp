// The CUDA driver's functions that run_grid.py calls, over the kernels' CUDA form on the CPU: a device to
// try that script on. A module's machine code is not looked at.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <vector>

#include "runner.h"

extern "C" int shim_run(const char* name, void** buffers, const int64_t* bytes, int count, int64_t threads_x,
                        int64_t threads_y, int at_end, int order, int flush, int simd, char* message,
                        int message_bytes);

namespace {
std::map<char*, size_t>& allocations() {
  static std::map<char*, size_t> all;
  return all;
}
constexpr int kInvalidValue = 1, kNotFound = 500, kLaunchFailed = 719;
}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int number) {
  *device = number;
  return number == 0 ? 0 : 101;
}
int cuDeviceGetName(char* name, int length, int) {
  snprintf(name, static_cast<size_t>(length), "the CPU in a GPU's place");
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = nullptr;
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() { return 0; }
int cuGetErrorString(int, const char** text) {
  *text = "an error of the CPU in a GPU's place";
  return 0;
}
int cuModuleLoadData(void** module, const void*) {
  *module = nullptr;
  return 0;
}
int cuModuleGetFunction(const vox_shim::Kernel** function, void*, const char* name) {
  for (int i = 0; i < vox_shim::kKernelCount; ++i)
    if (strcmp(vox_shim::kKernels[i].name, name) == 0) {
      *function = &vox_shim::kKernels[i];
      return 0;
    }
  return kNotFound;
}
int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  char* memory = static_cast<char*>(malloc(bytes));
  allocations()[memory] = bytes;
  *pointer = reinterpret_cast<uint64_t>(memory);
  return 0;
}
int cuMemFree_v2(uint64_t pointer) {
  char* memory = reinterpret_cast<char*>(pointer);
  allocations().erase(memory);
  free(memory);
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuLaunchKernel(const vox_shim::Kernel* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned, void*, void** parameters, void**) {
  const unsigned group = vox_shim::group_of(*kernel);
  if (bx != group || by != 1 || bz != 1 || gz != 1 || gx == 0 || gy == 0) return kInvalidValue;
  std::vector<void*> buffers;
  std::vector<int64_t> bytes;
  for (int i = 0; i + 1 < kernel->buffers; ++i) {
    char* pointer = *static_cast<char**>(parameters[i]);
    auto found = allocations().upper_bound(pointer);
    if (found == allocations().begin()) return kInvalidValue;
    --found;
    buffers.push_back(pointer);
    bytes.push_back(found->first + found->second - pointer);
  }
  buffers.push_back(parameters[kernel->buffers - 1]);
  bytes.push_back(static_cast<int64_t>(kernel->constants));
  char message[400];
  const int code = shim_run(kernel->name, buffers.data(), bytes.data(), kernel->buffers,
                            static_cast<int64_t>(gx) * group, gy, 1, 0, 1, 32, message, sizeof message);
  if (code != 0) fprintf(stderr, "%s\n", message);
  return code == 0 ? 0 : kLaunchFailed;
}
}
