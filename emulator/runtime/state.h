// What runs: threads, warps, the block; and how a fault is reported.
#pragma once

#include <link.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "fiber.h"

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

constexpr u32 kWarpLanes = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxWarps = kMaxThreads / kWarpLanes;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kFaultStatus = 3;

// A place in the templates.
struct Site {
  const char* file;
  int line;

  bool operator==(const Site& other) const {
    return line == other.line && (file == other.file || strcmp(file, other.file) == 0);
  }
};

struct Warp;
struct TensorMap;

// What a whole warp does together. `run` finds what each lane gave and takes in lanes[...].payload.
struct Operation {
  const char* name;
  void (*run)(Warp& warp);
};

// One asynchronous copy that its thread has not waited for.
struct Copy {
  u32 target;  // offset in shared memory
  u32 bytes;
  u32 read_bytes;  // the rest becomes zeros
  u32 group;
  const char* source;
};

// A tile on its way from shared memory to a tensor (tma.h).
struct Store {
  u32 source;  // offset in shared memory
  u32 bytes;
  u32 group;
  u32 counter;  // where it was issued
  const TensorMap* map;
  int coordinates[5];
  bool read;                   // shared memory has been read, into `contents`
  std::vector<char> contents;  // rows of the box
};

// Registers of a wgmma as the host sees them: local variables.
struct Registers {
  uintptr_t begin;
  uintptr_t end;
  u32 in_flight;  // products that have not been waited for
  bool result;    // an accumulator; else a part of A
  bool touched;   // since the last wgmma.fence
  u32 counter;    // where the last product was issued
};

struct Barrier;

struct Thread {
  Fiber fiber;
  Warp* warp;
  u32 index;
  u32 lane;
  void* payload;  // of the operation that it has come to
  std::vector<Copy> copies;
  u32 committed;  // groups of copies
  std::vector<Store> stores;
  u32 bulk_committed;  // groups of stores
  std::vector<Registers> registers;
  u32 ahead;               // of the clock of its warp (order.h)
  const Barrier* waiting;  // for this mbarrier
  u32 parity;
  Site waiting_at;
};

struct Warp {
  Thread* lanes;
  u32 index;
  u32 ready;     // positions in the order of lanes that can run
  u32 arrived;   // lanes that have come to `operation`
  u32 returned;  // lanes that have left the kernel
  bool blocked;  // at a barrier of the block, or a part of it
  bool uneven;   // some lanes are ahead of its clock (order.h)
  u32 scramble;  // position p in the order is lane (scramble * p + shift) % 32
  u32 unscramble;
  u32 shift;
  const Operation* operation;
  Site site;

  u32 lane_at(u32 position) const {
    return (scramble * position + shift) % kWarpLanes;
  }
  u32 position_of(u32 lane) const {
    return unscramble * (lane - shift) % kWarpLanes;
  }
};

inline Thread threads[kMaxThreads];
inline Warp warps[kMaxWarps];
inline Fiber scheduler;
inline Thread* current = nullptr;
inline u32 num_threads = 0;
inline u32 num_warps = 0;
inline u64 block_number = 0;

inline u64 random_seed = 0;  // of the run
// splitmix64
inline u64 random_state = 0;
inline u64 random_bits() {
  u64 z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// Where the code lies, as addr2line counts it: the program may have been moved when it was loaded.
inline u64 load_bias = 0;
inline u64 code_address(const void* counter) {
  return reinterpret_cast<uintptr_t>(counter) - load_bias;
}
struct Span {
  uintptr_t begin;
  uintptr_t end;
};
inline std::vector<Span> constants;  // read-only memory of the program: tables that the compiler made
inline void find_program() {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void*) {
        load_bias = info->dlpi_addr;
        for (u32 index = 0; index < info->dlpi_phnum; ++index) {
          const auto& segment = info->dlpi_phdr[index];
          if (segment.p_type == PT_LOAD && !(segment.p_flags & PF_W)) {
            constants.push_back({load_bias + segment.p_vaddr, load_bias + segment.p_vaddr + segment.p_memsz});
          }
        }
        return 1;  // the program is the first
      },
      nullptr);
}

inline void* program_counter(const void* signal_context, void**& frame) {
#if defined(__x86_64__)
  const auto& registers = static_cast<const ucontext_t*>(signal_context)->uc_mcontext.gregs;
  frame = reinterpret_cast<void**>(registers[REG_RBP]);
  return reinterpret_cast<void*>(registers[REG_RIP]);
#elif defined(__aarch64__)
  const auto& registers = static_cast<const ucontext_t*>(signal_context)->uc_mcontext;
  frame = reinterpret_cast<void**>(registers.regs[29]);
  return reinterpret_cast<void*>(registers.pc);
#else
  (void)signal_context;
  frame = nullptr;
  return nullptr;
#endif
}

// Writes the report that run.py reads: a line for each fact, the calls of the thread innermost first, the text.
// A program counter in the text stands between @ and @. `frame` is where the chain of frame pointers begins.
[[noreturn]] inline void report(void* counter, void** frame, const char* format, va_list arguments) {
  char text[4096];
  int length = snprintf(text, sizeof text, "emulator fault\nblock %llu\nthread %u\n",
                        static_cast<unsigned long long>(block_number), current ? current->index : 0);
  if (counter) {
    length += snprintf(text + length, sizeof text - length, "pc %llx\n",
                       static_cast<unsigned long long>(code_address(counter)));
  }
  const char* stack = current ? current->fiber.stack : nullptr;
  for (int depth = 0; depth < 12 && stack; ++depth) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(frame) - reinterpret_cast<uintptr_t>(stack);
    if (offset > kStackBytes - 2 * sizeof(void*) || offset % sizeof(void*) != 0 || !frame[1]) {
      break;
    }
    // One byte back: inside the call, not behind it.
    length += snprintf(text + length, sizeof text - length, "pc %llx\n",
                       static_cast<unsigned long long>(code_address(frame[1]) - 1));
    frame = static_cast<void**>(frame[0]);
  }
  length += snprintf(text + length, sizeof text - length, "text ");
  length += vsnprintf(text + length, sizeof text - length - 1, format, arguments);
  length = length < static_cast<int>(sizeof text) - 2 ? length : static_cast<int>(sizeof text) - 2;
  text[length++] = '\n';
  if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) {
    _exit(2);
  }
  _exit(kFaultStatus);
}

[[noreturn]] inline void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] inline void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(nullptr, static_cast<void**>(__builtin_frame_address(0)), format, arguments);
}

[[noreturn]] inline void fault_in_signal(const void* signal_context, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  void** frame = nullptr;
  void* counter = program_counter(signal_context, frame);
  report(counter, frame, format, arguments);
}
