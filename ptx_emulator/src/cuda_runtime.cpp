// The CUDA runtime entry points that CuTe DSL's compiled host code calls, served by the emulator.
// Names and signatures match NVIDIA's libcute_dsl_runtime.so.  CUTE_DSL_LIBS replaces it with this
// library.
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include "api.h"

namespace {
struct Device {
    int num_sms = 4, major = 10, minor = 0;
} device;

// A loaded library is identified by a hash of its cubin, because kernels of different compilations
// may have the same name.  Programs are registered under "<hash>:<name>".  Handles are addresses of
// these objects.
std::set<std::string> libraries, kernels;
void* handle(std::set<std::string>& known, const std::string& key) {
    return (void*)&*known.insert(key).first;
}
const std::string& key_of(const void* handle) { return *(const std::string*)handle; }

uint64_t read_little_endian(const unsigned char* p, int bytes) {
    uint64_t v = 0;
    for (int i = bytes; i--;) v = v << 8 | p[i];
    return v;
}
// A cubin is a 64-bit ELF file; its size follows from the header tables, wherever they lie.
size_t elf_bytes(const unsigned char* p) {
    if (memcmp(p, ELFMAG "\2", 5) != 0) return 0;
    Elf64_Ehdr e;
    memcpy(&e, p, sizeof e);
    uint64_t end =
        std::max(e.e_phoff + e.e_phentsize * e.e_phnum, e.e_shoff + e.e_shentsize * e.e_shnum);
    for (int i = 0; i < e.e_shnum; i++) {
        Elf64_Shdr s;
        memcpy(&s, p + e.e_shoff + i * e.e_shentsize, sizeof s);
        if (s.sh_type != SHT_NOBITS) end = std::max(end, s.sh_offset + s.sh_size);
    }
    return end;
}
// The cubin in a fat binary: a header, then entries of (kind, version, header size, payload size).
const unsigned char* cubin_in(const unsigned char* p) {
    constexpr uint32_t FATBIN_MAGIC = 0xba55ed50;
    constexpr uint64_t ELF_ENTRY = 2;
    if (read_little_endian(p, 4) != FATBIN_MAGIC) return p;
    const unsigned char* entry = p + read_little_endian(p + 6, 2);
    const unsigned char* end = entry + read_little_endian(p + 8, 8);
    while (entry < end) {
        const unsigned char* payload = entry + read_little_endian(entry + 4, 4);
        if (read_little_endian(entry, 2) == ELF_ENTRY) return payload;
        entry = payload + read_little_endian(entry + 8, 8);
    }
    return p;
}
std::string hash_of(const void* data) {
    const unsigned char* p = cubin_in((const unsigned char*)data);
    uint64_t h = 14695981039346656037ull;  // FNV-1a
    const size_t bytes = elf_bytes(p);
    for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * 1099511628211ull;
    return std::to_string(h);
}

struct LaunchAttribute {
    int id, padding;
    union {
        char raw[64];
        struct {
            unsigned x, y, z;
        } cluster;
    } value;
};
constexpr int CLUSTER_DIMENSION = 4;  // cudaLaunchAttributeClusterDimension
struct LaunchConfig {
    unsigned grid[3], block[3];
    size_t dynamic_smem;
    void* stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};

using SetRaised = void (*)(const char* kind, const char** message, int count);
}  // namespace

extern "C" {
void emu_set_device(int num_sms, int major, int minor) { device = {num_sms, major, minor}; }
const char* emu_cubin_hash(const void* cubin) {
    static std::string hash;
    hash = hash_of(cubin);
    return hash.c_str();
}

int _cudaLaunchKernelEx(const LaunchConfig* c, const void* kernel, void** args) {
    uint32_t cluster[3] = {1, 1, 1};
    int explicit_cluster = 0;
    for (unsigned i = 0; i < c->num_attributes; i++) {
        if (c->attributes[i].id != CLUSTER_DIMENSION) continue;
        const auto& dims = c->attributes[i].value.cluster;
        cluster[0] = dims.x, cluster[1] = dims.y, cluster[2] = dims.z;
        explicit_cluster = 1;
    }
    return emu_launch(key_of(kernel).c_str(), c->grid, c->block, cluster, explicit_cluster,
                      (uint32_t)c->dynamic_smem, args);
}
int _cudaLaunchKernel(const void* kernel, uint64_t grid_xy, uint32_t grid_z, uint64_t block_xy,
                      uint32_t block_z, void** args, size_t dynamic_smem, void*) {
    const uint32_t grid[3] = {(uint32_t)grid_xy, (uint32_t)(grid_xy >> 32), grid_z};
    const uint32_t block[3] = {(uint32_t)block_xy, (uint32_t)(block_xy >> 32), block_z};
    const uint32_t cluster[3] = {1, 1, 1};
    return emu_launch(key_of(kernel).c_str(), grid, block, cluster, 0, (uint32_t)dynamic_smem,
                      args);
}
int _cudaLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*,
                         unsigned) {
    *library = handle(libraries, hash_of(code));
    return 0;
}
int _cudaLibraryUnload(void*) { return 0; }
int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
    *kernel = handle(kernels, key_of(library) + ":" + name);
    return 0;
}
int _cuLibraryUnload(void*) { return 0; }
int _cudaFuncSetAttribute(const void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(const void*, int, int, int) { return 0; }
int _cuKernelGetAttribute(int* value, int, void*, int) { return *value = 0; }

int _cudaGetDevice(int* ordinal) { return *ordinal = 0; }
int _cudaSetDevice(int) { return 0; }
int _cudaGetDeviceCount(int* count) {
    *count = 1;
    return 0;
}
int _cudaStreamSynchronize(void*) { return 0; }
int _cudaDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 1:
            *value = 1024;
            break;  // threads per block
        case 10:
            *value = 32;
            break;  // warp size
        case 16:
            *value = device.num_sms;
            break;  // multiprocessors
        case 75:
            *value = device.major;
            break;  // compute capability
        case 76:
            *value = device.minor;
            break;
        case 81:
            *value = 233472;
            break;  // shared memory per multiprocessor
        case 97:
            *value = 232448;
            break;  // shared memory per block, opt-in
        default:
            *value = 0;
    }
    return 0;
}

void cuda_dialect_print_on_error(int code) {
    if (code) fprintf(stderr, "CUDA error %d from the emulator: %s\n", code, emu_last_error());
}
void cuda_dialect_assert_success(int code) { cuda_dialect_print_on_error(code); }
const char* cuda_dialect_get_error_name(int code) { return code ? "emulatorError" : "cudaSuccess"; }
int cuda_dialect_init_library_once(void** library, int (*init)(void**), int (*load)(void**, int),
                                   void (*)(const char*, const char*)) {
    if (*library) return 0;
    void* loaded = nullptr;
    int status = init(&loaded);
    if (!status && load) status = load(&loaded, 0);
    if (!status) *library = loaded;
    return status;
}
int cuda_dialect_unload_library_once(void*) { return 0; }

// A failed launch becomes the pending TVM-FFI error, with the emulator's own message.
void CuteDSLRT_TVMFFISetRaisedCudaError(SetRaised set, int code) {
    std::string text = emu_last_error();
    if (text.empty()) text = "CUDA error " + std::to_string(code) + " from the emulator";
    const char* message = text.c_str();
    if (set) set("RuntimeError", &message, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(SetRaised set, int code) {
    CuteDSLRT_TVMFFISetRaisedCudaError(set, code);
}
}
