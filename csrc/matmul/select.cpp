#include "select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <utility>

#include "schedule.h"

namespace sgemm::matmul {

namespace {

// What the model knows of a device: an H200, fitted by benchmarks/fit_select.py. Only ratios matter for the
// choice.
constexpr double WARP_BYTES = 512;  // a chunk of each lane

struct Model {
  double flops_per_sm = 65.1e12 / 132;  // the multiply-adds' peak
  double bytes = 3.9e12;                // of memory, a second
  double launch = 1.5e-6;               // a kernel that does nothing
  double reduction = 2.5e-6;            // one more kernel, which adds parts up
  double per_part = 0.02e-6;            // that each part takes there
  double latency = 1.0e-6;              // of memory
  double fill = 1.2e-6;                 // a block's first tile and its last stores
  double wave = 0.42e-6;                // a skinny kernel's blocks, that add up their sums
  double ring_begin = 9.9e-6;           // a ring kernel's first tiles of A and B
  double ring_end = 1.05e-6;            // what ends one of its tiles, beside the stores
  double panels = 1.25e-6;              // one more kernel, which copies operands
  double per_k_tile = 0.25e-6;          // that one K tile takes at least, however small
  double exchanged_store = 2;           // how much longer a ring kernel stores down columns
  double tiles[std::size(TILES)], rings[std::size(RINGS)];  // shares, see TileInfo

  Model() {
    for (size_t i = 0; i < std::size(TILES); ++i) tiles[i] = TILES[i].share;
    for (size_t i = 0; i < std::size(RINGS); ++i) rings[i] = RINGS[i].share;
  }
};
Model model;  // benchmarks/fit_select.py fits it; nobody else writes to it

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Along which of two dimensions an operand's elements are adjacent; where along neither, the smaller stride.
bool by_k(int64_t stride_k, int64_t k, int64_t stride_x, int64_t x) {
  const bool along_k = stride_k == 1 || k == 1, along_x = stride_x == 1 || x == 1;
  if (along_k != along_x) return along_k;
  return along_k ? k > 1 : std::abs(stride_k) <= std::abs(stride_x);
}

struct Layout {
  bool by_k;
  Access access;
  bool whole;  // no chunk reaches beyond the operand's end
  bool boxed;  // the copy engine can copy its tiles
};

// x is an operand's other dimension than k.
Layout layout_of(const Operand& o, int64_t stride_x, int64_t x, int64_t stride_k, int64_t k, int64_t batch) {
  Layout found{by_k(stride_k, k, stride_x, x), Access::kStrided, false, false};
  const int64_t neighbours = found.by_k ? k : x, lines = found.by_k ? x : k;
  if ((found.by_k ? stride_k : stride_x) != 1 && neighbours != 1) return found;
  const int64_t line = found.by_k ? stride_x : stride_k;
  const bool aligned = reinterpret_cast<uintptr_t>(o.data) % 16 == 0 && (lines == 1 || line % 4 == 0) &&
                       (batch == 1 || o.batch % 4 == 0);
  found.access = aligned ? Access::kVector : Access::kAdjacent;
  found.whole = neighbours % 4 == 0;
  constexpr int64_t FARTHEST = int64_t{1} << 36;  // floats
  const auto apart = [](int64_t stride, int64_t least) { return stride >= least && stride < FARTHEST; };
  found.boxed =
      aligned && (lines == 1 || apart(line, neighbours)) && (batch == 1 || o.batch == 0 || apart(o.batch, 1));
  return found;
}

double bytes_of(const Problem& p) {
  return 4.0 * p.batch * (double(p.M) * p.K + double(p.K) * p.N + double(p.M) * p.N);
}

// What adding up the parts takes: a launch, and reading them from the L2 cache or memory.
double reduction(const Problem& p, int splits) {
  if (splits == 1) return 0;
  const double bytes = 4.0 * p.batch * p.M * p.N * (splits + 1);
  return model.reduction + splits * model.per_part + 2 * bytes / model.bytes;
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
  const double rate =
      model.flops_per_sm * model.tiles[plan.tile] * (plan.access == Access::kVector ? 1 : 0.75);
  const double flop = 2.0 * tile.BM * tile.BN * tile.BK * k_tiles;  // of one block
  const double slots = double(device.sms) * tile.blocks;
  const double waves = std::floor(blocks / slots);
  const double left = std::ceil((blocks - waves * slots) / device.sms);  // blocks beside each other, at last
  const double floor = model.fill + k_tiles * model.per_k_tile;
  // What blocks store nobody computes beside, but other blocks of the multiprocessor.
  const double store = 4.0 * tile.BM * tile.BN / (model.bytes / device.sms) / tile.blocks;
  const auto together = [&](double n) {
    const double warps = n * tile.threads / 32, full = tile.blocks * tile.threads / 32.0;
    return n == 0 ? 0.0
                  : std::max(floor, model.fill + n * (flop / (rate * busy(warps) / busy(full)) + store));
  };
  const double compute = waves * (together(tile.blocks) - model.fill * 0.7) + together(left);
  return model.launch + std::max(compute, bytes_of(p) / model.bytes) + reduction(p, plan.splits);
}

Schedule schedule_of(const Problem& p, const Plan& plan, const Device& device) {
  const RingInfo& tile = RINGS[plan.tile];
  return ring_schedule(tile.BM, tile.BN, tile.BK, p, plan.streamed, device.sms);
}

// An operand that is copied to a panel: its pitch, and all floats.
int64_t panel_pitch(int64_t x) { return ceil_div(x, 4) * 4; }
int64_t panel_floats(const Operand& o, int64_t x, int64_t k, int64_t batch) {
  return panel_pitch(x) * k * (o.batch == 0 ? 1 : batch);
}

double ring_seconds(const Problem& p, const Plan& plan, const Device& device) {
  const RingInfo& tile = RINGS[plan.tile];
  const Schedule schedule = schedule_of(p, plan, device);
  const double rate = model.flops_per_sm * model.rings[plan.tile];
  const double k_tile = 2.0 * tile.BM * tile.BN * tile.BK / rate;
  const double store = plan.exchanged ? model.exchanged_store : 1;
  const double end = model.ring_end + store * 4.0 * tile.BM * tile.BN / (model.bytes / device.sms);
  double compute = model.ring_begin + schedule.most_whole() * (end + schedule.k_tiles() * k_tile);
  if (schedule.shared_tiles() > 0) {
    const double bytes = 4.0 * tile.BM * tile.BN * (schedule.pieces() * 2 + schedule.shared_tiles());
    const double work = double(schedule.shared_tiles()) * schedule.k_tiles() / schedule.blocks();
    compute += std::ceil(work) * k_tile + (1 + double(schedule.shared_tiles()) / schedule.blocks()) * end +
               model.reduction + bytes / (2 * model.bytes);
  }
  double copy = 0;
  if (plan.a_panel) copy += 8.0 * panel_floats(p.A, p.M, p.K, p.batch) / model.bytes;
  if (plan.b_panel) copy += 8.0 * panel_floats(p.B, p.N, p.K, p.batch) / model.bytes;
  if (copy > 0) copy += model.panels;
  return model.launch + copy + std::max(compute, bytes_of(p) / model.bytes);
}

double skinny_seconds(const Problem& p, const Plan& plan, const Device& device) {
  const bool dot = plan.method == Method::kDot;
  const double parts = double(p.batch) * plan.splits;
  const double warps =
      parts * (dot ? ceil_div(p.N, plan.columns) * plan.sharing : ceil_div(p.N, 128) * SKINNY_WARPS);
  // Chunks of 16 bytes that each lane has on their way.
  const double chunks = dot ? (p.M * plan.columns <= 4 ? 2 : 1) * plan.columns : 4;
  const double in_flight = std::min(warps, 16.0 * device.sms) * chunks * WARP_BYTES;
  // Warps that each go along k by themselves drift apart: A has to stay in the first cache.
  const bool cached = !dot || p.M < 4 || plan.sharing > 1 || 4.0 * p.M * plan.split_k <= 60e3;
  const double rate = std::min(model.bytes * (cached ? 1 : 0.7), in_flight / model.latency) *
                      (plan.access == Access::kVector ? 1 : 0.5);
  const double compute = 2.0 * p.batch * p.M * p.N * p.K / (0.4 * model.flops_per_sm * device.sms);
  const double waves = std::ceil(warps / (24.0 * device.sms));  // of blocks that begin and end
  return model.launch + model.fill + (waves - 1) * model.wave * double(2 + p.M) +
         std::max(bytes_of(p) / rate, compute) + reduction(p, plan.splits);
}

// How kDot's warps share the columns: several columns a warp read the same elements of A once, but few
// columns want many warps.
void share(Plan& plan, const Problem& p, const Device& device) {
  const int64_t parts = p.batch * plan.splits, wanted = int64_t{16} * device.sms;  // warps
  constexpr int MOST = 4;
  plan.columns = ceil_div(p.N, MOST) * SKINNY_WARPS * parts >= 2 * wanted ? MOST : 1;
  plan.sharing = SKINNY_WARPS;
  while (plan.sharing > 1 && ceil_div(p.N, plan.columns) * parts * (plan.sharing / 2) >= wanted)
    plan.sharing /= 2;
}

std::string percent(double part) {
  std::ostringstream text;
  text << static_cast<int>(std::lround(100 * part)) << " %";
  return text.str();
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

  Asked exchanged() const {
    Asked other = *this;
    other.problem = problem.transposed();
    other.transposed = !transposed;
    std::swap(other.a, other.b);
    return other;
  }
};

std::optional<Plan> ring_plan(const Asked& asked, int tile, bool streamed, bool exchanged,
                              const Device& device) {
  const Problem& p = asked.problem;
  const RingInfo& info = RINGS[tile];
  const int64_t tiles = ceil_div(p.M, info.BM) * ceil_div(p.N, info.BN);
  // Tiles and panels are counted in 31 bits.
  if (!device.hopper || p.K == 0 ||
      std::max(tiles, ceil_div(std::max(p.M, p.N), 64) * ceil_div(p.K, 64)) > INT32_MAX / 2 / p.batch)
    return {};
  if (info.a_by_k && !(asked.a.by_k && asked.a.boxed)) return {};
  Plan plan{.method = Method::kRing,
            .tile = tile,
            .transposed = asked.transposed,
            .a_by_k = asked.a.by_k,
            .b_by_k = asked.b.by_k,
            .access = Access::kVector,
            .splits = 1,
            .split_k = p.K,
            .exchanged = exchanged,
            .a_panel = !info.a_by_k && (asked.a.by_k || !asked.a.boxed),
            .b_panel = asked.b.by_k || !asked.b.boxed,
            .streamed = streamed};
  const Schedule schedule = schedule_of(p, plan, device);
  plan.blocks = schedule.blocks();
  if (streamed && schedule.shared_tiles() == 0) return {};
  plan.workspace = schedule.pieces() * info.BM * info.BN;
  if (plan.a_panel) plan.workspace += panel_floats(p.A, p.M, p.K, p.batch);
  if (plan.b_panel) plan.workspace += panel_floats(p.B, p.N, p.K, p.batch);
  if (plan.workspace > device.max_workspace) return {};
  plan.seconds = ring_seconds(p, plan, device);
  return plan;
}

std::optional<Plan> plan_of(const Asked& asked, Method method, int tile, int parts, const Device& device) {
  const Problem& p = asked.problem;
  if (method == Method::kRing) {
    constexpr int COUNT = std::size(RINGS);
    return tile < COUNT ? ring_plan(asked, tile, parts > 1, false, device)
                        : ring_plan(asked.exchanged(), tile - COUNT, parts > 1, true, device);
  }
  const bool tiled = method == Method::kTiled;
  Access access = tiled ? std::max(asked.a.access, asked.b.access) : asked.b.access;
  // cp.async reads no more of a chunk than it is told to, but compute-sanitizer takes all of it as read.
  const auto cut = [](const Layout& l) { return !l.by_k && !l.whole; };
  if (tiled && (cut(asked.a) || cut(asked.b))) access = std::max(access, Access::kAdjacent);
  if (tiled ? access > TILES[tile].least : p.M > MAX_SKINNY || asked.b.by_k != (method == Method::kDot))
    return {};
  Plan plan{.method = method,
            .tile = tile,
            .transposed = asked.transposed,
            .a_by_k = asked.a.by_k,
            .b_by_k = asked.b.by_k,
            .access = access,
            .a_vector = asked.a.by_k && asked.a.access == Access::kVector};
  split(plan, p, parts, tiled ? TILES[tile].BK : 128);
  // The parts are added up by threads that are counted in 31 bits.
  if (plan.splits > 1 && (plan.workspace > device.max_workspace || p.M * p.N > INT32_MAX / 2)) return {};
  if (method == Method::kDot) share(plan, p, device);
  plan.seconds = tiled ? tiled_seconds(p, plan, device) : skinny_seconds(p, plan, device);
  return plan;
}

constexpr int PARTS[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128};

template <typename F>
void each_kernel(const F& f) {
  for (int tile = 0; tile < int(std::size(TILES)); ++tile) f(Method::kTiled, tile);
  for (int tile = 0; tile < 2 * int(std::size(RINGS)); ++tile) f(Method::kRing, tile);  // and exchanged
  f(Method::kDot, 0);
  f(Method::kAxpy, 0);
}

}  // namespace

double* model_constant(const std::string& name) {
  const std::pair<const char*, double*> known[] = {
      {"flops_per_sm", &model.flops_per_sm},
      {"bytes", &model.bytes},
      {"launch", &model.launch},
      {"reduction", &model.reduction},
      {"per_part", &model.per_part},
      {"latency", &model.latency},
      {"fill", &model.fill},
      {"wave", &model.wave},
      {"ring_begin", &model.ring_begin},
      {"ring_end", &model.ring_end},
      {"panels", &model.panels},
      {"per_k_tile", &model.per_k_tile},
      {"exchanged_store", &model.exchanged_store},
  };
  for (const auto& [known_name, value] : known)
    if (name == known_name) return value;
  for (size_t i = 0; i < std::size(TILES); ++i)
    if (name == TILES[i].name) return &model.tiles[i];
  for (size_t i = 0; i < std::size(RINGS); ++i)
    if (name == RINGS[i].name) return &model.rings[i];
  return nullptr;
}

std::string kernel_name(const Plan& plan) {
  if (plan.method == Method::kTiled) return TILES[plan.tile].name;
  if (plan.method == Method::kRing) return std::string(RINGS[plan.tile].name) + (plan.exchanged ? "t" : "");
  return plan.method == Method::kDot ? "dot" : "axpy";
}

std::string explain(const Plan& plan, const Problem& problem, const Device& device) {
  const Problem p = plan.transposed ? problem.transposed() : problem;
  std::ostringstream text;
  if (plan.method == Method::kTiled) {
    const TileInfo& tile = TILES[plan.tile];
    const int64_t blocks = ceil_div(p.M, tile.BM) * ceil_div(p.N, tile.BN) * p.batch * plan.splits;
    text << blocks << " blocks for " << int64_t{device.sms} * tile.blocks << " places on " << device.sms
         << " multiprocessors";
    if (plan.splits > 1) text << ", K in " << plan.splits << " parts because there are few tiles";
  } else if (plan.method == Method::kRing) {
    const Schedule schedule = schedule_of(p, plan, device);
    text << schedule.tiles() << " tiles for " << schedule.blocks() << " multiprocessors";
    if (plan.streamed) text << ", which share K of the last " << schedule.shared_tiles();
    if (plan.a_panel || plan.b_panel)
      text << "; "
           << (plan.a_panel && plan.b_panel ? "A and B are"
               : plan.a_panel               ? "A is"
                                            : "B is")
           << " copied first, to lie along "
           << (plan.a_panel && plan.b_panel ? "m and n"
               : plan.a_panel               ? "m"
                                            : "n");
  } else {
    text << p.M << (p.M == 1 ? " row" : " rows") << ": bound by reading "
         << percent(double(p.K) * p.N / (double(p.M) * p.K + double(p.K) * p.N + double(p.M) * p.N))
         << " of the bytes, the larger operand, once";
    if (plan.splits > 1) text << ", K in " << plan.splits << " parts to keep enough of it on the way";
  }
  if (plan.access != Access::kVector)
    text << "; elements one by one, as an operand is unaligned or has no adjacent ones";
  if (plan.transposed) text << "; rows and columns exchanged";
  return text.str();
}

namespace {

template <typename F>
void each_candidate(const Asked& asked, const Device& device, const F& f) {
  each_kernel([&](Method method, int tile) {
    int64_t splits = 0;
    for (int parts : PARTS) {
      if (method == Method::kRing && parts > 2) break;  // whole tiles, or shared ones
      const std::optional<Plan> plan = plan_of(asked, method, tile, parts, device);
      if (!plan || (plan->splits == splits && !plan->streamed)) continue;
      splits = plan->splits;
      f(*plan);
    }
  });
}

// All that a plan depends on.
using Key = std::array<int64_t, 9>;

Key key_of(const Asked& asked, const Device& device) {
  const Problem& p = asked.problem;
  const int layout = asked.transposed | asked.a.by_k << 1 | asked.b.by_k << 2 | int(asked.a.access) << 3 |
                     int(asked.b.access) << 5 | asked.a.boxed << 7 |
                     asked.b.boxed << 8;  // whether chunks are whole follows from the sizes
  return {1, p.batch, p.M, p.N, p.K, layout, device.sms, device.max_workspace, device.hopper};
}

}  // namespace

std::vector<Plan> candidates(const Problem& problem, const Device& device) {
  std::vector<Plan> found;
  each_candidate(Asked(problem), device, [&](const Plan& plan) { found.push_back(plan); });
  return found;
}

Plan select(const Problem& problem, const Device& device) {
  struct Known {
    Key key;
    Plan plan;
  };
  static thread_local std::array<Known, 256> known{};  // by a hash of the key
  const Asked asked(problem);
  const Key key = key_of(asked, device);
  uint64_t hash = 0;
  for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15;
  Known& entry = known[hash >> 56];
  if (entry.key == key) return entry.plan;
  Plan best{.seconds = INFINITY};
  each_candidate(asked, device, [&](const Plan& plan) {
    if (plan.seconds < best.seconds) best = plan;
  });
  entry = {key, best};
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
  return found;
}

}  // namespace sgemm::matmul
