// Runs a fuzz target once on each file argument, if the target is not linked to clang's libFuzzer. It prints each file's name
// before the run, so that the last name is the input that crashed.
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// AddressSanitizer's runtime calls this function by its name. A frame has at most a megabyte: an input may not make its reader
// allocate much more.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "handle_abort=1:max_allocation_size_mb=64"; }

namespace {

constexpr itimerval kProcessorTimeMax{{}, {10, 0}};  // of one input; SIGPROF ends the process
constexpr unsigned kSecondsMax = 60;                 // of one input, on a busy machine too; SIGALRM ends the process

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "%s: cannot read %s\n", argv[0], argv[i]);
      return 2;
    }
    const std::string input{std::istreambuf_iterator<char>(file), {}};
    // A block of exactly that size: AddressSanitizer sees a read past its end.
    const std::unique_ptr<uint8_t[]> data(new uint8_t[input.size()]);
    std::memcpy(data.get(), input.data(), input.size());
    std::fprintf(stderr, "%s\n", argv[i]);
    ::setitimer(ITIMER_PROF, &kProcessorTimeMax, nullptr);
    ::alarm(kSecondsMax);
    LLVMFuzzerTestOneInput(data.get(), input.size());
  }
  std::printf("%d inputs: no crash\n", argc - 1);
  return 0;
}
