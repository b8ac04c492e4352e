// What the templates take from CUDA, for a C++ compiler of the host: the qualifiers, the built-in variables, and the
// built-in functions that the templates use. Stands before the generated source; includes nothing, so that a CUDA
// function that is not modelled is an error of the compiler that names it.

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Dynamic shared memory is `smem` of runtime.cpp. A shared array of a fixed size would become a variable of one thread:
// "weak" turns that into an error and leaves an extern declaration alone.
#define __shared__ __attribute__((weak))

// ---- Built-in variables and types ----
struct Dim3 {
  unsigned x, y, z;
};
extern const Dim3 threadIdx;  // constant as seen by one thread
extern const Dim3 blockIdx;
extern const Dim3 blockDim;
extern const Dim3 gridDim;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// ---- The runtime ----
// Operations of a whole warp or block say where they stand: all threads must come to the same place. The last
// parameters of a modelled function are EMULATOR_SITE, and take the place of the call.
#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct EmulatorWords {
  unsigned word[4];
};
struct EmulatorFloats {
  float value[4];
};

extern "C" {
int emulator_sync_threads(int predicate, const char* file, int line);  // how many threads gave a true predicate
void emulator_sync_warp(unsigned mask, const char* file, int line);
unsigned emulator_ballot(unsigned mask, int predicate, const char* file, int line);
unsigned long long emulator_shuffle(unsigned mask, unsigned long long bits, int lane, const char* file, int line);
unsigned emulator_shared_address(const void* pointer);
void emulator_copy_async(unsigned target, const void* source, unsigned bytes, unsigned read_bytes);
void emulator_copy_commit();
void emulator_copy_wait(unsigned pending);
EmulatorWords emulator_ldmatrix(unsigned row, bool transposed, const char* file, int line);
EmulatorFloats emulator_mma(bool bfloat16, EmulatorFloats d, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                            unsigned b0, unsigned b1, const char* file, int line);
void emulator_stmatrix(unsigned row, bool transposed, EmulatorWords words, const char* file, int line);
void emulator_mbarrier_init(unsigned barrier, unsigned arrivals);
void emulator_mbarrier_invalidate(unsigned barrier);
void emulator_mbarrier_arrive(unsigned barrier, unsigned bytes);
void emulator_mbarrier_expect(unsigned barrier, unsigned bytes);
bool emulator_mbarrier_test(unsigned barrier, unsigned parity);
void emulator_mbarrier_wait(unsigned barrier, unsigned parity, const char* file, int line);
void emulator_fence_mbarrier_init();
void emulator_fence_proxy_async();
void emulator_named_barrier(unsigned id, unsigned threads, bool waits, const char* file, int line);
bool emulator_elect(const char* file, int line);
void emulator_setmaxnreg(unsigned registers, bool more, const char* file, int line);
void emulator_tensor_map_prefetch(const void* map, const char* instruction);
void emulator_tma_load(unsigned target, const void* map, unsigned barrier, unsigned rank, const int* coordinates);
void emulator_tma_store(const void* map, unsigned source, unsigned rank, const int* coordinates);
void emulator_bulk_commit();
void emulator_bulk_wait(unsigned pending, bool only_read);
void emulator_wgmma_fence(const char* file, int line);
void emulator_wgmma_commit(const char* file, int line);
void emulator_wgmma_wait(unsigned pending, const char* file, int line);
void emulator_wgmma(float* d, unsigned n, bool bfloat16, unsigned long long a, const unsigned* a_registers,
                    unsigned long long b, bool transposed_a, bool transposed_b, bool accumulate, const char* file,
                    int line);
unsigned emulator_atomic_add_32(unsigned* target, unsigned value);
unsigned long long emulator_atomic_add_64(unsigned long long* target, unsigned long long value);
float emulator_atomic_add_float(float* target, float value);
unsigned long long emulator_atomic_max_64(unsigned long long* target, unsigned long long value);
}

// ---- Barriers, votes, shuffles ----
inline void __syncthreads(EMULATOR_SITE) {
  emulator_sync_threads(0, file, line);
}
inline int __syncthreads_or(int predicate, EMULATOR_SITE) {
  return emulator_sync_threads(predicate, file, line) != 0;
}
inline int __syncthreads_and(int predicate, EMULATOR_SITE) {
  return emulator_sync_threads(!predicate, file, line) == 0;
}
inline int __syncthreads_count(int predicate, EMULATOR_SITE) {
  return emulator_sync_threads(predicate, file, line);
}
inline void __threadfence() {}  // blocks see each other's memory in one order here
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
  emulator_sync_warp(mask, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator_ballot(mask, predicate, file, line);
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator_ballot(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator_ballot(mask, predicate, file, line) == 0xffffffffu;
}

template <class T>
inline T emulator_shuffled(unsigned mask, T value, int lane, const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = emulator_shuffle(mask, bits, lane, file, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, EMULATOR_SITE) {
  return emulator_shuffled(mask, value, lane % 32, file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, EMULATOR_SITE) {
  return emulator_shuffled(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes, file, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int lanes, EMULATOR_SITE) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulator_shuffled(mask, value, lane + lanes < 32 ? lane + lanes : lane, file, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int lanes, EMULATOR_SITE) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulator_shuffled(mask, value, lane >= lanes ? lane - lanes : lane, file, line);
}

// ---- Atomics ----
inline int atomicAdd(int* target, int value) {
  return static_cast<int>(emulator_atomic_add_32(reinterpret_cast<unsigned*>(target), static_cast<unsigned>(value)));
}
inline unsigned atomicAdd(unsigned* target, unsigned value) {
  return emulator_atomic_add_32(target, value);
}
inline unsigned long long atomicAdd(unsigned long long* target, unsigned long long value) {
  return emulator_atomic_add_64(target, value);
}
inline float atomicAdd(float* target, float value) {
  return emulator_atomic_add_float(target, value);
}
inline unsigned long long atomicMax(unsigned long long* target, unsigned long long value) {
  return emulator_atomic_max_64(target, value);
}

// ---- Addresses and bits ----
inline unsigned long long __cvta_generic_to_shared(const void* pointer) {
  return emulator_shared_address(pointer);
}
inline float __int_as_float(int bits) {
  return __builtin_bit_cast(float, bits);
}
inline int __float_as_int(float value) {
  return __builtin_bit_cast(int, value);
}
inline long long __double_as_longlong(double value) {
  return __builtin_bit_cast(long long, value);
}

// ---- Arithmetic ----
inline float exp(float x) {
  return __builtin_expf(x);
}
inline double exp(double x) {
  return __builtin_exp(x);
}
inline float expf(float x) {
  return __builtin_expf(x);
}
inline float log(float x) {
  return __builtin_logf(x);
}
inline double log(double x) {
  return __builtin_log(x);
}
inline float logf(float x) {
  return __builtin_logf(x);
}
inline float fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
inline double fma(double x, double y, double z) {
  return __builtin_fma(x, y, z);
}
inline float fmaf(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
inline float fabsf(float x) {
  return __builtin_fabsf(x);
}
inline double fabs(double x) {
  return __builtin_fabs(x);
}
inline double sqrt(double x) {
  return __builtin_sqrt(x);
}

// A NaN loses against a number, as in CUDA.
inline float fmaxf(float x, float y) {
  return x > y || y != y ? x : y;
}
inline float fminf(float x, float y) {
  return x < y || y != y ? x : y;
}
inline int max(int x, int y) {
  return x > y ? x : y;
}
inline int min(int x, int y) {
  return x < y ? x : y;
}
inline int __vimax3_s32(int x, int y, int z) {
  return max(max(x, y), z);
}
inline long long max(long long x, long long y) {
  return x > y ? x : y;
}
inline long long min(long long x, long long y) {
  return x < y ? x : y;
}
inline float max(float x, float y) {
  return fmaxf(x, y);
}
inline float min(float x, float y) {
  return fminf(x, y);
}
inline double max(double x, double y) {
  return x > y || y != y ? x : y;
}
inline double fmax(double x, double y) {
  return max(x, y);
}
inline double min(double x, double y) {
  return x < y || y != y ? x : y;
}

// Never part of a fused multiply-add: the compiler must not see the product.
inline float __fmul_rn(float x, float y) {
  float product = x * y;
  asm volatile("" : "+m"(product));
  return product;
}
inline double __dmul_rn(double x, double y) {
  double product = x * y;
  asm volatile("" : "+m"(product));
  return product;
}
