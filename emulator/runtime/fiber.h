// Fibers: one stack per thread of a block, and a switch between them that costs a few nanoseconds.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define EMULATOR_UCONTEXT
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

constexpr size_t kStackBytes = 256 * 1024;  // of which the kernel touches few: pages that are not touched cost nothing
constexpr size_t kGuardBytes = 64 * 1024;   // below a stack, without access: large pages are that large

using FiberEntry = void (*)();

// Without an entry it stands for the stack that the process started with.
struct Fiber {
  char* stack = nullptr;  // lowest address
#ifdef EMULATOR_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
};

inline void allocate_stack(Fiber& fiber) {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    perror("stack of a thread");
    exit(2);
  }
  fiber.stack = static_cast<char*>(memory) + kGuardBytes;
}

#ifdef EMULATOR_UCONTEXT

inline void start_fiber(Fiber& fiber, FiberEntry entry) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

inline void switch_fiber(Fiber& from, Fiber& to) {
  swapcontext(&from.context, &to.context);
}

#else

// Keeps the registers that a call must preserve on the stack that is left, and takes them from the one that is entered.
extern "C" void emulator_switch(void** left, void* entered);

#if defined(__x86_64__)
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");
constexpr size_t kSavedWords = 8;  // six registers, the address to return to, and one that aligns the stack
constexpr size_t kReturnWord = 6;
#else
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emulator_switch, .-emulator_switch
)");
constexpr size_t kSavedWords = 20;
constexpr size_t kReturnWord = 11;  // x30
#endif

inline void start_fiber(Fiber& fiber, FiberEntry entry) {
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - kSavedWords;
  for (size_t word = 0; word < kSavedWords; ++word) {
    top[word] = nullptr;
  }
  top[kReturnWord] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = top;
}

inline void switch_fiber(Fiber& from, Fiber& to) {
  emulator_switch(&from.stack_pointer, to.stack_pointer);
}

#endif
