// Runs the kernels of the product ops on the CPU, without torch, and says what it finds:
//
//   executor_matmul METHOD A_BY_K B_BY_K ACCESS
//
// METHOD is a tile ("64x128"), "dot" or "axpy"; the others are numbers, as in Plan. It prints "right", or the first
// thing wrong: the executor's error, a result that depends on the schedule, one that is wrong, or an element written
// that is not the result's. Shapes are around the tile's edges; epilogues, parts of K, batches and layouts of C and
// out take turns. test_sanitize.py compiles it with sanitizers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "matmul/kernel.cuh"
// The kernels' names first: on the CPU they change the others'.
#include "matmul/launch.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace {

using namespace sgemm::matmul;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kGap = 12345.0f;  // between the elements of a matrix

struct CallingThread : simt::Stream {
  void parallel(const std::function<void()>& work) override { work(); }
};

// Where the elements of a batch of matrices lie.
struct Layout {
  bool by_rows;   // a row's elements are neighbours; else a column's
  int step;       // from one neighbour to the next
  int padding;    // elements between one line and the next, more than to the next multiple of `round`
  int round;      // lines begin at multiples of it
  bool repeated;  // every product of the batch has the same matrix
};

// A batch of matrices that ends where its allocation does; with AddressSanitizer the gaps are out of bounds.
class Matrices {
 public:
  Matrices(int batch, int rows, int cols, Layout layout, int offset = 0)
      : batch(batch), rows(rows), cols(cols), offset_(offset) {
    const int lines = layout.by_rows ? rows : cols, length = layout.by_rows ? cols : rows;
    const int64_t span = int64_t{length - 1} * layout.step + 1;
    const int64_t line = (span + layout.round - 1) / layout.round * layout.round + layout.padding;
    row = layout.by_rows ? line : layout.step, col = layout.by_rows ? layout.step : line;
    step = layout.repeated ? 0 : line * lines + layout.round;
    size_ = (layout.repeated ? 0 : batch - 1) * step + (lines - 1) * line + span;
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, ((offset + size_) * 4 + 63) / 64 * 64)));
    const int64_t all = ((offset + size_) * 4 + 63) / 64 * 16;
    for (int64_t i = 0; i < all; ++i) memory_[i] = kGap;
    used_.assign(all, false);
    for (int n = 0; n < batch; ++n)
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j) used_[&at(n, i, j) - memory_.get()] = true;
  }
  float& at(int n, int i, int j) { return memory_[offset_ + n * step + i * row + j * col]; }
  float* data() { return &memory_[offset_]; }
  void fill(float value) {
    for (size_t i = 0; i < used_.size(); ++i)
      if (used_[i]) memory_[i] = value;
  }
  void fill_from(uint32_t seed) {
    for (size_t i = 0; i < used_.size(); ++i) {
      seed = seed * 1664525 + 1013904223;
      if (used_[i]) memory_[i] = static_cast<int32_t>(seed) * 0x1p-31f;
    }
  }
  // Reading or writing what is none of its elements is an error, from now on.
  void forbid_gaps(bool forbid) {
#ifdef __SANITIZE_ADDRESS__
    for (size_t i = 0; i < used_.size(); i += 2)  // what it can tell apart: 8 bytes
      if (!used_[i] && !used_[i + 1]) {
        if (forbid)
          __asan_poison_memory_region(&memory_[i], 8);
        else
          __asan_unpoison_memory_region(&memory_[i], 8);
      }
#endif
  }
  bool gaps_are_whole() const {
    for (size_t i = 0; i < used_.size(); ++i)
      if (!used_[i] && memory_[i] != kGap) return false;
    return true;
  }

  const int batch, rows, cols;
  int64_t row, col, step;

 private:
  struct Free {
    void operator()(float* memory) const {
#ifdef __SANITIZE_ADDRESS__
      __asan_unpoison_memory_region(memory, 8);
#endif
      std::free(memory);
    }
  };
  const int offset_;
  int64_t size_;
  std::unique_ptr<float[], Free> memory_;
  std::vector<bool> used_;
};

constexpr simt::Schedule kSchedules[] = {{false, false}, {true, false}, {false, true}, {true, true}};

enum class Addend { kNone, kWhole, kRow, kColumn, kNumber, kOut };

struct Case {
  int batch, M, N, K, parts;
  Addend c;
  float alpha, beta;
  bool transposed;   // out is transposed, and the plan with it
  bool strided_out;  // out's neighbours are two apart
};

std::string place(int n, int i, int j) {
  return "(" + std::to_string(n) + ", " + std::to_string(i) + ", " + std::to_string(j) + ")";
}

std::string check(Plan plan, const Case& s, int BK) {
  // The plan's a_by_k is of the problem as it is computed: where it is transposed, of the other operand.
  const bool a_by_rows = plan.transposed ? plan.b_by_k : plan.a_by_k;
  const bool b_by_rows = plan.transposed ? !plan.a_by_k : !plan.b_by_k;
  const bool vector = plan.access == Access::kVector;
  const int step = plan.access == Access::kStrided ? 1 + s.M % 2 : 1, round = vector ? 4 : 1;
  const int offset = vector ? 0 : 1 + s.N % 3;
  Matrices a(s.batch, s.M, s.K, {a_by_rows, step, vector ? 4 : 3, round, s.batch > 1 && s.N % 2 == 0},
             offset);
  Matrices b(s.batch, s.K, s.N, {b_by_rows, step, 0, round, false}, offset);
  const bool one_row = s.c == Addend::kRow || s.c == Addend::kNumber;
  const bool one_col = s.c == Addend::kColumn || s.c == Addend::kNumber;
  Matrices c(s.batch, one_row ? 1 : s.M, one_col ? 1 : s.N, {s.M % 3 != 0, 1, 1, 1, false});
  const int out_round = s.strided_out ? 1 : 4;
  Matrices out(s.batch, s.M, s.N,
               {!s.transposed, s.strided_out ? 2 : 1, s.strided_out ? 3 : 4, out_round, false});
  a.fill_from(1), b.fill_from(2), c.fill_from(3);

  Problem p{.batch = s.batch,
            .M = s.M,
            .N = s.N,
            .K = s.K,
            .A = {a.data(), a.step, a.row, a.col},
            .B = {b.data(), b.step, b.row, b.col},
            .C = {c.data(), c.step, one_row ? 0 : c.row, one_col ? 0 : c.col},
            .out = {out.data(), out.step, out.row, out.col},
            .alpha = s.alpha,
            .beta = s.beta};
  if (s.c == Addend::kNone) p.C = {};
  if (s.c == Addend::kOut) p.C = {out.data(), out.step, out.row, out.col};
  plan.split_k = ((s.K + s.parts - 1) / s.parts + BK - 1) / BK * BK;
  plan.splits = static_cast<int>((s.K + plan.split_k - 1) / plan.split_k);
  std::vector<float> workspace(plan.splits > 1 ? size_t(plan.splits) * s.batch * s.M * s.N + 4 : 4);
  float* aligned = workspace.data();
  while (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) ++aligned;

  const auto value = [&](Matrices& m, int n, int i, int j) {
    return m.at(n, m.rows == 1 ? 0 : i, m.cols == 1 ? 0 : j);
  };
  Matrices before(s.batch, s.M, s.N, {true, 1, 0, 1, false});
  before.fill_from(4);
  std::vector<float> first;
  for (const simt::Schedule& schedule : kSchedules) {
    for (float& part : workspace) part = kNan;
    out.fill(kNan);
    if (s.c == Addend::kOut)
      for (int n = 0; n < s.batch; ++n)
        for (int i = 0; i < s.M; ++i)
          for (int j = 0; j < s.N; ++j) out.at(n, i, j) = before.at(n, i, j);
    CallingThread stream;
    stream.schedule = schedule;
    for (Matrices* m : {&a, &b, &c, &out}) m->forbid_gaps(true);
    const cudaError_t error = launch(plan, p, aligned, &stream);
    for (Matrices* m : {&a, &b, &c, &out}) m->forbid_gaps(false);
    if (error != cudaSuccess) return "error " + std::to_string(error);
    if (!out.gaps_are_whole()) return "an element was written that is not the result's";
    std::vector<float> now;
    for (int n = 0; n < s.batch; ++n)
      for (int i = 0; i < s.M; ++i)
        for (int j = 0; j < s.N; ++j) now.push_back(out.at(n, i, j));
    if (first.empty()) first = now;
    if (std::memcmp(first.data(), now.data(), now.size() * sizeof(float)) != 0) return "schedules differ";
  }

  for (int n = 0, at = 0; n < s.batch; ++n)
    for (int i = 0; i < s.M; ++i)
      for (int j = 0; j < s.N; ++j, ++at) {
        double product = 0, bound = 0;
        for (int k = 0; k < s.K; ++k) {
          const double term = double{a.at(n, i, k)} * b.at(n, k, j);
          product += term, bound += std::abs(term);
        }
        double add = 0;
        if (s.c == Addend::kOut)
          add = double{s.beta} * before.at(n, i, j);
        else if (s.c != Addend::kNone)
          add = double{s.beta} * value(c, n, i, j);
        const double expected = s.alpha * product + add;
        if (!(std::abs(first[at] - expected) <=
              (s.K + 4) * 0x1p-24 * (std::abs(s.alpha) * bound + std::abs(add))))
          return "wrong at " + place(n, i, j) + ": " + std::to_string(first[at]) + ", expected " +
                 std::to_string(expected);
      }
  return "";
}

std::string run(const std::string& method, bool a_by_k, bool b_by_k, Access access) {
  Plan plan{};
  plan.a_by_k = a_by_k, plan.b_by_k = b_by_k, plan.access = access;
  plan.a_vector = access == Access::kVector && a_by_k;
  int BM = MAX_SKINNY, BN = 128, BK = 128;
  if (method == "dot" || method == "axpy") {
    plan.method = method == "dot" ? Method::kDot : Method::kAxpy;
    if (b_by_k != (method == "dot")) return "no such kernel";
  } else {
    plan.method = Method::kTiled;
    plan.tile = -1;
    for (int i = 0; i < int(std::size(TILES)); ++i)
      if (method == TILES[i].name) plan.tile = i;
    if (plan.tile < 0) return "no such tile";
    BM = TILES[plan.tile].BM, BN = TILES[plan.tile].BN, BK = TILES[plan.tile].BK;
  }
  const bool skinny = plan.method != Method::kTiled;
  const std::vector<int> Ms = skinny ? std::vector<int>{1, 2, 4, 7} : std::vector<int>{1, BM - 1, BM, BM + 2};
  const std::vector<int> Ns =
      skinny ? std::vector<int>{1, 6, 263} : std::vector<int>{1, BN / 2 + 3, BN, BN + 5};
  const std::vector<int> Ks =
      skinny ? std::vector<int>{1, 300, 1030} : std::vector<int>{1, BK - 3, BK, 3 * BK + 2};
  const Addend addends[] = {Addend::kNone,   Addend::kWhole,  Addend::kRow,
                            Addend::kColumn, Addend::kNumber, Addend::kOut};
  uint32_t seed = 1;
  const auto one_of = [&](int choices) {
    return static_cast<int>((seed = seed * 1664525 + 1013904223) >> 16) % choices;
  };
  for (size_t m = 0; m < Ms.size(); ++m)
    for (size_t n = 0; n < Ns.size(); ++n)
      for (size_t k = 0; k < Ks.size(); ++k) {
        if (!skinny && BM * BN > 4096 && (m + n + k) % 4 != 0)
          continue;  // a Latin square: each pair of sizes
        if (skinny && (m + n + k) % 2 != 0) continue;
        Case s{.batch = 1 + one_of(2),
               .M = Ms[m],
               .N = Ns[n],
               .K = Ks[k],
               .parts = one_of(2) ? 1 : 2 + one_of(9),
               .c = addends[one_of(6)],
               .alpha = one_of(2) ? 0.5f : 1.0f,
               .beta = -0.75f,
               .transposed = one_of(3) == 0,
               .strided_out = one_of(3) == 0};
        Plan p = plan;
        p.columns = one_of(2) ? 1 : 4, p.sharing = 1 << one_of(4);
        p.transposed = s.transposed;
        if (s.transposed) std::swap(s.M, s.N);
        std::string wrong;
        try {
          wrong = check(p, s, BK);
        } catch (const std::runtime_error& e) {
          wrong = std::string("error: ") + e.what();
        }
        if (!wrong.empty()) {
          char text[300];
          std::snprintf(text, sizeof text, "batch %d, %d x %d x %d, %d parts, addend %d%s%s: ", s.batch, s.M,
                        s.N, s.K, s.parts, int(s.c), s.transposed ? ", transposed" : "",
                        s.strided_out ? ", strided out" : "");
          return text + wrong;
        }
      }
  return "right";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  std::printf("%s\n",
              run(argv[1], std::atoi(argv[2]), std::atoi(argv[3]), Access(std::atoi(argv[4]))).c_str());
}
