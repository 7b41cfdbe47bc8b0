#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>

namespace sgemm::matmul {

namespace {

// What the model knows of a device. Measured on an H200; only ratios matter for the choice.
constexpr double FLOPS_PER_SM = 65.1e12 / 132;  // the multiply-adds' peak
constexpr double BYTES = 3.9e12;                // of memory, a second
constexpr double LAUNCH = 3e-6;                 // a kernel that does nothing
constexpr double FILL = 1.2e-6;                 // a block's first tile and its last stores
constexpr double PER_K_TILE = 0.25e-6;          // that one K tile takes at least, however small

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Along which of two dimensions an operand's elements are adjacent; where along neither, the smaller stride.
bool by_k(int64_t stride_k, int64_t k, int64_t stride_x, int64_t x) {
  const bool along_k = stride_k == 1 || k == 1, along_x = stride_x == 1 || x == 1;
  if (along_k != along_x) return along_k;
  return along_k ? k > 1 : std::abs(stride_k) <= std::abs(stride_x);
}

// Whether all chunks of four of an operand begin at multiples of 16 bytes.
bool aligned(const void* data, int64_t chunk_stride, int64_t chunk_extent, int64_t line_stride, int64_t lines,
             int64_t batch_stride, int64_t batch) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (chunk_stride == 1 || chunk_extent == 1) &&
         (lines == 1 || line_stride % 4 == 0) && (batch == 1 || batch_stride % 4 == 0);
}

struct Layout {
  bool by_k, aligned;
};

Layout layout_of(const Operand& o, int64_t stride_x, int64_t x, int64_t stride_k, int64_t k, int64_t batch) {
  const bool along_k = by_k(stride_k, k, stride_x, x);
  return {along_k, along_k ? aligned(o.data, stride_k, k, stride_x, x, o.batch, batch)
                           : aligned(o.data, stride_x, x, stride_k, k, o.batch, batch)};
}

double bytes_of(const Problem& p) {
  return 4.0 * p.batch * (double(p.M) * p.K + double(p.K) * p.N + double(p.M) * p.N);
}

// What adding up the parts takes: a launch, and reading them from the L2 cache or memory.
double reduction(const Problem& p, int splits) {
  if (splits == 1) return 0;
  const double bytes = 4.0 * p.batch * p.M * p.N * (splits + 1);
  return LAUNCH + 2 * bytes / BYTES;
}

// A part of K is a whole number of the tile's BK; the number of parts follows.
void split(Plan& plan, const Problem& p, int parts, int BK) {
  plan.split_k = std::max<int64_t>(ceil_div(ceil_div(p.K, parts), BK), 1) * BK;
  plan.splits = static_cast<int>(std::max<int64_t>(ceil_div(p.K, plan.split_k), 1));
  plan.workspace = plan.splits == 1 ? 0 : plan.splits * p.batch * p.M * p.N;
}

// How much of its speed a multiprocessor has with so many warps.
double busy(double warps) { return std::min(1.0, 0.25 + warps / 14); }

double tiled_seconds(const Problem& p, const Plan& plan, const Device& device) {
  const TileInfo& tile = TILES[plan.tile];
  const double blocks =
      double(ceil_div(p.M, tile.BM)) * ceil_div(p.N, tile.BN) * p.batch * double(plan.splits);
  const double k_tiles = std::max<double>(1, ceil_div(std::min<int64_t>(plan.split_k, p.K), tile.BK));
  const double rate = FLOPS_PER_SM * tile.share * (plan.vector ? 1 : 0.85);  // of one multiprocessor
  const double flop = 2.0 * tile.BM * tile.BN * tile.BK * k_tiles;           // of one block
  const double slots = double(device.sms) * tile.blocks;
  const double waves = std::floor(blocks / slots);
  const double left = std::ceil((blocks - waves * slots) / device.sms);  // blocks beside each other, at last
  const double floor = FILL + k_tiles * PER_K_TILE;
  const auto together = [&](double n) {
    const double warps = n * tile.threads / 32, full = tile.blocks * tile.threads / 32.0;
    return n == 0 ? 0.0 : std::max(floor, FILL + n * flop / (rate * busy(warps) / busy(full)));
  };
  const double compute = waves * (together(tile.blocks) - FILL * 0.7) + together(left);
  return LAUNCH + std::max(compute, bytes_of(p) / BYTES) + reduction(p, plan.splits);
}

double skinny_seconds(const Problem& p, const Plan& plan, const Device& device) {
  // Eight warps to a block, of which each has some 2 KiB on the way; latency is about a microsecond.
  const int64_t columns = plan.method == Method::kAxpy ? 128 : 8;
  const double blocks = double(ceil_div(p.N, columns)) * p.batch * plan.splits;
  const double in_flight = std::min(blocks / device.sms, 6.0) * 16e3 * std::min<double>(device.sms, blocks);
  const double rate = std::min(BYTES, in_flight / 1e-6) * (plan.vector ? 1 : 0.5);
  return LAUNCH + FILL + bytes_of(p) / rate + reduction(p, plan.splits);
}

std::string percent(double part) {
  std::ostringstream text;
  text << static_cast<int>(std::lround(100 * part)) << " %";
  return text.str();
}

void explain(Plan& plan, const Problem& p, const Device& device) {
  std::ostringstream text;
  if (plan.method == Method::kTiled) {
    const TileInfo& tile = TILES[plan.tile];
    const int64_t blocks = ceil_div(p.M, tile.BM) * ceil_div(p.N, tile.BN) * p.batch * plan.splits;
    text << blocks << " blocks for " << int64_t{device.sms} * tile.blocks << " places on " << device.sms
         << " multiprocessors";
    if (plan.splits > 1) text << ", K in " << plan.splits << " parts because there are few tiles";
  } else {
    text << p.M << (p.M == 1 ? " row" : " rows") << ": bound by reading "
         << percent(double(p.K) * p.N / (double(p.M) * p.K + double(p.K) * p.N + double(p.M) * p.N))
         << " of the bytes, the larger operand, once";
    if (plan.splits > 1) text << ", K in " << plan.splits << " parts to keep enough of it on the way";
  }
  if (!plan.vector) text << "; elements one by one, as an operand is unaligned or has no adjacent ones";
  if (plan.transposed) text << "; rows and columns exchanged";
  plan.reason = text.str();
}

// What the problem asks of its kernels.
struct Asked {
  Problem problem;  // as it is computed
  bool transposed;
  Layout a, b;

  explicit Asked(const Problem& p) : problem(p), transposed(false) {
    // Stores run along n; and the skinny kernels want few rows.
    const bool few_columns = p.N <= MAX_SKINNY && p.M > p.N;
    const bool down = p.out.row == 1 && p.out.col != 1 && p.N > 1 && p.M > MAX_SKINNY;
    transposed = few_columns || down;
    if (transposed) problem = p.transposed();
    const Problem& q = problem;
    a = layout_of(q.A, q.A.row, q.M, q.A.col, q.K, q.batch);
    b = layout_of(q.B, q.B.col, q.N, q.B.row, q.K, q.batch);
  }
};

std::optional<Plan> plan_of(const Asked& asked, Method method, int tile, int parts, const Device& device) {
  const Problem& p = asked.problem;
  const bool tiled = method == Method::kTiled, both = asked.a.aligned && asked.b.aligned;
  if (tiled ? !both && !TILES[tile].ragged : p.M > MAX_SKINNY || asked.b.by_k != (method == Method::kDot))
    return {};
  Plan plan{.method = method,
            .tile = tile,
            .transposed = asked.transposed,
            .a_by_k = asked.a.by_k,
            .b_by_k = asked.b.by_k,
            .vector = tiled ? both : asked.b.aligned,
            .a_vector = asked.a.by_k && asked.a.aligned};
  split(plan, p, parts, tiled ? TILES[tile].BK : 128);
  // The parts are added up by threads that are counted in 31 bits.
  if (plan.splits > 1 && (plan.workspace > device.max_workspace || p.M * p.N > INT32_MAX / 2)) return {};
  plan.seconds = tiled ? tiled_seconds(p, plan, device) : skinny_seconds(p, plan, device);
  return plan;
}

constexpr int PARTS[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128};

template <typename F>
void each_kernel(const F& f) {
  for (int tile = 0; tile < int(std::size(TILES)); ++tile) f(Method::kTiled, tile);
  f(Method::kDot, 0);
  f(Method::kAxpy, 0);
}

}  // namespace

const char* kernel_name(const Plan& plan) {
  if (plan.method == Method::kTiled) return TILES[plan.tile].name;
  return plan.method == Method::kDot ? "dot" : "axpy";
}

std::vector<Plan> candidates(const Problem& problem, const Device& device) {
  const Asked asked(problem);
  std::vector<Plan> found;
  each_kernel([&](Method method, int tile) {
    int64_t splits = 0;
    for (int parts : PARTS) {
      const std::optional<Plan> plan = plan_of(asked, method, tile, parts, device);
      if (!plan || plan->splits == splits) continue;
      splits = plan->splits;
      found.push_back(*plan);
    }
  });
  return found;
}

Plan select(const Problem& problem, const Device& device) {
  const std::vector<Plan> all = candidates(problem, device);
  Plan best = *std::min_element(all.begin(), all.end(),
                                [](const Plan& a, const Plan& b) { return a.seconds < b.seconds; });
  explain(best, Asked(problem).problem, device);
  return best;
}

std::optional<Plan> plan_with(const std::string& kernel, int parts, const Problem& problem,
                              const Device& device) {
  const Asked asked(problem);
  std::optional<Plan> found;
  each_kernel([&](Method method, int tile) {
    const std::optional<Plan> plan = plan_of(asked, method, tile, parts, device);
    if (plan && kernel == kernel_name(*plan)) found = plan;
  });
  if (found) explain(*found, asked.problem, device);
  return found;
}

}  // namespace sgemm::matmul
