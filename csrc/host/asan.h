// What the executor has to do with AddressSanitizer: nothing, unless it is built with it, as in
//
//   g++ -fsanitize=address,undefined -fdata-sections -Wl,-T,csrc/host/shared_memory.ld
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

// All shared memory of the program, red zones included: from shared_memory.ld.
extern "C" volatile uint32_t simt_shared_begin[], simt_shared_end[];
#endif

namespace simt::asan {

#ifdef __SANITIZE_ADDRESS__

constexpr bool kOn = true;

struct Stack {
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* fake = nullptr;  // of AddressSanitizer's, while others run
};

// The memory is to be used anew: whoever was there before may have left red zones.
inline void forget(const void* memory, size_t bytes) { __asan_unpoison_memory_region(memory, bytes); }

// A switch is announced on the old stack and confirmed on the new one. A stack that has not run yet learns
// which it came from.
inline void leave(Stack& from, const Stack& to) {
  __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.bytes);
}
inline void back_on(Stack& stack) { __sanitizer_finish_switch_fiber(stack.fake, nullptr, nullptr); }
inline void first_on(Stack& from) { __sanitizer_finish_switch_fiber(nullptr, &from.bottom, &from.bytes); }

// NaNs in shared memory, where a GPU leaves whatever there was. Only here: thread-local variables could not
// be found like this, and nobody checks an ordinary build's results.
__attribute__((no_sanitize("address", "undefined"))) inline void poison_shared() {
  for (volatile uint32_t* word = simt_shared_begin; word < simt_shared_end; ++word) *word = UINT32_MAX;
}

// Reports now what is out of bounds, at the line that will have it written later.
inline void touch(void* memory, size_t bytes) {
  for (auto* byte = static_cast<volatile unsigned char*>(memory); bytes > 0; --bytes, ++byte) *byte = *byte;
}

#else

constexpr bool kOn = false;

struct Stack {
  const void* bottom = nullptr;
  size_t bytes = 0;
};
inline void forget(const void*, size_t) {}
inline void leave(Stack&, const Stack&) {}
inline void back_on(Stack&) {}
inline void first_on(Stack&) {}
inline void poison_shared() {}
inline void touch(void*, size_t) {}

#endif

}  // namespace simt::asan
