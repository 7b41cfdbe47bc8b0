// Goes through the schedules of many problems, and prints the first thing wrong, or "right".
#include <cstdio>
#include <vector>

#include "matmul/schedule.h"

namespace {

using namespace sgemm::matmul;

// Every K tile of every tile is some block's, once; whole tiles have no piece, the pieces of a shared one are
// numbered from first_piece() to last_piece() in the order of K, and no other segment has their numbers.
bool right(int tiles, int k_tiles, int most_blocks, bool stream) {
  const Problem p{.batch = 1,
                  .M = tiles,
                  .N = 1,
                  .K = k_tiles,
                  .A = {},
                  .B = {},
                  .C = {},
                  .out = {},
                  .alpha = 1,
                  .beta = 0};
  const Schedule s = ring_schedule(1, 1, 1, p, stream, most_blocks);
  if (s.tiles() != tiles || s.k_tiles() != k_tiles || s.blocks() > most_blocks) return false;
  std::vector<std::vector<int>> piece_of(tiles, std::vector<int>(k_tiles, -2));  // -1: whole
  std::vector<int> tile_of(s.pieces(), -1);
  for (int block = 0; block < s.blocks(); ++block) {
    int whole = 0;
    if (s.segments(block) == 0) return false;
    for (int n = 0; n < s.segments(block); ++n) {
      const Segment g = s.segment(block, n);
      if (g.tile < 0 || g.tile >= tiles || g.begin < 0 || g.begin >= g.end || g.end > k_tiles) return false;
      const bool all = g.end - g.begin == k_tiles;
      whole += all;
      if (!all) {
        if (g.piece < 0 || g.piece >= s.pieces() || tile_of[g.piece] != -1) return false;
        tile_of[g.piece] = g.tile;
      }
      for (int k = g.begin; k < g.end; ++k) {
        if (piece_of[g.tile][k] != -2) return false;
        piece_of[g.tile][k] = all ? -1 : static_cast<int>(g.piece);
      }
    }
    if (whole > s.most_whole() + (s.shared_tiles() > 0)) return false;
  }
  for (const auto& pieces : piece_of)
    for (int piece : pieces)
      if (piece == -2) return false;
  for (int nth = 0; nth < s.shared_tiles(); ++nth) {
    const auto& pieces = piece_of[s.shared_tile(nth)];
    if (pieces[0] == -1) {
      if (s.first_piece(nth) != s.last_piece(nth)) return false;
      continue;
    }
    if (pieces[0] != s.first_piece(nth) || pieces[k_tiles - 1] != s.last_piece(nth)) return false;
    for (int k = 1; k < k_tiles; ++k)
      if (pieces[k] != pieces[k - 1] && pieces[k] != pieces[k - 1] + 1) return false;
  }
  return true;
}

}  // namespace

int main() {
  for (int blocks : {1, 2, 3, 7, 132})
    for (int tiles : {1, 2, 3, 5, 8, 64, 131, 132, 133, 264, 512})
      for (int k_tiles : {1, 2, 3, 4, 7, 32, 129})
        for (bool stream : {false, true})
          if (!right(tiles, k_tiles, blocks, stream)) {
            std::printf("wrong: %d tiles of %d K tiles for %d blocks%s\n", tiles, k_tiles, blocks,
                        stream ? ", shared" : "");
            return 0;
          }
  std::puts("right");
}
