// Lets code that runs for long outside Python notice Ctrl-C.
#pragma once

// While one lives, SIGINT is noted before it goes to the handler that was there (Python's, which makes a
// KeyboardInterrupt of it as soon as Python runs again). Where there is none, Ctrl-C ends the process as
// ever.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  bool interrupted() const;  // since this guard was made

 private:
  int seen_;
};
