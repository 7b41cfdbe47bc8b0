#pragma once
#include <functional>

namespace simt {

// What a GPU leaves open. A kernel whose result depends on it has a race: tests run each kernel under all
// four and compare bits.
struct Schedule {
  bool reverse = false;        // between two barriers the block's last thread runs first
  bool land_at_issue = false;  // a cp.async writes when it is issued; else when it is waited for
};

// Where the blocks of a launch run: for a kernel that is compiled for the CPU, this is the stream.
struct Stream {
  virtual ~Stream() = default;
  // Calls work() on one or more OS threads, the calling one among them, and returns when all calls have
  // returned.
  virtual void parallel(const std::function<void()>& work) = 0;
  // Whether the user wants the launch to stop (Ctrl-C). Asked several times a second, on the calling thread
  // only.
  virtual bool interrupted() { return false; }

  Schedule schedule;
};

}  // namespace simt
