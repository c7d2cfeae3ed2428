// Which instruction set runs: the widest that the processor has, unless a test chooses. All give equal bits.
#include <string.h>
#include "engine.h"

namespace embcache {

namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

static std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> list = {&portable::kernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) list.push_back(&avx2::kernels);
#if defined(EC_EMULATED_AVX512)  // the self-test brings its own AVX-512, made of AVX2
  const bool emulated = true;
#else
  const bool emulated = false;
#endif
  if (has_avx2 && emulated) list.push_back(&avx512::kernels);
  if (has_avx2 && !emulated && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    list.push_back(&avx512::kernels);
#endif
  return list;
}

static std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{usable().back()};
  return kernels;
}

const Kernels& active() { return *chosen().load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  for (const Kernels* k : usable())
    if (!strcmp(k->name, name)) {
      chosen().store(k);
      return true;
    }
  return false;
}

std::vector<const char*> available() {
  std::vector<const char*> names;
  for (const Kernels* k : usable()) names.push_back(k->name);
  return names;
}

}  // namespace embcache
