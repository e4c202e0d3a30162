// The state of the emulated machine, shared by the files that implement it.
//
// One launch runs on one thread. Every access of an instruction carries the vector clock of its pipe, so an access
// that no flag or barrier orders is found whatever order the pipes happened to run in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cube.h"
#include "dma.h"
#include "machine.h"
#include "simt.h"

namespace emu {

constexpr int pipe_count = 8;
constexpr const char *pipe_names[pipe_count] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};

constexpr int memory_count = 7;
constexpr const char *memory_names[memory_count] = {"UB", "L1", "L0A", "L0B", "L0C", "L0A scales", "L0B scales"};
// Sizes of Ascend 950; the launch lowers that of UB to what the kernel may use.
constexpr size_t memory_sizes[memory_count] = {248 << 10, 512 << 10, 64 << 10, 64 << 10, 256 << 10, 64 << 10, 64 << 10};
constexpr size_t slot_bytes = 1 << 20;          // address distance of two memories
constexpr size_t core_bytes = 8 * slot_bytes;   // address distance of two cores
constexpr size_t max_cores = 1024;
constexpr size_t stack_bytes = 1 << 20;
constexpr size_t thread_stack_bytes = 128 << 10;
constexpr size_t guard_bytes = 64 << 10;
constexpr int event_count = 8;
constexpr int flag_count = 64;
constexpr uint8_t poison = 0xff; // NaN in every float format, -1 as an integer
constexpr uint8_t guard = 0xfd;

// Zeroed memory that takes no space until it is touched, and the same as a stack whose overflow faults.
void *map(size_t bytes);
uint8_t *map_stack(size_t bytes);

enum Mode : int32_t { checked, adversarial, fast };

struct Settings {
  const char *kernel;
  Mode mode;
  bool check_vector_order;
};
extern Settings settings;

// An actor is a pipe of a core. Clocks cover the actors that can synchronize with each other; those of blocks that
// ran before are never ordered.
using Actor = uint32_t;
using Epoch = uint32_t;

struct Clock {
  Actor first = 0;
  std::vector<Epoch> epochs;

  Epoch at(Actor actor) const { return actor - first < epochs.size() ? epochs[actor - first] : 0; }
  Epoch &operator[](Actor actor) { return epochs[actor - first]; }
  void join(const Clock &other) {
    for (size_t i = 0; i < epochs.size(); ++i) epochs[i] = std::max(epochs[i], other.epochs[i]);
  }
};

// What happened to one byte. `reads` and `atomics` number a set of accesses; 0 is the empty set.
struct Cell {
  Epoch write_epoch;
  Actor writer : 31;
  Actor undefined : 1;
  uint32_t reads;
  uint32_t atomics;
};
inline bool operator==(const Cell &a, const Cell &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

struct Access {
  Actor actor;
  Epoch epoch;
};

// SIMT accesses between two barriers.
constexpr uint16_t several_threads = 0xfffe, several_warps = 0xffff;
struct ThreadCell {
  uint32_t write_epoch, write_meeting;
  uint32_t read_epoch, read_meeting;
  uint16_t writer, reader, reader_warp, atomic;
};

struct Region {
  std::string name;
  uint8_t *mapping = nullptr; // of global memory
  size_t mapping_bytes = 0;
  uint8_t *base = nullptr;
  size_t size = 0;
  int core = -1; // none: global memory
  Cell *cells = nullptr;
  ThreadCell *threads = nullptr;
  uint32_t *stamps = nullptr; // last vector store, by interval between memory barriers
  size_t used = 0;
};

struct Operation {
  std::function<bool()> attempt; // false: not ready
  const char *name = "";
  bool work = false;
  pipe_t from = PIPE_S, to = PIPE_S;
  int id = 0;
};

struct Context {
  void *stack_pointer = nullptr;
};

enum class State { ready, running, waiting, finished };

struct Lock {
  uint64_t issued = 0, done = 0;
  Clock clock;
};

struct Core {
  int block = 0, index = 0;
  bool cube = false;
  int sub_block = 0;
  Region memory[memory_count];
  std::deque<Operation> queue[pipe_count];
  Clock clock[pipe_count];
  std::deque<Clock> flags[pipe_count][pipe_count][event_count];
  std::deque<Clock> arrivals[2][flag_count]; // of the block: scopes block and intra
  std::vector<uint64_t> waits = std::vector<uint64_t>(2 * flag_count), arrived = std::vector<uint64_t>(2 * flag_count);
  Lock locks[flag_count + 2];
  Context context;
  uint8_t *stack = nullptr;
  State state = State::ready;
  uint64_t padding = 0;
  StoreMode store_mode;

  Actor actor(int pipe) const { return static_cast<Actor>(index * pipe_count + pipe); }
};

enum class Kind { read, write, atomic };

extern std::deque<Core> cores;
extern size_t core_count; // in the running group
extern int first_block, cores_per_block;
extern uint8_t *arena;
extern std::deque<Region> global;
extern std::vector<std::vector<const char *>> history; // names of operations, by actor and epoch
// Bytes by pipe, by whether they are in global memory, and by whether they are written.
extern uint64_t traffic[pipe_count][2][2];
// Accesses by SIMT threads, indexed as above without the pipe; threads run; barriers, once for each thread.
extern uint64_t simt_accesses[2][2], simt_threads, simt_barriers;
extern std::mt19937_64 random_source;

// What runs now.
extern Core *core;
extern int current_pipe;
extern const char *operation;
extern int thread; // of a SIMT region, or -1
extern bool in_vector_function;
extern uint32_t thread_epoch;          // counts barriers of threads
extern std::vector<uint32_t> meetings; // of each warp
extern uint32_t vector_interval;       // counts vector functions and memory barriers in them

// ---- memory.cpp

extern std::vector<std::string> reports, notes;
std::string format(const char *text, ...) __attribute__((format(printf, 1, 2)));
void clear_accesses(); // and reports
void add_once(std::vector<std::string> &list, const std::string &text);
void report(const char *instruction, const std::string &what);
std::string where(const char *instruction);
std::string range(const Region &region, size_t begin, size_t end);
Region *find(const void *address, size_t *offset);
// Finds and checks an access; null when it must not happen.
Region *access(const void *address, size_t bytes, Kind kind, const char *instruction, size_t alignment,
               size_t *offset);
bool undefined_at(const Region &region, size_t i);
Core *sibling(bool cube, int sub_block);

// ---- pipes.cpp

extern Context scheduler;
extern "C" void emu_switch(void **save, void *to);
void *prepare_stack(uint8_t *stack, size_t bytes, void (*entry)());
void enter_core(Core &next);
bool run_one();
void clear_rounds();

} // namespace emu
