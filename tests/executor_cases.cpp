// The launches of test_executor.py, without torch: `executor_cases CASE [ARGUMENT...]`. What happened goes to
// stdout, for the test to judge. A line that a message has to name bears a comment "line: NAME".
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/simt.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// ---- streams ----------------------------------------------------------------------------------------------

// The calling thread and one more, which lives as long as the stream does.
class TwoThreads : public simt::Stream {
 public:
  TwoThreads() : other_([this] { serve(); }) {}
  ~TwoThreads() override {
    {
      const std::lock_guard lock(mutex_);
      quit_ = true;
    }
    changed_.notify_all();
    other_.join();
  }
  void parallel(const std::function<void()>& work) override {
    {
      const std::lock_guard lock(mutex_);
      work_ = &work;
    }
    changed_.notify_all();
    wait_for(caller_waits_for);
    work();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return work_ == nullptr; });
  }
  bool interrupted() override {
    ++asked;
    if (std::this_thread::get_id() != caller) ++asked_elsewhere;
    return interrupt_after >= 0 && seconds_since(start) > interrupt_after;
  }

  // The calling thread, or the other one, begins its work when this is true.
  std::atomic<bool>*caller_waits_for = nullptr, *other_waits_for = nullptr;
  double interrupt_after = -1;  // seconds
  Clock::time_point start = Clock::now();
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> asked{0}, asked_elsewhere{0};

 private:
  static void wait_for(const std::atomic<bool>* flag) {
    while (flag && !*flag) std::this_thread::yield();
  }
  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return quit_ || work_ != nullptr; });
      if (quit_) return;
      const std::function<void()>* work = work_;
      lock.unlock();
      wait_for(other_waits_for);
      (*work)();
      lock.lock();
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  bool quit_ = false;
  std::thread other_;
};

// The calling thread, `calls` times in a row: what a parallel region inside another makes of it.
struct Serial : simt::Stream {
  explicit Serial(int calls) : calls(calls) {}
  void parallel(const std::function<void()>& work) override {
    for (int i = 0; i < calls; ++i) work();
  }
  int calls;
};

struct Throws : simt::Stream {
  explicit Throws(bool after) : after(after) {}
  void parallel(const std::function<void()>& work) override {
    if (after) work();
    throw std::logic_error("no threads today");
  }
  bool after;
};

template <typename F>
bool launch(const char* what, dim3 grid, dim3 block, simt::Stream& stream, F kernel) {
  try {
    simt::launch(grid, block, stream, kernel);
    std::printf("%s: done\n", what);
    return true;
  } catch (const std::runtime_error& e) {
    std::printf("%s: error: %s\n", what, e.what());
  } catch (const std::logic_error& e) {
    std::printf("%s: logic_error: %s\n", what, e.what());
  }
  return false;
}

unsigned flat(const uint3& i, const uint3& n) { return i.x + n.x * (i.y + n.y * i.z); }

// ---- a launch that is right -------------------------------------------------------------------------------

// Sums 1 ... threads in shared memory, with a barrier between the rounds, into sums[block].
void sum_of_block(int* sums) {
  __shared__ int values[1024];
  const unsigned thread = flat(threadIdx, blockDim), threads = blockDim.x * blockDim.y * blockDim.z;
  values[thread] = thread + 1;
  for (unsigned stride = 1; stride < threads; stride *= 2) {
    __syncthreads();
    const int other = thread + stride < threads ? values[thread + stride] : 0;
    __syncthreads();
    values[thread] += other;
  }
  if (thread == 0) sums[flat(blockIdx, gridDim)] = values[0];
}

void report_sums(const char* what, dim3 grid, dim3 block, simt::Stream& stream) {
  const int threads = block.x * block.y * block.z;
  std::vector<int> sums(grid.x * grid.y * grid.z, -1);
  if (!launch(what, grid, block, stream, [&] { sum_of_block(sums.data()); })) return;
  int wrong = 0;
  for (const int sum : sums) wrong += sum != threads * (threads + 1) / 2;
  std::printf("%s: %d of %zu sums are wrong\n", what, wrong, sums.size());
}

// Every (threadIdx, blockIdx) once, and the same after a barrier as before it.
void cover(dim3 grid, dim3 block, simt::Stream& stream, bool barrier) {
  const unsigned threads = block.x * block.y * block.z, blocks = grid.x * grid.y * grid.z;
  std::vector<std::atomic<int>> seen(threads * blocks);
  std::atomic<int> out_of_range{0}, changed{0};
  launch("cover", grid, block, stream, [&] {
    const uint3 thread = threadIdx, of = blockIdx;
    const auto inside = [](const uint3& i, const uint3& n) { return i.x < n.x && i.y < n.y && i.z < n.z; };
    if (!inside(thread, block) || !inside(of, grid) || std::memcmp(&blockDim, &block, sizeof block) != 0 ||
        std::memcmp(&gridDim, &grid, sizeof grid) != 0)
      ++out_of_range;
    else
      ++seen[flat(of, grid) * threads + flat(thread, block)];
    if (!barrier) return;
    __syncthreads();
    if (std::memcmp(&thread, &threadIdx, sizeof thread) != 0 || std::memcmp(&of, &blockIdx, sizeof of) != 0)
      ++changed;
  });
  int missed = 0, twice = 0;
  for (const auto& n : seen) missed += n == 0, twice += n > 1;
  std::printf("cover: %zu threads, %d missed, %d twice, %d out of range, %d changed\n", seen.size(), missed,
              twice, out_of_range.load(), changed.load());
}

// The order in which the threads of a block come, before a barrier and after it.
void order(simt::Schedule schedule) {
  Serial stream(1);
  stream.schedule = schedule;
  std::string seen;
  launch("order", dim3(2), dim3(2, 2), stream, [&] {
    const std::string me = " " + std::to_string(flat(blockIdx, gridDim) * 4 + flat(threadIdx, blockDim));
    seen += me;
    __syncthreads();
    seen += me;
  });
  std::printf("order:%s\n", seen.c_str());
}

// What has landed in shared memory at each step of copies in three groups, of which the last is committed
// late.
void copies(simt::Schedule schedule) {
  Serial stream(1);
  stream.schedule = schedule;
  std::string seen;
  launch("copies", dim3(2), dim3(3), stream, [&] {
    alignas(16) static const float from[4] = {1, 2, 3, 4};
    alignas(16) float to[3][4] = {};  // its own, not the block's
    const auto note = [&](const char* step) {
      if (threadIdx.x != 1 || blockIdx.x != 1) return;
      seen += std::string(step) + " ";
      for (const auto& copy : to) seen += copy[0] != 0 ? "x" : "-";
      seen += ", ";
    };
    simt::copy_async(to[0], from, 16, 16);
    simt::copy_commit();
    simt::copy_async(to[1], from, 8, 8);
    simt::copy_commit();
    simt::copy_async(to[2], from, 4, 4);
    note("issued");
    simt::copy_wait(2);
    note("two in flight");
    simt::copy_wait(1);
    note("one");
    __syncthreads();
    simt::copy_wait(0);
    note("none");
    simt::copy_commit();
    simt::copy_wait(0);
    note("committed");
    for (int i = 0; i < 4; ++i)
      if (to[0][i] != from[i] || to[1][i] != (i < 2 ? from[i] : 0) || to[2][i] != (i < 1 ? from[i] : 0))
        seen += "wrong";
  });
  std::printf("copies: %s\n", seen.c_str());
}

// The bytes that are not read become 0, and are not looked at.
void copies_zeros(simt::Schedule schedule) {
  Serial stream(1);
  stream.schedule = schedule;
  launch("zeros", dim3(1), dim3(1), stream, [] {
    alignas(16) const float from[4] = {1, 2, 3, 4};
    alignas(16) float to[3][4] = {{5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}};
    simt::copy_async(to[0], from, 16, 4);
    simt::copy_async(to[1], from, 16, 0);
    simt::copy_async(to[2], nullptr, 4, 0);
    simt::copy_commit();
    simt::copy_wait(0);
    for (const auto& copy : to) std::printf("zeros: %g %g %g %g\n", copy[0], copy[1], copy[2], copy[3]);
  });
}

// ---- launches that are wrong ------------------------------------------------------------------------------

void half_skips() {
  if (threadIdx.x >= 32) return;
  __syncthreads();  // line: half
}

void one_skips_later() {
  __syncthreads();
  __syncthreads();
  if (threadIdx.x == 7 && blockIdx.x == 2) return;
  __syncthreads();  // line: later
}

void two_barriers() {
  if (threadIdx.x % 2 == 0)
    __syncthreads();  // line: even
  else
    __syncthreads();  // line: odd
}

void two_barriers_and_an_exit() {
  if (threadIdx.x == 63) return;
  if (threadIdx.x % 2 == 0)
    __syncthreads();  // line: even but last
  else
    __syncthreads();  // line: odd but last
}

template <int Bytes>
__attribute__((noinline)) int deep() {
  volatile char frame[Bytes];
  for (int i = 0; i < Bytes; ++i) frame[i] = static_cast<char>(i);
  return frame[0] + frame[Bytes - 1];
}

// One thread of block 1 goes deep. All meet at a barrier first, so that each has a stack of its own.
template <int Bytes>
void overrun() {
  __syncthreads();
  if (blockIdx.x == 1 && threadIdx.x == 5) deep<Bytes>();
  __syncthreads();
}

// Two copies that nobody waits for, of the last thread.
void in_flight() {
  static const float from = 1;
  static thread_local float to[2];
  simt::copy_async(&to[0], &from, 4, 4);
  simt::copy_commit();
  if (blockIdx.x == 1 && threadIdx.x == 31) simt::copy_commit(), simt::copy_async(&to[1], &from, 4, 4);
  simt::copy_wait(blockIdx.x == 1 && threadIdx.x == 31 ? 2 : 0);
}

void misaligned() {
  alignas(16) static const float from[8] = {};
  alignas(16) static thread_local float to[8];
  simt::copy_async(&to[0], &from[threadIdx.x == 3 ? 2 : 4], 16, 16);
  simt::copy_async(&to[2], &from[2], 8, 8);
  simt::copy_commit();
  simt::copy_wait(0);
}

// Four floats from global memory to shared, from there to each thread's own variables, and from those to others;
// thread 5's addresses in the memory that is named are not multiples of 16 bytes.
void copy4(const std::string& where) {
  Serial stream(1);
  alignas(16) static const float global[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  int wrong = 0;
  launch(("copy, " + where).c_str(), dim3(2), dim3(8), stream, [&] {
    alignas(16) static thread_local float shared[8][8];
    __syncthreads();  // each has a stack of its own
    alignas(16) float own[8] = {}, others[8] = {};
    const auto offset = [&](const char* memory) { return threadIdx.x == 5 && where == memory ? 1 : 0; };
    const float* from = &global[offset("global")];
    float* mine = &shared[threadIdx.x][offset("shared")];
    simt::copy(mine, from, 16);
    simt::copy(&own[offset("own")], mine, 16);
    simt::copy(&others[2], &own[offset("own")], 16);
    wrong += std::memcmp(&others[2], from, 16) != 0;
  });
  std::printf("copy: %d wrong\n", wrong);
}

// Endless, as far as a test is concerned; short between one barrier and the next.
void long_block() {
  for (int i = 0; i < 1000000; ++i) {
    if (threadIdx.x == 0) sleep_ms(1);
    __syncthreads();
  }
}

// The same without barriers: 1024 threads of 5 ms each.
void long_block_without_barriers() { sleep_ms(5); }

void all_skip_but(unsigned thread) {
  if (threadIdx.x != thread) return;
  __syncthreads();  // line: one
}

// ---- the cases --------------------------------------------------------------------------------------------

void stopped_by_another_block() {
  TwoThreads stream;
  std::atomic<int> begun{0};
  const auto start = Clock::now();
  launch("stopped", dim3(100000), dim3(64), stream, [&] {
    if (threadIdx.x == 0) ++begun, sleep_ms(1);
    if (blockIdx.x == 10) half_skips();
    __syncthreads();  // line: elsewhere
  });
  std::printf("stopped: %s blocks begun\n", begun < 1000 ? "few" : "many");
  // One OS thread in an endless block, and the block of the other one fails.
  launch("stopped in a block", dim3(2), dim3(64), stream, [&] {
    if (blockIdx.x == 0) {
      long_block();
    } else {
      if (threadIdx.x == 0) sleep_ms(100);
      half_skips();
    }
  });
  std::printf("stopped: %s\n", seconds_since(start) < 5 ? "in time" : "late");
}

void usable_after_failures() {
  TwoThreads stream;
  for (int i = 0; i < 5; ++i) {
    launch("half", dim3(3), dim3(64), stream, half_skips);
    report_sums("after half", dim3(5), dim3(64), stream);
    launch("two", dim3(2), dim3(64), stream, two_barriers);
    report_sums("after two", dim3(3), dim3(32, 32), stream);
    launch("bad block", dim3(2), dim3(1025), stream, half_skips);
    launch("overrun", dim3(2), dim3(64), stream, overrun<(64 << 10) + 512>);
    report_sums("after overrun", dim3(4), dim3(8, 8, 8), stream);
    stream.start = Clock::now(), stream.interrupt_after = 0;
    launch("interrupt", dim3(2), dim3(64), stream, long_block);
    stream.interrupt_after = -1;
    report_sums("after interrupt", dim3(4), dim3(8, 8, 8), stream);
  }
}

void shared_is_per_block() {
  TwoThreads stream;
  std::atomic<int> here{0}, mixed{0};
  launch("shared", dim3(2), dim3(64), stream, [&] {
    __shared__ unsigned owner;
    if (threadIdx.x == 0) {
      // Both blocks are at work, each on an OS thread of its own, when the first writes.
      ++here;
      while (here < 2) std::this_thread::yield();
      owner = blockIdx.x;
    }
    __syncthreads();
    if (threadIdx.x % 16 == 0) sleep_ms(1);
    if (owner != blockIdx.x) ++mixed;
  });
  std::printf("shared: %d mixed\n", mixed.load());
}

// Ctrl-C while the calling thread, the other one or both are in an endless block.
void interrupt(const std::string& where, bool barriers) {
  std::atomic<bool> begun{false};
  TwoThreads stream;
  if (where == "caller") stream.other_waits_for = &begun;
  if (where == "other") stream.caller_waits_for = &begun;
  stream.interrupt_after = 0.2;
  const auto start = stream.start = Clock::now();
  launch("interrupt", dim3(where == "both" ? 2 : 1), dim3(1024), stream, [&] {
    begun = true;
    barriers ? long_block() : long_block_without_barriers();
  });
  std::printf("interrupt: %s, asked %s, %d times elsewhere\n", seconds_since(start) < 2 ? "in time" : "late",
              stream.asked > 1 ? "more than once" : "hardly", stream.asked_elsewhere.load());
  stream.interrupt_after = -1;
  report_sums("after", dim3(4), dim3(64), stream);
}

void not_interrupted() {
  TwoThreads stream;
  launch("asked", dim3(40), dim3(64), stream, [&] {
    if (threadIdx.x == 0) sleep_ms(20);
    __syncthreads();
  });
  std::printf("asked: %s, %d times elsewhere\n", stream.asked > 1 ? "more than once" : "hardly",
              stream.asked_elsewhere.load());
}

void two_callers() {
  std::string right = "right";
  std::thread other([] {
    Serial stream(1);
    for (int i = 0; i < 200; ++i) {
      try {
        simt::launch(dim3(2), dim3(64), stream, [] { half_skips(); });
        std::puts("a divergent barrier went unnoticed");
      } catch (const std::runtime_error&) {
      }
    }
  });
  Serial stream(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<int> sums(3, -1);
    simt::launch(dim3(3), dim3(64), stream, [&] { sum_of_block(sums.data()); });
    for (const int sum : sums)
      if (sum != 64 * 65 / 2) right = "wrong";
  }
  other.join();
  std::printf("two callers: %s\n", right.c_str());
}

void nothing_to_do() {
  TwoThreads two;
  Serial one(1);
  std::atomic<int> ran{0};
  for (const dim3 grid : {dim3(0), dim3(0, 5), dim3(5, 0, 5), dim3(1, 1, 0)})
    for (simt::Stream* stream : {static_cast<simt::Stream*>(&two), static_cast<simt::Stream*>(&one)})
      launch("nothing", grid, dim3(64), *stream, [&] { ++ran; });
  std::printf("nothing: %d threads ran\n", ran.load());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const auto number = [&](int i) { return static_cast<unsigned>(std::strtoul(argv[i], nullptr, 10)); };
  const auto dims = [&](int i) { return dim3(number(i), number(i + 1), number(i + 2)); };
  TwoThreads two;

  if (name == "cover" && argc == 10) {
    Serial one(1);
    cover(dims(2), dims(5), number(8) == 1 ? static_cast<simt::Stream&>(one) : two, number(9) != 0);
  } else if (name == "sums") {
    report_sums("sums", dim3(5, 3, 2), dim3(32, 32), two);
    report_sums("sums", dim3(40), dim3(7, 5, 3), two);
  } else if (name == "half") {
    launch("half", dim3(1), dim3(64), two, half_skips);
  } else if (name == "later") {
    launch("later", dim3(1, 1, 1), dim3(32), two, one_skips_later);
    Serial one(1);
    launch("later", dim3(4), dim3(32), one, one_skips_later);
  } else if (name == "one-of-1024") {
    launch("one", dim3(1), dim3(1024), two, [] { all_skip_but(1023); });
  } else if (name == "two") {
    launch("two", dim3(1), dim3(64), two, two_barriers);
  } else if (name == "two-and-an-exit") {
    launch("two", dim3(1), dim3(64), two, two_barriers_and_an_exit);
  } else if (name == "overrun") {
    launch("overrun", dim3(3), dim3(64), two, overrun<(64 << 10) + 512>);
  } else if (name == "no-overrun") {
    launch("overrun", dim3(3), dim3(64), two, overrun<(60 << 10)>);
  } else if (name == "overrun-without-barriers") {
    Serial one(1);
    launch("overrun", dim3(3), dim3(64), one, [] { deep<(64 << 10) + 512>(); });
  } else if (name == "block" && argc == 5) {
    std::atomic<int> ran{0};
    launch("block", dim3(1), dims(2), two, [&] { ++ran; });
    std::printf("block: %d threads ran\n", ran.load());
  } else if (name == "order" && argc == 4) {
    order({number(2) != 0, number(3) != 0});
  } else if (name == "copies" && argc == 4) {
    copies({number(2) != 0, number(3) != 0});
    copies_zeros({number(2) != 0, number(3) != 0});
  } else if (name == "in-flight") {
    Serial one(1);
    for (const bool land_at_issue : {false, true}) {
      one.schedule.land_at_issue = land_at_issue;
      launch("in flight", dim3(3), dim3(32), one, in_flight);
    }
    report_sums("after", dim3(4), dim3(64), one);
  } else if (name == "misaligned") {
    launch("misaligned", dim3(1), dim3(32), two, misaligned);
  } else if (name == "copy" && argc == 3) {
    copy4(argv[2]);
  } else if (name == "stopped") {
    stopped_by_another_block();
  } else if (name == "usable") {
    usable_after_failures();
  } else if (name == "shared") {
    shared_is_per_block();
  } else if (name == "serial" && argc == 3) {
    Serial stream(number(2));
    report_sums("serial", dim3(3), dim3(64), stream);
    launch("half", dim3(3), dim3(64), stream, half_skips);
    report_sums("serial", dim3(3), dim3(32, 32), stream);
  } else if (name == "throws") {
    for (const bool after : {false, true}) {
      Throws stream(after);
      launch("throws", dim3(2), dim3(64), stream, [] { __syncthreads(); });
    }
    report_sums("after", dim3(3), dim3(64), two);
  } else if (name == "interrupt" && argc == 4) {
    interrupt(argv[2], number(3) != 0);
  } else if (name == "not-interrupted") {
    not_interrupted();
  } else if (name == "two-callers") {
    two_callers();
  } else if (name == "nothing") {
    nothing_to_do();
  } else {
    std::printf("no case %s\n", name.c_str());
    return 2;
  }
}
