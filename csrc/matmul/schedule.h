// Which tiles, and which parts of their K, each block of a persistent kernel computes. Plain C++.
#pragma once
#include <cstdint>

#include "problem.h"

#ifdef __CUDACC__
#define SGEMM_ON_BOTH __host__ __device__
#else
#define SGEMM_ON_BOTH
#endif

namespace sgemm::matmul {

// K tiles [begin, end) of a tile. The result is the tile's if it is all of them, else one of its pieces.
struct Segment {
  int tile, begin, end;
  int64_t piece;
};

// Blocks take whole tiles in turn. Where the tiles that are left are fewer than the blocks, their K tiles can
// be shared out evenly, as one long row of work (stream-K, Osama et al. 2023): a block then has pieces of one
// or more of them. A second kernel adds the pieces up, so that no block waits for another.
class Schedule {
 public:
  SGEMM_ON_BOTH Schedule(int tiles, int k_tiles, int blocks, bool stream)
      : blocks_(blocks),
        k_tiles_(k_tiles),
        whole_(tiles / blocks),
        left_(tiles % blocks),
        stream_(stream && left_ != 0 && int64_t{left_} * k_tiles >= blocks) {}

  SGEMM_ON_BOTH int segments(int block) const {
    if (!stream_) return whole_ + (block < left_ ? 1 : 0);
    const int64_t from = begin(block), to = begin(block + 1);
    return whole_ + (to > from ? static_cast<int>((to - 1) / k_tiles_ - from / k_tiles_) + 1 : 0);
  }

  SGEMM_ON_BOTH Segment segment(int block, int n) const {
    if (n < whole_ || !stream_) return {n * blocks_ + block, 0, k_tiles_, 0};
    const int64_t from = begin(block), to = begin(block + 1);
    const int nth = static_cast<int>(from / k_tiles_) + n - whole_;
    const int64_t first = int64_t{nth} * k_tiles_;
    return {whole_ * blocks_ + nth, from > first ? static_cast<int>(from - first) : 0,
            to - first < k_tiles_ ? static_cast<int>(to - first) : k_tiles_, piece(block, nth)};
  }

  SGEMM_ON_BOTH int k_tiles() const { return k_tiles_; }
  SGEMM_ON_BOTH int blocks() const { return blocks_; }
  SGEMM_ON_BOTH int tiles() const { return whole_ * blocks_ + left_; }
  SGEMM_ON_BOTH int most_whole() const { return whole_ + (!stream_ && left_ > 0 ? 1 : 0); }  // of a block

  // Tiles that are shared out, the pieces that there is room for, and which of them are the nth such tile's.
  SGEMM_ON_BOTH int shared_tiles() const { return stream_ ? left_ : 0; }
  SGEMM_ON_BOTH int shared_tile(int nth) const { return whole_ * blocks_ + nth; }
  SGEMM_ON_BOTH int64_t pieces() const { return stream_ ? int64_t{blocks_} + left_ : 0; }
  SGEMM_ON_BOTH int64_t first_piece(int nth) const { return piece(owner(int64_t{nth} * k_tiles_), nth); }
  SGEMM_ON_BOTH int64_t last_piece(int nth) const {
    return piece(owner(int64_t{nth + 1} * k_tiles_ - 1), nth);
  }

 private:
  // Where a block's part of the row of work begins, and whose part a K tile of it is.
  SGEMM_ON_BOTH int64_t begin(int block) const { return int64_t{block} * left_ * k_tiles_ / blocks_; }
  SGEMM_ON_BOTH int owner(int64_t k_tile) const {
    int block = static_cast<int>(k_tile * blocks_ / (int64_t{left_} * k_tiles_));
    while (begin(block + 1) <= k_tile) ++block;
    return block;
  }
  // Grows along the row of work, by one from piece to piece of a tile: every block has some of the work.
  SGEMM_ON_BOTH static int64_t piece(int block, int nth) { return int64_t{block} + nth; }

  int blocks_, k_tiles_;
  int whole_, left_;  // tiles: a block's whole ones, and those that are left then
  bool stream_;
};

// For a problem's tiles on a device. No block is without work.
inline Schedule ring_schedule(int BM, int BN, int BK, const Problem& p, bool stream, int most_blocks) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t tiles = ceil_div(p.M, BM) * ceil_div(p.N, BN) * p.batch, k_tiles = ceil_div(p.K, BK);
  const int64_t work = stream ? tiles * k_tiles : tiles;
  return {static_cast<int>(tiles), static_cast<int>(k_tiles),
          static_cast<int>(work < most_blocks ? work : most_blocks), stream};
}

}  // namespace sgemm::matmul
