/* Host side of one TileLang kernel built ahead of time.
 *
 * TileLang's generated host C checks the arguments, then asks its environment for up to three functions by name:
 * the one that makes a device current, the one that encodes a tensor map (unused by our kernels) and the kernel
 * itself. This file is that environment: it loads the cubin linked beside it through the CUDA driver, found at
 * the first launch, so the result loads (and checks arguments) on a machine without a GPU.
 * kernel_meta.h, written by emit.py, gives KERNEL_NAME, NUM_PARAMS, param_kind[], NUM_DIMS, dim_slot[], and OVERLAPS:
 * whether the launch may begin while the kernel before it in the stream ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include "kernel_meta.h"

enum { DIM_DYNAMIC_SMEM = 6, CUDA_DEVICE = 2, MAX_DEVICES = 64 };
enum { ATTR_MAX_DYNAMIC_SMEM = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
enum { STATIC_SMEM_LIMIT = 48 * 1024 };
enum { ATTR_EARLY_START = 6 }; /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */

extern const unsigned char kernel_cubin[];

typedef int CUresult;
typedef void *CUkernel;
typedef struct { /* CUlaunchAttribute: the value's bytes begin with an int that allows it */
  int id;
  char pad[4];
  union { char bytes[64]; int allowed; } value;
} Attribute;
typedef struct { /* CUlaunchConfig */
  unsigned dim[6], smem_bytes;
  void *stream;
  Attribute *attributes;
  unsigned num_attributes;
} Config;
static struct {
  CUresult (*GetErrorString)(CUresult, const char **);
  CUresult (*DeviceGet)(int *, int);
  CUresult (*DevicePrimaryCtxRetain)(void **, int);
  CUresult (*CtxSetCurrent)(void *);
  CUresult (*CtxGetCurrent)(void **);
  CUresult (*LibraryLoadData)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
  CUresult (*LibraryGetKernel)(CUkernel *, void *, const char *);
  CUresult (*KernelSetAttribute)(int, int, CUkernel, int);
  CUresult (*LaunchKernel)(CUkernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                           void **, void **);
  CUresult (*LaunchKernelEx)(const Config *, CUkernel, void **, void **);
} cu;

static CUkernel kernel;
static __thread int current_device;

static int fail(const char *what, CUresult code) {
  const char *text = "unknown error";
  if (cu.GetErrorString) cu.GetErrorString(code, &text);
  const char *parts[4] = {KERNEL_NAME ": ", what, ": ", text};
  TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 4);
  return -1;
}

static int load_driver(void) {
  static const struct { void **to; const char *name; } symbols[] = {
      {(void **)&cu.GetErrorString, "cuGetErrorString"},
      {(void **)&cu.DeviceGet, "cuDeviceGet"},
      {(void **)&cu.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"},
      {(void **)&cu.CtxSetCurrent, "cuCtxSetCurrent"},
      {(void **)&cu.CtxGetCurrent, "cuCtxGetCurrent"},
      {(void **)&cu.LibraryLoadData, "cuLibraryLoadData"},
      {(void **)&cu.LibraryGetKernel, "cuLibraryGetKernel"},
      {(void **)&cu.KernelSetAttribute, "cuKernelSetAttribute"},
      {(void **)&cu.LaunchKernelEx, "cuLaunchKernelEx"},
      {(void **)&cu.LaunchKernel, "cuLaunchKernel"},
  };
  if (cu.LaunchKernel) return 0;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  for (unsigned i = 0; i < sizeof symbols / sizeof *symbols; ++i)
    if (!driver || !(*symbols[i].to = dlsym(driver, symbols[i].name))) {
      const char *parts[3] = {KERNEL_NAME ": the CUDA driver (libcuda.so.1) lacks ", symbols[i].name,
                              "; needed: a driver for CUDA 12.0 or newer"};
      TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 3);
      return -1;
    }
  return 0;
}

/* (device type, device index) */
static int set_device(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)self; (void)num_args; (void)result;
  static void *primary[MAX_DEVICES];
  int index = (int)args[1].v_int64, device;
  void *current = 0;
  CUresult code;
  if (load_driver()) return -1;
  if (!primary[index % MAX_DEVICES]) {
    if ((code = cu.DeviceGet(&device, index))) return fail("cuDeviceGet", code);
    if ((code = cu.DevicePrimaryCtxRetain(&primary[index % MAX_DEVICES], device)))
      return fail("cuDevicePrimaryCtxRetain", code);
  }
  current_device = index;
  if ((code = cu.CtxGetCurrent(&current))) return fail("cuCtxGetCurrent", code);
  if (current != primary[index % MAX_DEVICES] && (code = cu.CtxSetCurrent(primary[index % MAX_DEVICES])))
    return fail("cuCtxSetCurrent", code);
  return 0;
}

/* (kernel parameters..., launch dimensions...) */
static int launch(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)self; (void)num_args; (void)result;
  CUresult code;
  if (load_driver()) return -1;
  if (!kernel) {
    void *library;
    CUkernel loaded;
    if ((code = cu.LibraryLoadData(&library, kernel_cubin, 0, 0, 0, 0, 0, 0))) return fail("cuLibraryLoadData", code);
    if ((code = cu.LibraryGetKernel(&loaded, library, KERNEL_NAME))) return fail("cuLibraryGetKernel", code);
    kernel = loaded;
  }
  union { void *pointer; int64_t i64; int32_t i32; float f32; } value[NUM_PARAMS];
  void *params[NUM_PARAMS];
  for (int i = 0; i < NUM_PARAMS; ++i) {
    params[i] = &value[i];
    switch (param_kind[i]) {
      case 'p': value[i].pointer = args[i].v_ptr; break;
      case 'l': value[i].i64 = args[i].v_int64; break;
      case 'i': value[i].i32 = (int32_t)args[i].v_int64; break;
      default: value[i].f32 = (float)args[i].v_float64;
    }
  }
  unsigned dim[7] = {1, 1, 1, 1, 1, 1, 0};
  for (int i = 0; i < NUM_DIMS; ++i) dim[dim_slot[i]] = (unsigned)args[NUM_PARAMS + i].v_int64;
  if (dim[DIM_DYNAMIC_SMEM] > STATIC_SMEM_LIMIT) {
    static unsigned allowed[MAX_DEVICES];
    unsigned *done = &allowed[current_device % MAX_DEVICES];
    if (*done < dim[DIM_DYNAMIC_SMEM]) {
      code = cu.KernelSetAttribute(ATTR_MAX_DYNAMIC_SMEM, (int)dim[DIM_DYNAMIC_SMEM], kernel, current_device);
      if (code) return fail("cuKernelSetAttribute (dynamic shared memory)", code);
      *done = dim[DIM_DYNAMIC_SMEM];
    }
  }
  void *stream = TVMFFIEnvGetStream(CUDA_DEVICE, current_device);
  if (OVERLAPS) {
    Attribute early = {ATTR_EARLY_START, {0}, {{0}}};
    Config config = {{dim[0], dim[1], dim[2], dim[3], dim[4], dim[5]}, dim[DIM_DYNAMIC_SMEM], stream, &early, 1};
    early.value.allowed = 1;
    code = cu.LaunchKernelEx(&config, kernel, params, 0);
    return code ? fail("cuLaunchKernelEx", code) : 0;
  }
  code = cu.LaunchKernel(kernel, dim[0], dim[1], dim[2], dim[3], dim[4], dim[5], dim[DIM_DYNAMIC_SMEM], stream, params,
                         0);
  return code ? fail("cuLaunchKernel", code) : 0;
}

__attribute__((visibility("hidden"))) int TVMBackendGetFuncFromEnv(void *ctx, const char *name, void **out) {
  (void)ctx;
  TVMFFISafeCallType function = !strcmp(name, "__tvm_set_device") ? set_device
                                : !strcmp(name, KERNEL_NAME)      ? launch
                                                                  : 0;
  if (!function) {
    const char *parts[2] = {KERNEL_NAME ": the launcher has no function ", name};
    TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 2);
    return -1;
  }
  return TVMFFIFunctionCreate(0, function, 0, (TVMFFIObjectHandle *)out);
}
