// The functions of templates/lib/wgmma.cuh.jinja for the host, which takes this file in its place, for every width.

template <typename Element>
constexpr bool kEmulatorBFloat16 = false;
template <>
constexpr bool kEmulatorBFloat16<BFloat16> = true;

struct OneStep {
  static constexpr int kCount = 1;
  static constexpr int a(int) {
    return 0;
  }
  static constexpr int b(int) {
    return 0;
  }
};

template <typename Element, bool kTransA, bool kTransB, typename Steps = OneStep, int kRegisters>
__device__ __forceinline__ void wgmma_shared(float (&d)[kRegisters], u64 a, u64 b, bool accumulate, EMULATOR_SITE) {
  static_assert(kRegisters % 4 == 0 && kRegisters >= 4 && kRegisters <= 128, "N is a multiple of 8 from 8 to 256");
  for (int step = 0; step < Steps::kCount; ++step) {
    emulator_wgmma(d, 2 * kRegisters, kEmulatorBFloat16<Element>, descriptor_plus(a, Steps::a(step)), nullptr,
                   descriptor_plus(b, Steps::b(step)), kTransA, kTransB, accumulate || step > 0, file, line);
  }
}

template <typename Element, bool kTransB, typename Steps = OneStep, int kRegisters>
__device__ __forceinline__ void wgmma_registers(float (&d)[kRegisters], const u32 (*a)[4], u64 b, bool accumulate,
                                                EMULATOR_SITE) {
  static_assert(kRegisters % 4 == 0 && kRegisters >= 4 && kRegisters <= 128, "N is a multiple of 8 from 8 to 256");
  for (int step = 0; step < Steps::kCount; ++step) {
    emulator_wgmma(d, 2 * kRegisters, kEmulatorBFloat16<Element>, 0, a[step], descriptor_plus(b, Steps::b(step)), false,
                   kTransB, accumulate || step > 0, file, line);
  }
}
