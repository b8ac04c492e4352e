




// Inline asm names each register, so each shape has its own text. All steps of a product are one statement, whose operands
// list D once: with a statement for each step, a fifth of the compiler's time went into such lists.
template <typename Element, int kN, int kSteps>
struct SharedProduct;

template <typename Element, int kN, int kSteps>
struct RegisterProduct;

// The steps of a product, and how many bytes from the operands of step 0 each step's lie.
struct OneStep {
  static constexpr int kCount = 1;
  static constexpr int a(int) {
    return 0;
  }
  static constexpr int b(int) {
    return 0;
  }
};

// clang-format off: control lines stand between the lines of a statement.
template <>
struct SharedProduct<Half, 80, 5> {
  template <bool kTransA, bool kTransB, typename Steps>
  static __device__ __forceinline__ void add(float (&d)[40], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %42, 0;\n"
        "add.s64 a, %40, %45;\n"
        "add.s64 b, %41, %46;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, a, b, accumulate, 1, 1, %43, %44;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %40, %47;\n"
        "add.s64 b, %41, %48;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, a, b, accumulate, 1, 1, %43, %44;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %40, %49;\n"
        "add.s64 b, %41, %50;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, a, b, accumulate, 1, 1, %43, %44;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %40, %51;\n"
        "add.s64 b, %41, %52;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, a, b, accumulate, 1, 1, %43, %44;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %40, %53;\n"
        "add.s64 b, %41, %54;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, a, b, accumulate, 1, 1, %43, %44;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0)
        , "n"(Steps::a(0) >> 4), "n"(Steps::b(0) >> 4)
        , "n"(Steps::a(1) >> 4), "n"(Steps::b(1) >> 4)
        , "n"(Steps::a(2) >> 4), "n"(Steps::b(2) >> 4)
        , "n"(Steps::a(3) >> 4), "n"(Steps::b(3) >> 4)
        , "n"(Steps::a(4) >> 4), "n"(Steps::b(4) >> 4)
        : "memory");
  }
};

template <>
struct RegisterProduct<Half, 72, 5> {
  template <bool kTransB, typename Steps>
  static __device__ __forceinline__ void add(float (&d)[36], const u32 (*a)[4], u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 b;\n"
        "setp.ne.b32 accumulate, %37, 0;\n"
        "add.s64 b, %36, %43;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
        "}, {%39, %40, %41, %42}, b, accumulate, 1, 1, %38;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %36, %48;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
        "}, {%44, %45, %46, %47}, b, accumulate, 1, 1, %38;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %36, %53;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
        "}, {%49, %50, %51, %52}, b, accumulate, 1, 1, %38;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %36, %58;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
        "}, {%54, %55, %56, %57}, b, accumulate, 1, 1, %38;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %36, %63;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
        "}, {%59, %60, %61, %62}, b, accumulate, 1, 1, %38;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransB ? 1 : 0)
        , "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "n"(Steps::b(0) >> 4)
        , "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), "n"(Steps::b(1) >> 4)
        , "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "n"(Steps::b(2) >> 4)
        , "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), "n"(Steps::b(3) >> 4)
        , "r"(a[4][0]), "r"(a[4][1]), "r"(a[4][2]), "r"(a[4][3]), "n"(Steps::b(4) >> 4)
        : "memory");
  }
};

// clang-format on

// A and B in shared memory; transposed ones are MN-major. d[4 i + 2 r + e] of lane (g, t) is row 16 w + g + 8 r and
// column 8 i + 2 t + e, for warp w of the warpgroup. Without `accumulate`, D is not read.
template <typename Element, bool kTransA, bool kTransB, typename Steps = OneStep, int kRegisters>
__device__ __forceinline__ void wgmma_shared(float (&d)[kRegisters], u64 a, u64 b, bool accumulate) {
  SharedProduct<Element, 2 * kRegisters, Steps::kCount>::template add<kTransA, kTransB, Steps>(d, a, b, accumulate);
}

// A in registers, four for each step, as for mma_m16n8k16: a warp has its 16 rows.
template <typename Element, bool kTransB, typename Steps = OneStep, int kRegisters>
__device__ __forceinline__ void wgmma_registers(float (&d)[kRegisters], const u32 (*a)[4], u64 b, bool accumulate) {
  RegisterProduct<Element, 2 * kRegisters, Steps::kCount>::template add<kTransB, Steps>(d, a, b, accumulate);
}
