#include "simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>  // portable, and 50 times slower: it makes a system call at each switch
#define SIMT_UCONTEXT
#endif

#include "asan.h"
#include "sectors.h"

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;

// ---- switching from one stack to another ------------------------------------------------------------------

#ifndef SIMT_UCONTEXT
// Pushes the registers that a call preserves, saves the stack pointer in *from, and goes on where `to` was
// saved.
extern "C" void simt_switch(void** from, void* to);
#ifdef __x86_64__
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, %function
simt_switch:
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
  popq %rcx
  jmpq *%rcx  # a ret would always be predicted to go back to its own caller
.size simt_switch, .-simt_switch
)");
constexpr int kSavedWords = 6;  // what is popped before the address to go on at
#else
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, %function
simt_switch:
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
  br x30
.size simt_switch, .-simt_switch
)");
constexpr int kSavedWords = 11;
#endif
#endif

namespace simt {
namespace {

// Only the pages that are touched exist. The spacing must not be a power of two, or the stacks evict one
// another from the caches.
constexpr size_t kStackBytes = (asan::kOn ? 256 : 64) << 10;  // red zones take room
constexpr size_t kStackSpacing = kStackBytes + (4 << 10);
constexpr auto kPollEvery = std::chrono::milliseconds(50);
constexpr size_t kMaxThreads = 1024;  // of a block, as on a GPU
constexpr size_t kMemoryBytes = (1 + kMaxThreads) * kStackSpacing;
constexpr uint64_t kCanary = 0x5bd1e9955bd1e995;  // at the far end of each stack

// A cp.async in flight. It holds the bytes themselves: global memory is read at the line that asks for it, so
// a sanitizer names that line; a GPU reads it sometime before the wait, and nothing writes there meanwhile.
struct Copy {
  void* shared;
  size_t bytes;
  unsigned group;
  unsigned char data[16];

  void land() const { std::memcpy(shared, data, bytes); }
};

struct Fiber {
#ifdef SIMT_UCONTEXT
  ucontext_t context;
#else
  void* sp = nullptr;
#endif
  bool started = false;
  bool waiting = false;  // at the barrier in file:line
  const char* file = nullptr;
  int line = 0;
  uint3 thread = {};
  std::vector<Copy> copies;  // in flight, in the order of their issue
  unsigned group = 0;        // that the next copy belongs to: how often this thread committed
  asan::Stack stack;
};

// What the OS threads of one launch share.
struct Launch {
  dim3 grid, block;
  void (*thread)(const void*);
  const void* context;
  Stream& stream;

  unsigned threads = block.x * block.y * block.z;
  int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stopped{false};
  std::thread::id caller = std::this_thread::get_id();

  std::mutex mutex;
  std::condition_variable idle;
  int working = 0;    // OS threads in run_blocks()
  std::string error;  // of the first that failed

  void fail(const std::string& text) {
    const std::lock_guard lock(mutex);
    if (error.empty()) error = text;
    stopped = true;
  }
};

// One OS thread. It runs one block at a time, and a fiber never leaves it: the addresses of thread-local
// variables, which the compiler may keep across a barrier, stay right.
class Worker {
 public:
  Worker();
  ~Worker() {
    asan::forget(memory_, kMemoryBytes);
    munmap(memory_, kMemoryBytes);
  }
  void run_blocks(Launch& launch);
  void barrier(const char* file, int line);
  void misaligned(const void* address, size_t bytes);
  void copy_async(void* shared, const void* global, size_t bytes, size_t valid);
  void copy_commit() { ++current_->group; }
  void copy_wait(unsigned groups_in_flight);

 private:
  static void fiber_main();
  void run_thread(unsigned index);
  void run_block();
  void resume(Fiber& fiber);
  void switch_to(Fiber& from, Fiber& to);
  void start(unsigned index);
  void abandon() {  // the fibers of a block that failed never go on
    for (Fiber& f : fibers_) f.started = false;
  }
  bool all_at_one_barrier(unsigned used, unsigned waiting);
  bool stop_asked();

  char* memory_;
  char* stacks_;  // the first is above memory that a thread may overrun too
  std::vector<Fiber> fibers_{kMaxThreads};
  Fiber hub_;  // the OS thread's own stack
  Fiber* current_ = nullptr;
  Launch* launch_ = nullptr;
  unsigned next_thread_ = 0;  // the first of the block that has not begun
  std::chrono::steady_clock::time_point last_poll_;
};

Worker& this_worker() {
  static thread_local Worker worker;
  return worker;
}

uint3 unflatten(int64_t i, const uint3& n) {
  return {static_cast<unsigned>(i % n.x), static_cast<unsigned>(i / n.x % n.y),
          static_cast<unsigned>(i / n.x / n.y)};
}

std::string to_string(const uint3& v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

// Which thread of which block: for messages.
std::string who(const uint3& thread) {
  return "thread " + to_string(thread) + " of block " + to_string(blockIdx);
}

std::string place(const Fiber& f) {
  const char* slash = std::strrchr(f.file, '/');
  return std::string(slash ? slash + 1 : f.file) + ":" + std::to_string(f.line);
}

Worker::Worker() {
  void* p =
      mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(p);
  stacks_ = memory_ + kStackSpacing;
#ifdef MADV_NOHUGEPAGE
  madvise(memory_, kMemoryBytes, MADV_NOHUGEPAGE);
#endif
}

// ---- fibers -----------------------------------------------------------------------------------------------

void Worker::switch_to(Fiber& from, Fiber& to) {
  current_ = &to;
  asan::leave(from.stack, to.stack);
#ifdef SIMT_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  simt_switch(&from.sp, to.sp);
#endif
  asan::back_on(from.stack);
}

void Worker::start(unsigned index) {
  Fiber& f = fibers_[index];
  char* const stack = stacks_ + index * kStackSpacing;
  asan::forget(stack, kStackBytes);
  f.stack.bottom = stack;
  f.stack.bytes = kStackBytes;
  std::memcpy(stack, &kCanary, sizeof kCanary);
#ifdef SIMT_UCONTEXT
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack;
  f.context.uc_stack.ss_size = kStackBytes;
  makecontext(&f.context, &Worker::fiber_main, 0);
#else
  // Above the saved registers there are zeros: an end for whoever walks the stack.
  void** const sp = reinterpret_cast<void**>(stack + kStackBytes - 256);
  std::memset(sp, 0, 256);
  sp[kSavedWords] = reinterpret_cast<void*>(&Worker::fiber_main);
  f.sp = sp;
#endif
  f.started = true;
}

// A fiber whose thread ends begins the next one, so a kernel without barriers is little more than a loop on a
// single fiber. Now and then it lets the hub ask for Ctrl-C: Python's handlers must not run on a small stack.
void Worker::fiber_main() {
  Worker& w = this_worker();
  asan::first_on(w.hub_.stack);
  for (;;) {
    Fiber& self = *w.current_;
    for (int i = 0; i < 16 && w.next_thread_ < w.launch_->threads; ++i) w.run_thread(w.next_thread_++);
    self.waiting = false;
    w.switch_to(self, w.hub_);
  }
}

void Worker::run_thread(unsigned index) {
  Fiber& self = *current_;
  const bool reverse = launch_->stream.schedule.reverse;
  threadIdx = self.thread = unflatten(reverse ? launch_->threads - 1 - index : index, launch_->block);
  self.copies.clear();  // there are some only after an error
  launch_->thread(launch_->context);
  if (!self.copies.empty())
    launch_->fail(who(self.thread) + " ended with " + std::to_string(self.copies.size()) +
                  " cp.async in flight");
}

void Worker::barrier(const char* file, int line) {
  Fiber& self = *current_;
  self.waiting = true;
  self.file = file;
  self.line = line;
  switch_to(self, hub_);
}

void Worker::resume(Fiber& fiber) {
  threadIdx = fiber.thread;
  switch_to(hub_, fiber);
}

void Worker::misaligned(const void* address, size_t bytes) {
  const auto* at = static_cast<const char*>(address);
  const auto* own = static_cast<const char*>(current_->stack.bottom);
  if (at >= own && at < own + current_->stack.bytes) return;  // a register has no address
  launch_->fail(who(current_->thread) + ": a copy of " + std::to_string(bytes) +
                " bytes at an address that is not a multiple of them");
}

// ---- cp.async ---------------------------------------------------------------------------------------------

void Worker::copy_async(void* shared, const void* global, size_t bytes, size_t valid) {
  Fiber& self = *current_;
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % bytes != 0)
    launch_->fail(who(self.thread) + ": cp.async between addresses that are not multiples of its " +
                  std::to_string(bytes) + " bytes");
  Copy copy{shared, bytes, self.group, {}};
  std::memcpy(copy.data, global, valid);
  asan::touch(shared, bytes);
  if (launch_->stream.schedule.land_at_issue) copy.land();
  self.copies.push_back(copy);
}

void Worker::copy_wait(unsigned groups_in_flight) {
  Fiber& self = *current_;
  const auto in_flight = std::find_if(self.copies.begin(), self.copies.end(), [&](const Copy& copy) {
    return copy.group + groups_in_flight >= self.group;
  });
  if (!launch_->stream.schedule.land_at_issue)
    std::for_each(self.copies.begin(), in_flight, [](const Copy& copy) { copy.land(); });
  self.copies.erase(self.copies.begin(), in_flight);
}

// ---- blocks -----------------------------------------------------------------------------------------------

bool Worker::stop_asked() {
  if (std::this_thread::get_id() == launch_->caller) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_poll_ > kPollEvery) {
      last_poll_ = now;
      if (launch_->stream.interrupted()) launch_->fail("interrupted");
    }
  }
  return launch_->stopped;
}

bool Worker::all_at_one_barrier(unsigned used, unsigned waiting) {
  const Fiber *first = nullptr, *other = nullptr;
  for (unsigned i = 0; i < used; ++i) {
    const Fiber& f = fibers_[i];
    if (!f.waiting) continue;
    if (!first) first = &f;
    if (f.line != first->line || std::strcmp(f.file, first->file) != 0) other = &f;
  }
  if (!other && waiting == launch_->threads) return true;
  std::string text = "divergent barrier in block " + to_string(blockIdx) + ": thread " +
                     to_string(first->thread) + " waits at the __syncthreads() in " + place(*first);
  if (other) text += ", thread " + to_string(other->thread) + " at the one in " + place(*other);
  if (const unsigned ended = launch_->threads - waiting)
    text += ", and " + std::to_string(ended) + " of the " + std::to_string(launch_->threads) +
            " threads have ended without reaching it";
  launch_->fail(text);
  return false;
}

void Worker::run_block() {
  asan::poison_shared();
  unsigned used = 0;  // fibers that reached a barrier
  for (next_thread_ = 0; next_thread_ < launch_->threads && !stop_asked();) {
    if (!fibers_[used].started) start(used);
    resume(fibers_[used]);
    used += fibers_[used].waiting;
  }
  for (unsigned waiting = used; waiting > 0 && !stop_asked();) {
    if (!all_at_one_barrier(used, waiting)) break;
    waiting = 0;
    for (unsigned i = 0; i < used; ++i) {
      resume(fibers_[i]);
      waiting += fibers_[i].waiting;
    }
  }
  for (unsigned i = 0; i <= used && i < kMaxThreads && fibers_[i].started; ++i)
    if (std::memcmp(stacks_ + i * kStackSpacing, &kCanary, sizeof kCanary) != 0)
      launch_->fail("a thread of block " + to_string(blockIdx) + " used more than its " +
                    std::to_string(kStackBytes >> 10) + " KiB of stack");
  if (sector_counter) sector_counter->end_block();
  if (launch_->stopped) abandon();
}

void Worker::run_blocks(Launch& launch) {
  launch_ = &launch;
  blockDim = launch.block;
  gridDim = launch.grid;
  last_poll_ = std::chrono::steady_clock::now();
  for (int64_t b; !launch.stopped && (b = launch.next++) < launch.blocks;) {
    blockIdx = unflatten(b, launch.grid);
    run_block();
  }
}

}  // namespace

void launch(dim3 grid, dim3 block, Stream& stream, void (*thread)(const void*), const void* context) {
  const auto fits = [](unsigned n) { return 0 < n && n <= kMaxThreads; };
  if (!fits(block.x) || !fits(block.y) || !fits(block.z) || !fits(block.x * block.y * block.z))
    throw std::runtime_error("a block must have 1 to 1024 threads, got " + to_string(block));
  Launch launch{grid, block, thread, context, stream};

  stream.parallel([&launch] {
    // With a sanitizer all blocks have the same shared memory, and a counter counts one block at a time.
    if ((asan::kOn || sector_counter) && std::this_thread::get_id() != launch.caller) return;
    {
      const std::lock_guard lock(launch.mutex);
      ++launch.working;
    }
    try {
      this_worker().run_blocks(launch);
    } catch (const std::exception& e) {
      launch.fail(e.what());
    }
    std::unique_lock lock(launch.mutex);
    if (--launch.working == 0) launch.idle.notify_all();
    if (std::this_thread::get_id() != launch.caller) return;
    // Out of blocks, but others may still be at theirs: go on listening for Ctrl-C.
    while (!launch.idle.wait_for(lock, kPollEvery, [&] { return launch.working == 0; })) {
      lock.unlock();
      if (!launch.stopped && launch.stream.interrupted()) launch.fail("interrupted");
      lock.lock();
    }
  });
  if (!launch.error.empty()) throw std::runtime_error(launch.error);
}

}  // namespace simt

void simt::misaligned(const void* address, size_t bytes) { this_worker().misaligned(address, bytes); }
void simt::copy_async(void* shared, const void* global, size_t bytes, size_t valid) {
  this_worker().copy_async(shared, global, bytes, valid);
}
void simt::copy_commit() { this_worker().copy_commit(); }
void simt::copy_wait(unsigned groups_in_flight) { this_worker().copy_wait(groups_in_flight); }

void __syncthreads(const char* file, int line) { simt::this_worker().barrier(file, line); }
