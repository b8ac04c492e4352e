// What the compiler inserts into generated code: -fsanitize=thread a call at each access through a pointer,
// -fsanitize=alignment,bounds calls where a check fails. The libraries that usually answer them are not linked.
#pragma once

#include "block.h"

#define ACCESS(name, bytes, write)                                    \
  extern "C" void __tsan_##name(void* pointer) {                      \
    check_access(pointer, bytes, write, __builtin_return_address(0)); \
  }
#define ACCESSES(bytes)                       \
  ACCESS(read##bytes, bytes, false)           \
  ACCESS(write##bytes, bytes, true)           \
  ACCESS(unaligned_read##bytes, bytes, false) \
  ACCESS(unaligned_write##bytes, bytes, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* pointer, size_t bytes) {
  check_access(pointer, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, size_t bytes) {
  check_access(pointer, bytes, true, __builtin_return_address(0));
}
void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
  check_access(source, bytes, false, __builtin_return_address(0));
  check_access(target, bytes, true, __builtin_return_address(0));
  return memcpy(target, source, bytes);
}
void* __tsan_memmove(void* target, const void* source, size_t bytes) {
  check_access(source, bytes, false, __builtin_return_address(0));
  check_access(target, bytes, true, __builtin_return_address(0));
  return memmove(target, source, bytes);
}
void* __tsan_memset(void* target, int value, size_t bytes) {
  check_access(target, bytes, true, __builtin_return_address(0));
  return memset(target, value, bytes);
}
}

struct SourceLocation {
  const char* file;
  u32 line;
  u32 column;
};
struct TypeDescriptor {
  u16 kind;
  u16 info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char kind;
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

extern "C" {
void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t pointer) {
  u32 offset;
  const void* address = reinterpret_cast<const void*>(pointer);
  if (in_shared(address, 1, offset)) {
    fault("misaligned access to %s at byte %u of shared memory: not a multiple of %u", data->type->name, offset,
          1u << data->log_alignment);
  }
  for (const Region& region : regions) {
    if (address >= region.begin && address < region.end) {
      fault("misaligned access to %s at byte %td of %s (address %p): not a multiple of %u", data->type->name,
            static_cast<const char*>(address) - region.begin, region.name, address, 1u << data->log_alignment);
    }
  }
  fault("misaligned access to %s at address %p: not a multiple of %u", data->type->name, address,
        1u << data->log_alignment);
}
void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, uintptr_t pointer) {
  __ubsan_handle_type_mismatch_v1(data, pointer);
}
void __ubsan_handle_out_of_bounds(const OutOfBounds* data, uintptr_t index) {
  fault("index %lld is out of bounds for %s", static_cast<long long>(index), data->array->name);
}
void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* data, uintptr_t index) {
  __ubsan_handle_out_of_bounds(data, index);
}
}
