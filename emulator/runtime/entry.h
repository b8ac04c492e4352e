// Calls a kernel with parameters that lie as CUDA lays them out. Stands behind the generated source.

template <class... Parameters>
struct EmulatorList {};

// What can't be copied is passed by reference, as the host's calling convention does behind the scenes: a tensor map
// then keeps its address.
template <bool kCopied, class Parameter>
struct EmulatorPassed {
  using type = Parameter;
};
template <class Parameter>
struct EmulatorPassed<false, Parameter> {
  using type = const Parameter&;
};

constexpr unsigned emulator_next(unsigned offset, unsigned alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

template <class... Parameters>
constexpr unsigned emulator_bytes(void (*)(Parameters...)) {
  unsigned offset = 0;
  ((offset = emulator_next(offset, alignof(Parameters)) + sizeof(Parameters)), ...);
  return offset;
}

template <class... Parameters, class... Found>
__attribute__((no_sanitize("thread"))) void emulator_call(void (*kernel)(Parameters...), const char*, unsigned,
                                                          EmulatorList<>, const Found&... found) {
  using Passed =
      void (*)(typename EmulatorPassed<__is_constructible(Parameters, const Parameters&), Parameters>::type...);
  reinterpret_cast<Passed>(kernel)(found...);
}

template <class... Parameters, class Next, class... Rest, class... Found>
__attribute__((no_sanitize("thread"))) void emulator_call(void (*kernel)(Parameters...), const char* params,
                                                          unsigned offset, EmulatorList<Next, Rest...>,
                                                          const Found&... found) {
  const unsigned at = emulator_next(offset, alignof(Next));
  emulator_call(kernel, params, at + sizeof(Next), EmulatorList<Rest...>{}, found...,
                *reinterpret_cast<const Next*>(params + at));
}

template <class... Parameters>
__attribute__((no_sanitize("thread"))) void emulator_enter(void (*kernel)(Parameters...), const char* params) {
  emulator_call(kernel, params, 0, EmulatorList<Parameters...>{});
}
