// Runs a stage on the CPU, without torch, and says what it finds:
//
//   executor_stage STAGE check M N K      "right", or the first thing wrong: the executor's error, a result
//                                         that depends on the schedule, or one that is wrong
//   executor_stage STAGE edges BM BN BK   check at shapes around the edges of such tiles
//   executor_stage STAGE sectors M N K    "OPERAND REQUESTS SECTORS" of A, B, c and out, a line each: what
//                                         its warps ask of global memory, with rows of exactly M, N and K
//                                         and bases that are multiples of 256 bytes
//
// test_sanitize.py compiles it with sanitizers. Without, from the project's folder, for ncu's sake:
//
//   g++ -std=c++20 -O2 -x c++ -DSGEMM_HOST= -DSGEMM_COUNT_SECTORS -Wno-unknown-pragmas -Icsrc -Icsrc/stages
//       tests/executor_stage.cpp csrc/host/{simt,sectors,stages}.cpp csrc/stages/*.cu tests/stage_*.cu
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/sectors.h"
#include "host/simt.h"
#include "host/stages.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace sgemm_cpu::async_copy {
cudaError_t launch(const sgemm::Problem&, cudaStream_t);
}

namespace {

using sgemm::Problem;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct CallingThread : simt::Stream {
  void parallel(const std::function<void()>& work) override { work(); }
};

void launch(const std::string& stage, const Problem& problem, simt::Schedule schedule = {}) {
  CallingThread stream;
  stream.schedule = schedule;
  if (stage == "async_copy")
    sgemm_cpu::async_copy::launch(problem, &stream);
  else
    sgemm_cpu::launch(stage.c_str(), problem, stream);
}

// ---- operands ---------------------------------------------------------------------------------------------

// It ends where its allocation does, and begins `offset` elements after that, which is a multiple of 16 bytes;
// with AddressSanitizer those and the elements between one row and the next are out of bounds as well.
class Matrix {
 public:
  Matrix(int rows, int cols, int padding = 0, int offset = 0)
      : rows(rows), cols(cols), ld(cols + padding), offset_(offset), memory_(new float[offset + size()]) {
    fill(kNan);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(memory_.get(), offset * sizeof(float));
    for (int i = 0; i + 1 < rows; ++i) __asan_poison_memory_region(&at(i, cols), padding * sizeof(float));
#endif
  }
  float* data() { return &memory_[offset_]; }
  float& at(int i, int j) { return memory_[offset_ + i * ld + j]; }
  void fill(float value) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < cols; ++j) at(i, j) = value;
  }
  // Values of [-1, 1) that look random, others for each seed.
  void fill_from(uint32_t seed) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < cols; ++j) {
        seed = seed * 1664525 + 1013904223;
        at(i, j) = static_cast<int32_t>(seed) * 0x1p-31f;
      }
  }
  void copy_from(Matrix& other) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < cols; ++j) at(i, j) = other.at(i, j);
  }

  const int rows, cols;
  const int64_t ld;

 private:
  size_t size() const { return static_cast<size_t>((rows - 1) * ld + cols); }
  const int offset_;
  std::unique_ptr<float[]> memory_;
};

// What is between the rows and before the first, and what c is: it is read through any strides. Where the
// tiles cover a matrix, its rows begin at multiples of 16 bytes if `padding` and `offset` are multiples of 4.
struct Layout {
  const char* name;
  int padding, offset;  // AddressSanitizer knows an offset that is a multiple of 8 bytes
  enum { kNone, kWhole, kRow, kColumn, kNumber, kOut } c;
  float alpha, beta;
};
constexpr Layout kLayouts[] = {
    {"padded", 3, 0, Layout::kNone, 1.5f, 0.0f},
    {"whole", 0, 0, Layout::kWhole, 1.0f, -0.5f},
    {"c is a row", 4, 4, Layout::kRow, -1.0f, 2.0f},
    {"c is a column", 5, 0, Layout::kColumn, 0.0f, 1.0f},
    {"c is a number", 0, 2, Layout::kNumber, 1.0f, 1.0f},
    {"c is out", 4, 0, Layout::kOut, 0.5f, 1.0f},
};
constexpr int kAll = std::size(kLayouts), kTwo = 2;

// ---- check ------------------------------------------------------------------------------------------------

constexpr simt::Schedule kSchedules[] = {{false, false}, {true, false}, {false, true}, {true, true}};

std::string to_string(simt::Schedule s) {
  return std::string(s.reverse ? "in reverse" : "forward") + ", copies landing at " +
         (s.land_at_issue ? "issue" : "the wait");
}

std::string to_string(float value) {
  if (std::isnan(value)) return "nan";  // printf shows a sign as well
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string place(int i, int j) { return "(" + std::to_string(i) + ", " + std::to_string(j) + ")"; }

// One stage at one shape.
class Check {
 public:
  Check(const std::string& stage, int M, int N, int K)
      : stage_(stage), M_(M), N_(N), K_(K), a_(M, K), b_(K, N), c_(M, N), product_(M * N), bound_(M * N) {
    a_.fill_from(1), b_.fill_from(2), c_.fill_from(3);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j)
        for (int k = 0; k < K; ++k) {
          const double term = double{a_.at(i, k)} * b_.at(k, j);
          product_[i * N + j] += term, bound_[i * N + j] += std::abs(term);
        }
  }

  // "" or what is wrong with the first of the layouts.
  std::string operator()(int layouts) {
    for (int i = 0; i < layouts; ++i) {
      const Layout& layout = kLayouts[i];
      std::string wrong;
      try {
        wrong = check(layout);
      } catch (const std::runtime_error& e) {
        wrong = std::string("error: ") + e.what();
      }
      if (!wrong.empty())
        return std::to_string(M_) + " x " + std::to_string(N_) + " x " + std::to_string(K_) + ", " +
               layout.name + ": " + wrong;
    }
    return "";
  }

 private:
  std::string check(const Layout& layout) {
    const auto matrix = [&](int rows, int cols) { return Matrix(rows, cols, layout.padding, layout.offset); };
    Matrix a = matrix(M_, K_), b = matrix(K_, N_), out = matrix(M_, N_);
    Matrix c = matrix(layout.c == Layout::kRow || layout.c == Layout::kNumber ? 1 : M_,
                      layout.c == Layout::kColumn || layout.c == Layout::kNumber ? 1 : N_);
    a.copy_from(a_), b.copy_from(b_), c.copy_from(c_);
    Problem p{.M = M_,
              .N = N_,
              .K = K_,
              .A = a.data(),
              .B = b.data(),
              .c = c.data(),
              .out = out.data(),
              .lda = a.ld,
              .ldb = b.ld,
              .ldo = out.ld,
              .c_row = c.rows > 1 ? c.ld : 0,
              .c_col = c.cols > 1 ? 1 : 0,
              .alpha = layout.alpha,
              .beta = layout.beta};
    if (layout.c == Layout::kNone) p.c = nullptr;
    if (layout.c == Layout::kOut) p.c = out.data(), p.c_row = out.ld;
    const auto run = [&](simt::Schedule schedule) {
      if (layout.c == Layout::kOut)
        out.copy_from(c_);
      else
        out.fill(kNan);
      launch(stage_, p, schedule);
    };

    run(kSchedules[0]);
    Matrix first(M_, N_);
    first.copy_from(out);
    for (const simt::Schedule& schedule : {kSchedules[1], kSchedules[2], kSchedules[3]}) {
      run(schedule);
      for (int i = 0; i < M_; ++i)
        for (int j = 0; j < N_; ++j)
          if (std::memcmp(&first.at(i, j), &out.at(i, j), sizeof(float)) != 0)
            return "schedules differ at " + place(i, j) + ": " + to_string(first.at(i, j)) + " " +
                   to_string(kSchedules[0]) + ", " + to_string(out.at(i, j)) + " " + to_string(schedule);
    }

    for (int i = 0; i < M_; ++i)
      for (int j = 0; j < N_; ++j) {
        const double add = p.c ? double{layout.beta} * c.at(c.rows > 1 ? i : 0, c.cols > 1 ? j : 0) : 0.0;
        const double expected = layout.alpha * product_[i * N_ + j] + add;
        const double bound = std::abs(layout.alpha) * bound_[i * N_ + j] + std::abs(add);
        if (!(std::abs(out.at(i, j) - expected) <= (K_ + 4) * 0x1p-24 * bound))
          return "wrong at " + place(i, j) + ": " + to_string(out.at(i, j)) + ", expected " +
                 to_string(static_cast<float>(expected));
      }
    return "";
  }

  const std::string stage_;
  const int M_, N_, K_;
  Matrix a_, b_, c_;
  std::vector<double> product_, bound_;  // a @ b, and the sum of the terms' magnitudes
};

std::string edges(const std::string& stage, int BM, int BN, int BK) {
  // In K three tiles: a stage that loads one while it uses another comes back to where it began.
  const auto around = [](int tile, int tiles) {
    std::set<int> sizes{1, tile - 1, tile, tile + 1, tiles * tile};
    sizes.erase(0);
    return std::vector<int>(sizes.begin(), sizes.end());
  };
  const std::vector<int> Ms = around(BM, 2), Ns = around(BN, 2), Ks = around(BK, 3);
  for (size_t m = 0; m < Ms.size(); ++m)
    for (size_t n = 0; n < Ns.size(); ++n)
      for (size_t k = 0; k < Ks.size(); ++k) {
        const int M = Ms[m], N = Ns[n], K = Ks[k];
        const bool whole = M % BM == 0 && N % BN == 0 && K % BK == 0;  // these take the exact kernel
        // Of big tiles there are those, and a Latin square: each pair of sizes.
        if (BM * BN > 16 * 16 && !whole && (m + n + k) % Ks.size() != 0) continue;
        // How a result is stored does not depend on K: one, the quickest, is enough for the other kinds of c.
        const std::string wrong = Check(stage, M, N, K)(whole || K == 1 ? kAll : kTwo);
        if (!wrong.empty()) return wrong;
      }
  return "";
}

// ---- sectors ----------------------------------------------------------------------------------------------

void sectors(const std::string& stage, int M, int N, int K) {
  const auto zeros = [](int64_t size) {
    const size_t bytes = (size * sizeof(float) + 255) / 256 * 256;
    const std::shared_ptr<void> memory(std::aligned_alloc(256, bytes), std::free);
    std::memset(memory.get(), 0, bytes);
    return std::static_pointer_cast<float>(memory);
  };
  const auto a = zeros(int64_t{M} * K), b = zeros(int64_t{K} * N), c = zeros(int64_t{M} * N),
             out = zeros(int64_t{M} * N);
  simt::SectorCounter counter;
  simt::sector_counter = &counter;
  launch(stage, {.M = M,
                 .N = N,
                 .K = K,
                 .A = a.get(),
                 .B = b.get(),
                 .c = c.get(),
                 .out = out.get(),
                 .lda = K,
                 .ldb = N,
                 .ldo = N,
                 .c_row = N,
                 .c_col = 1,
                 .alpha = 1.0f,
                 .beta = 1.0f});
  simt::sector_counter = nullptr;
  const auto print = [&](const char* name, const std::shared_ptr<float>& operand) {
    const auto count = counter[operand.get()];
    std::printf("%s %lld %lld\n", name, static_cast<long long>(count.requests),
                static_cast<long long>(count.sectors));
  };
  print("A", a), print("B", b), print("c", c), print("out", out);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const std::string stage = argv[1], command = argv[2];
  const int x = std::atoi(argv[3]), y = std::atoi(argv[4]), z = std::atoi(argv[5]);
  if (command == "sectors") {
    sectors(stage, x, y, z);
  } else if (command == "check" || command == "edges") {
    const std::string wrong = command == "edges" ? edges(stage, x, y, z) : Check(stage, x, y, z)(kAll);
    std::printf("%s\n", wrong.empty() ? "right" : wrong.c_str());
  } else {
    return 2;
  }
}
