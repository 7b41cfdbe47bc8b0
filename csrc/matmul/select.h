// Which kernel computes a product: a pure function of the problem's shape and layout and of the device.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "problem.h"

namespace sgemm::matmul {

struct Device {
  int sms;                // streaming multiprocessors
  int64_t max_workspace;  // floats
  bool hopper;            // compute capability 9.0: it runs kRing
};

// kTiled: a block tile of C from tiles of A and B in shared memory.
// kDot:   few rows of C, each column a sum along adjacent k: as fast as B can be read.
// kAxpy:  few rows of C, B's rows are adjacent along n: as fast as B can be read.
// kRing:  as kTiled, with persistent blocks whose producer warps keep a ring of tiles full.
enum class Method { kTiled, kDot, kAxpy, kRing };

// How operands' elements are moved. kVector: chunks of four neighbours, 16 aligned bytes. kAdjacent:
// neighbours one by one. kStrided: one by one, any stride apart.
enum class Access { kVector, kAdjacent, kStrided };

// A block tile, and what it is known to reach.
struct TileInfo {
  const char* name;
  int BM, BN, BK;
  int threads, blocks;  // of a block; on a multiprocessor together
  Access least;         // what its kernels can do with the least
  double share;         // of the multiply-adds' peak, where the GPU is full of blocks
};

// In the order of their kernels. The first is the fastest where there is enough to do.
inline constexpr TileInfo TILES[] = {
    {"128x256", 128, 256, 16, 256, 1, Access::kVector, 0.70},
    {"64x128", 64, 128, 16, 128, 3, Access::kAdjacent, 0.72},
    {"64x64", 64, 64, 16, 128, 5, Access::kStrided, 0.64},
    {"32x128", 32, 128, 16, 128, 5, Access::kAdjacent, 0.55},
    {"128x32", 128, 32, 16, 128, 5, Access::kAdjacent, 0.55},
    {"32x32", 32, 32, 16, 64, 10, Access::kAdjacent, 0.46},
};

// kRing's kernels, two for each block tile: for A with neighbours along m, and along k. B's are along n.
// Other operands are copied to panels first. A block is alone on its multiprocessor, and takes tile after
// tile.
struct RingInfo {
  const char* name;
  int BM, BN, BK;
  bool a_by_k;
  double share;  // as TileInfo's
};
inline constexpr RingInfo RINGS[] = {
    {"ring256x128", 256, 128, 32, false, 0.885}, {"ring256x128k", 256, 128, 32, true, 0.86},
    {"ring128x128", 128, 128, 32, false, 0.87},  {"ring128x128k", 128, 128, 32, true, 0.84},
    {"ring128x64", 128, 64, 32, false, 0.845},   {"ring128x64k", 128, 64, 32, true, 0.787},
    {"ring64x64", 64, 64, 32, false, 0.795},     {"ring64x64k", 64, 64, 32, true, 0.752},
};

// Rows of C that the skinny kernels take at most.
inline constexpr int MAX_SKINNY = 8;
inline constexpr int SKINNY_WARPS = 8;  // of their blocks

struct Plan {
  Method method;
  int tile;               // of TILES for kTiled, of RINGS for kRing
  bool transposed;        // computes out^T = B^T @ A^T
  bool a_by_k, b_by_k;    // what an operand's chunks of four run along: k, or m (A) and n (B)
  Access access;          // of both operands; for a skinny kernel, of B
  bool a_vector;          // for a skinny kernel: whether A's chunks along k are 16 aligned bytes
  int columns, sharing;   // for kDot: of a warp; warps that share them, and take turns along k
  int splits;             // parts of K, each computed apart, then added up in order
  int64_t split_k;        // the length of a part, but for the last
  bool exchanged;         // for kRing: rows and columns are exchanged although out does not ask for it
  bool a_panel, b_panel;  // for kRing: the operand is copied first, to where it lies along m (A) or n (B)
  int blocks;             // for kRing: one a multiprocessor, as far as there is work
  bool streamed;          // for kRing: blocks share the K of the last tiles out among them all
  int64_t workspace;      // floats: the results of the parts, or of the tiles that are shared
  double seconds;         // as predicted
};

// "64x128", "dot", "ring128x64k": the plan's kernel; with a "t" where it is of the exchanged problem.
std::string kernel_name(const Plan& plan);

// A constant of the prediction by its name, to be fitted; null if there is none.
double* model_constant(const std::string& name);

// Why a problem has this plan, in words.
std::string explain(const Plan& plan, const Problem& problem, const Device& device);

// Every way to compute a problem with M, N >= 1 and K >= 0; there is at least one.
std::vector<Plan> candidates(const Problem& problem, const Device& device);

// The candidate that is predicted to be fastest. A thread remembers what it has selected for problems of the
// same sizes and layouts.
Plan select(const Problem& problem, const Device& device);

// The plan with this kernel and K in this many parts, whatever is predicted of it; nothing if the kernel
// cannot.
std::optional<Plan> plan_with(const std::string& kernel, int parts, const Problem& problem,
                              const Device& device);

}  // namespace sgemm::matmul
