// Runs a fuzz target where clang's libFuzzer is not to be had: the same target, the same corpus directories, and of
// libFuzzer's command line the few options that our Makefile uses.
//
//   kvxfer_fuzz_NAME DIRECTORY...         fuzz from these inputs; what is new goes into the first directory
//   kvxfer_fuzz_NAME FILE...              run these inputs only
//   kvxfer_fuzz_NAME -runs=0 DIRECTORY... run all of these inputs only
//   kvxfer_fuzz_NAME -merge=1 TO FROM...  copy into TO few and small inputs of all that touch every edge that any of them touches
//   -max_total_time=SECONDS -seed=NUMBER -max_len=BYTES -artifact_prefix=PATH/
//
// An input that crashes, aborts, or takes more than kRunSeconds or kWaitSeconds is written to PATH/crash-HASH, and how to run it again is said.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

#include "driver_mutate.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Of the sanitizers' runtime; absent where none is built in.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());
// The runtimes look for these by name. A frame has at most a megabyte: nothing that it says may make its reader allocate much more.
#define KVXFER_FOUND_BY_NAME extern "C" __attribute__((visibility("default")))
KVXFER_FOUND_BY_NAME const char* __asan_default_options() { return "handle_abort=1:max_allocation_size_mb=64:malloc_context_size=8:detect_stack_use_after_return=0"; }
KVXFER_FOUND_BY_NAME const char* __ubsan_default_options() { return "print_stacktrace=1:abort_on_error=1"; }  // so that the input is kept

namespace fuzz {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRunSeconds = 10;   // of processor time
constexpr int kWaitSeconds = 60;  // of any time
constexpr int kInterrupted = 130;
constexpr size_t kRecentPart = 10;  // half of what is drawn for parents comes from the latest tenth of the corpus

struct Options {
  std::vector<std::string> paths;
  double seconds = 0;  // 0: no end
  uint64_t seed = std::random_device{}();
  size_t size_max = 1024;
  bool is_merge = false, is_replay = false;
  std::string artifacts = "./";
};

// What the handlers of a crash need, and may touch: no allocation.
struct {
  const char* program = "";
  const uint8_t* data = nullptr;
  size_t size = 0;
  bool is_file = false;  // it is kept already
  char path[4096] = "";  // of that file, or of where it is to be written
  size_t prefix = 0;
  volatile sig_atomic_t turns = 0;  // of the watch, since this run began
  volatile time_t began = 0;        // processor_seconds() then
} current;

volatile sig_atomic_t is_asked_to_end = 0;

// Of this process: a machine that is busy with others makes no input slow.
time_t processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec;
}

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "%s: %s\n", current.program, text.c_str());
  std::exit(2);
}

uint64_t hash_of(const uint8_t* data, size_t size) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 0x100000001b3ull;
  return hash;
}

std::string name_of(const std::string& input) {
  char name[17];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(hash_of(reinterpret_cast<const uint8_t*>(input.data()), input.size())));
  return name;
}

void keep_current() {
  if (current.data == nullptr) return;
  if (!current.is_file) {
    std::snprintf(current.path + current.prefix, sizeof current.path - current.prefix, "crash-%016llx",
                  static_cast<unsigned long long>(hash_of(current.data, current.size)));
    const int file = ::open(current.path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    const bool is_kept = file >= 0 && ::write(file, current.data, current.size) == static_cast<ssize_t>(current.size);
    if (!is_kept) std::fprintf(stderr, "%s: cannot write %s\n", current.program, current.path);
    if (file >= 0) ::close(file);
  }
  std::fprintf(stderr, "input of %zu bytes: %s\nto run it again: %s %s\n", current.size, current.path, current.program, current.path);
  current.data = nullptr;
}

void on_crash(int signal) {
  keep_current();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void on_interrupt(int signal) {
  is_asked_to_end = 1;
  ::signal(signal, SIG_DFL);  // the next one does not wait for the input that runs
}

void on_watch(int) {
  current.turns = current.turns + 1;
  if (current.data == nullptr) return;
  const bool is_busy = processor_seconds() - current.began > kRunSeconds;
  if (!is_busy && current.turns <= kWaitSeconds) return;
  std::fprintf(stderr, "%s: one input took more than %d s%s\n", current.program, is_busy ? kRunSeconds : kWaitSeconds, is_busy ? " of processor time" : "");
  keep_current();
  std::abort();
}

void watch_for_crashes() {
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(keep_current);
  } else {
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::signal(signal, on_crash);
  }
  ::signal(SIGALRM, on_watch);
  const itimerval second{{1, 0}, {1, 0}};
  ::setitimer(ITIMER_REAL, &second, nullptr);
}

const std::vector<uint32_t>& run(const std::string& input) {
  // Exactly as many bytes on the heap: a target that reads past them is found out.
  const std::unique_ptr<uint8_t[]> data(new uint8_t[input.size()]);
  std::memcpy(data.get(), input.data(), input.size());
  current.data = data.get();
  current.size = input.size();
  current.turns = 0;
  current.began = processor_seconds();
  coverage().begin();
  LLVMFuzzerTestOneInput(data.get(), input.size());
  const std::vector<uint32_t>& features = coverage().end();
  current.data = nullptr;
  return features;
}

bool is_directory(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail("there is no " + path);
  return S_ISDIR(status.st_mode);
}

std::vector<std::string> files_of(const std::string& path) {
  if (!is_directory(path)) return {path};
  std::vector<std::string> files;
  DIR* const directory = ::opendir(path.c_str());
  if (directory == nullptr) fail("cannot list " + path);
  while (const dirent* entry = ::readdir(directory)) {
    if (entry->d_name[0] != '.') files.push_back(path + "/" + entry->d_name);
  }
  ::closedir(directory);
  std::sort(files.begin(), files.end());
  return files;
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  if (!(file << bytes).flush()) fail("cannot write " + path);
}

std::vector<std::string> inputs_of(const std::vector<std::string>& paths) {
  std::vector<std::string> inputs;
  for (const std::string& path : paths) {
    for (const std::string& file : files_of(path)) inputs.push_back(read(file));
  }
  std::stable_sort(inputs.begin(), inputs.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  return inputs;
}

int replay(const Options& options) {
  size_t count = 0;
  for (const std::string& path : options.paths) {
    for (const std::string& file : files_of(path)) {
      std::snprintf(current.path, sizeof current.path, "%s", file.c_str());
      current.is_file = true;
      run(read(file));
      ++count;
    }
  }
  std::printf("%zu inputs: no crash\n", count);
  return 0;
}

class Seen {
 public:
  // How many of them are new; they are not any more.
  size_t add(const std::vector<uint32_t>& features) {
    size_t fresh = 0;
    for (const uint32_t feature : features) {
      if (seen_[feature]) continue;
      seen_[feature] = true;
      ++fresh;
      if (!edges_[feature / 8]) {
        edges_[feature / 8] = true;
        ++edge_count_;
      }
    }
    return fresh;
  }
  bool has(uint32_t feature) const { return seen_[feature]; }
  size_t edge_count() const { return edge_count_; }

 private:
  std::vector<bool> seen_ = std::vector<bool>(Coverage::kFeatures), edges_ = std::vector<bool>(Coverage::kEdges);
  size_t edge_count_ = 0;
};

// The rarest first: whoever alone touches something is in any case taken, and brings most of the rest with it.
int merge(const Options& options) {
  if (options.paths.size() < 2) fail("-merge=1 needs the directory to fill and those to take from");
  struct Candidate {
    std::string input;
    std::vector<uint32_t> features;
  };
  std::vector<Candidate> candidates;
  std::vector<uint32_t> holders(Coverage::kFeatures);
  for (std::string& input : inputs_of({options.paths.begin() + 1, options.paths.end()})) {
    std::vector<uint32_t> features = run(input);
    for (uint32_t& feature : features) feature -= feature % 8;  // the edge, however often it was taken
    for (const uint32_t feature : features) ++holders[feature];
    candidates.push_back({std::move(input), std::move(features)});
  }
  std::vector<std::pair<uint32_t, uint32_t>> wanted;  // how many have it, feature
  for (uint32_t feature = 0; feature < Coverage::kFeatures; ++feature) {
    if (holders[feature] != 0) wanted.emplace_back(holders[feature], feature);
  }
  std::sort(wanted.begin(), wanted.end());
  std::vector<size_t> smallest(Coverage::kFeatures, SIZE_MAX);  // candidates are in the order of their size
  for (size_t i = 0; i < candidates.size(); ++i) {
    for (const uint32_t feature : candidates[i].features) smallest[feature] = std::min(smallest[feature], i);
  }
  Seen seen;
  size_t count = 0, bytes = 0;
  for (const auto& [_, feature] : wanted) {
    if (seen.has(feature)) continue;
    const Candidate& taken = candidates[smallest[feature]];
    seen.add(taken.features);
    write(options.paths.front() + "/" + name_of(taken.input), taken.input);
    ++count;
    bytes += taken.input.size();
  }
  std::printf("%zu of %zu inputs, %zu bytes, touch all %zu edges\n", count, candidates.size(), bytes, seen.edge_count());
  return 0;
}

int fuzz(const Options& options) {
  for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, on_interrupt);
  Mutator mutator(options.seed, options.size_max);
  Seen seen;
  std::vector<std::string> corpus;
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  for (std::string& input : inputs_of(options.paths)) {
    if (is_asked_to_end) break;
    if (input.size() <= options.size_max && seen.add(run(input)) != 0) corpus.push_back(std::move(input));
  }
  if (corpus.empty()) corpus.emplace_back();
  const size_t known = corpus.size(), known_edges = seen.edge_count();
  uint64_t runs = 0;
  while (!is_asked_to_end && (options.seconds == 0 || seconds() < options.seconds)) {
    const size_t recent = corpus.size() / kRecentPart + 1;
    const auto some = [&] { return mutator.one_in(2) ? corpus.size() - 1 - mutator.below(recent) : mutator.below(corpus.size()); };
    const size_t one = some(), other = some();
    const size_t parent = corpus[one].size() < corpus[other].size() ? one : other;  // short ones run fast, and say what matters
    run(corpus[parent]);  // once, for what it compares
    ++runs;
    for (int child = 0; child < 32; ++child, ++runs) {
      std::string input = mutator.mutate(corpus[parent], corpus[mutator.below(corpus.size())], coverage());
      if (seen.add(run(input)) == 0) continue;
      if (!options.paths.empty()) write(options.paths.front() + "/" + name_of(input), input);
      corpus.push_back(std::move(input));
    }
  }
  std::printf("%llu inputs in %.1f s (%.0f/s), %zu edges (%zu new), corpus %zu (%zu new), seed %llu\n", static_cast<unsigned long long>(runs),
              seconds(), static_cast<double>(runs) / seconds(), seen.edge_count(), seen.edge_count() - known_edges, corpus.size(), corpus.size() - known,
              static_cast<unsigned long long>(options.seed));
  return is_asked_to_end ? kInterrupted : 0;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals), value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    const auto number = [&] {
      char* end = nullptr;
      const uint64_t found = std::strtoull(value.c_str(), &end, 10);
      if (value.empty() || *end != '\0') fail(argument + ": no number");
      return found;
    };
    if (argument[0] != '-') {
      options.paths.push_back(argument);
    } else if (name == "-max_total_time") {
      options.seconds = static_cast<double>(number());
    } else if (name == "-seed") {
      options.seed = number();
    } else if (name == "-max_len") {
      options.size_max = number();
    } else if (name == "-artifact_prefix") {
      options.artifacts = value;
    } else if (name == "-merge") {
      options.is_merge = value == "1";
    } else if (name == "-runs" && value == "0") {
      options.is_replay = true;
    } else {
      fail("no option " + argument + ": see fuzz/driver.cpp");
    }
  }
  if (!options.paths.empty() && !is_directory(options.paths.front())) options.is_replay = true;
  return options;
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  using namespace fuzz;
  current.program = argv[0];
  const Options options = parse(argc, argv);
  current.prefix = static_cast<size_t>(std::snprintf(current.path, sizeof current.path, "%s", options.artifacts.c_str()));
  watch_for_crashes();
  return options.is_replay ? replay(options) : options.is_merge ? merge(options) : fuzz::fuzz(options);
}
