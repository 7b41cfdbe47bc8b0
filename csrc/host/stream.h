#pragma once
#include <functional>

namespace simt {

// Where the blocks of a launch run: for a kernel that is compiled for the CPU, this is the stream.
struct Stream {
  virtual ~Stream() = default;
  // Calls work() on one or more OS threads, the calling one among them, and returns when all calls have
  // returned.
  virtual void parallel(const std::function<void()>& work) = 0;
  // Whether the user wants the launch to stop (Ctrl-C). Asked several times a second, on the calling thread
  // only.
  virtual bool interrupted() { return false; }
};

}  // namespace simt
