// To be preloaded: an operator new that once, when it is told to, stops at an allocation of one size until it may go on, and
// then finds no memory.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> wanted{0};
std::atomic<int> left{0};
std::atomic<bool> is_here{false}, may_go{false};

void* take(size_t bytes) {
  if (bytes == wanted.load() && left.fetch_sub(1) == 1) {
    is_here = true;
    while (!may_go) ::usleep(100);
    throw std::bad_alloc();
  }
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// The `which`th allocation of `bytes` from now on.
extern "C" void fail_at(size_t bytes, int which) {
  is_here = may_go = false;
  left = which;
  wanted = bytes;
}
extern "C" bool has_come() { return is_here; }
extern "C" void go_on() { may_go = true; }

void* operator new(size_t bytes) { return take(bytes); }
void* operator new[](size_t bytes) { return take(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
