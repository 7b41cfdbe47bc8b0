#include "interrupt.h"

#include <atomic>
#include <csignal>
#include <mutex>

namespace {

std::atomic<int> interrupts{0};
std::mutex mutex;
int guards = 0;
struct sigaction previous;  // stays valid when the last guard is gone: someone may have saved our handler

void on_sigint(int signal, siginfo_t* info, void* context) {
  ++interrupts;
  if (previous.sa_flags & SA_SIGINFO)
    previous.sa_sigaction(signal, info, context);
  else
    previous.sa_handler(signal);
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_sigint;
}

}  // namespace

InterruptGuard::InterruptGuard() : seen_(interrupts) {
  const std::lock_guard lock(mutex);
  if (guards++ > 0) return;
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0 || is_ours(current)) return;
  if (!(current.sa_flags & SA_SIGINFO) && (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN))
    return;
  previous = current;
  current.sa_sigaction = on_sigint;
  current.sa_flags |= SA_SIGINFO;
  sigaction(SIGINT, &current, nullptr);
}

InterruptGuard::~InterruptGuard() {
  const std::lock_guard lock(mutex);
  if (--guards > 0) return;
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) == 0 && is_ours(current)) sigaction(SIGINT, &previous, nullptr);
}

bool InterruptGuard::interrupted() const { return interrupts != seen_; }
