// The emulated machine: memories with shadows, pipes, flags, cores and SIMT threads as fibers.
//
// One launch runs on one thread. Every access of an instruction carries the vector clock of its pipe, so an access
// that no flag or barrier orders is found whatever order the pipes happened to run in.

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <sys/mman.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cube.h"
#include "dma.h"
#include "machine.h"
#include "simt.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;
int64_t block_idx, block_num;

namespace emu {

uint64_t vector_instructions, multiplications;

namespace {

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

void *map(size_t bytes) {
  void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  return address;
}

// A stack whose overflow faults.
uint8_t *map_stack(size_t bytes) {
  auto *stack = static_cast<uint8_t *>(map(bytes));
  mprotect(stack, 4096, PROT_NONE);
  return stack;
}

// ---- reports -------------------------------------------------------------------------------------------------------

enum Mode : int32_t { checked, adversarial, fast };

struct Settings {
  const char *kernel;
  Mode mode;
  bool check_vector_order;
};
Settings settings;

constexpr size_t max_reports = 32;
std::vector<std::string> reports, notes;
std::unordered_set<std::string> seen;

std::string format(const char *text, ...) __attribute__((format(printf, 1, 2)));
std::string vformat(const char *text, va_list arguments) {
  char buffer[1024];
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  return buffer;
}
std::string format(const char *text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string result = vformat(text, arguments);
  va_end(arguments);
  return result;
}
void add_once(std::vector<std::string> &list, const std::string &text) {
  if (list.size() < max_reports && std::find(list.begin(), list.end(), text) == list.end()) list.push_back(text);
}

// ---- clocks --------------------------------------------------------------------------------------------------------

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

// ---- shadows -------------------------------------------------------------------------------------------------------

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
std::vector<std::vector<Access>> access_sets;
std::unordered_map<uint32_t, uint32_t> extended_sets; // of the running operation

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

// ---- cores ---------------------------------------------------------------------------------------------------------

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

enum class State { ready, running, waiting, finished, abandoned };

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

std::deque<Core> cores;
size_t core_count = 0; // in the running group
int first_block = 0;
int cores_per_block = 1;
uint8_t *arena = nullptr;
std::deque<Region> global;
std::vector<std::vector<const char *>> history; // by actor and epoch

Core *core = nullptr;
int current_pipe = PIPE_S;
const char *operation = "scalar code";
int thread = -1;
uint32_t thread_epoch = 0, vector_interval = 0;
bool in_vector_function = false;
std::mt19937_64 random_source;

std::vector<uint32_t> meetings; // by warp

// Bytes by pipe, by whether they are in global memory, and by whether they are written.
uint64_t traffic[pipe_count][2][2];

std::string where(const char *instruction) {
  std::string text = format("%s: block %d", settings.kernel, core ? core->block : -1);
  if (core && cores_per_block > 1) text += core->cube ? " AIC" : format(" AIV%d", core->sub_block);
  text += format(", %s", instruction);
  if (std::strcmp(instruction, operation) != 0) text += format(" in %s", operation);
  text += format(" on pipe %s", pipe_names[current_pipe]);
  if (thread >= 0) text += format(", thread %d", thread);
  return text;
}
void report(const char *instruction, const std::string &what) { add_once(reports, where(instruction) + ": " + what); }
// Repetitions of a fault, at other bytes or by other threads, are not reported.
bool is_repeated(const char *instruction, const std::string &fault) {
  std::string key = std::string(instruction) + operation + pipe_names[current_pipe] + fault;
  return !seen.insert(key).second;
}

std::string describe(Actor actor, Epoch epoch) {
  int owner = static_cast<int>(actor) / pipe_count;
  const auto &names = history[actor];
  std::string text = epoch < names.size() && names[epoch] ? names[epoch] : "scalar code";
  text += format(" on pipe %s", pipe_names[actor % pipe_count]);
  int block = owner / cores_per_block;
  if (!core || block != core->block) return text + format(" of block %d", block);
  if (owner != core->index) return text + format(" of core %d of the block", owner % cores_per_block);
  return text;
}
std::string range(const Region &region, size_t begin, size_t end) {
  return format("%s bytes [%zu, %zu)", region.name.c_str(), begin, end);
}

uint32_t extend(uint32_t set, Actor actor, Epoch epoch, const Clock &clock) {
  auto found = extended_sets.find(set);
  if (found != extended_sets.end()) return found->second;
  std::vector<Access> members;
  for (const Access &access : access_sets[set]) {
    bool ordered = access.actor == actor || access.epoch <= clock.at(access.actor);
    if (!ordered) members.push_back(access);
  }
  members.push_back({actor, epoch});
  uint32_t number = static_cast<uint32_t>(access_sets.size());
  access_sets.push_back(std::move(members));
  extended_sets[set] = number;
  return number;
}

enum class Kind { read, write, atomic };

struct Conflict {
  bool found = false;
  Access with{};
  const char *earlier = "";
};

Conflict unordered(const Clock &clock, Actor self, uint32_t set, const char *earlier) {
  for (const Access &access : access_sets[set]) {
    if (access.actor != self && access.epoch > clock.at(access.actor)) return {true, access, earlier};
  }
  return {};
}

Conflict conflict(const Cell &cell, Kind kind, const Clock &clock, Actor self) {
  if (cell.write_epoch && cell.writer != self && cell.write_epoch > clock.at(cell.writer)) {
    return {true, {cell.writer, cell.write_epoch}, "wrote"};
  }
  Conflict result;
  if (kind != Kind::atomic && cell.atomics) result = unordered(clock, self, cell.atomics, "updated");
  if (!result.found && kind != Kind::read && cell.reads) result = unordered(clock, self, cell.reads, "read");
  return result;
}

const char *verb(Kind kind) { return kind == Kind::read ? "reads" : kind == Kind::write ? "writes" : "updates"; }

// Checks bytes [begin, end) of a region against what other pipes did to them, and records the access.
void record(Region &region, size_t begin, size_t end, Kind kind, const char *instruction) {
  const Clock &clock = core->clock[current_pipe];
  Actor self = core->actor(current_pipe);
  Epoch epoch = clock.at(self);
  region.used = std::max(region.used, end);
  Cell before{}, after{};
  bool known = false;
  Conflict found, current;
  size_t conflict_begin = 0;
  auto finish = [&](size_t at) {
    if (!found.found) return;
    std::string other = describe(found.with.actor, found.with.epoch) + ", which " + found.earlier;
    found = {};
    if (is_repeated(instruction, other)) return;
    report(instruction, format("race: %s %s, not ordered after %s them", verb(kind),
                               range(region, conflict_begin, at).c_str(), other.c_str()));
  };
  for (size_t i = begin; i < end; ++i) {
    Cell &cell = region.cells[i];
    if (!known || !(cell == before)) {
      before = after = cell;
      known = true;
      current = conflict(cell, kind, clock, self);
      if (kind == Kind::write) {
        after = {epoch, self, 0, 0, 0};
      } else if (kind == Kind::read) {
        after.reads = extend(cell.reads, self, epoch, clock);
      } else {
        after.atomics = extend(cell.atomics, self, epoch, clock);
        after.undefined = 0;
      }
    }
    if (current.found && !found.found) {
      found = current;
      conflict_begin = i;
    } else if (!current.found && found.found) {
      finish(i);
    }
    cell = after;
  }
  finish(end);
}

// The same for the threads of a SIMT region, since their last barrier.
void record_threads(Region &region, size_t begin, size_t end, Kind kind, const char *instruction) {
  if (!region.threads) region.threads = static_cast<ThreadCell *>(map(region.size * sizeof(ThreadCell)));
  uint16_t warp = static_cast<uint16_t>(thread / 32);
  uint32_t meeting = meetings[warp];
  auto race = [&](size_t i, const char *earlier, int other) {
    std::string who = other < 0 ? "other threads" : format("thread %d", other);
    if (is_repeated(instruction, earlier)) return;
    report(instruction, format("race between threads: %s %s, which %s %s with no barrier between", verb(kind),
                               range(region, i, end).c_str(), who.c_str(), earlier));
  };
  for (size_t i = begin; i < end; ++i) {
    ThreadCell &cell = region.threads[i];
    bool written = cell.write_epoch == thread_epoch && cell.writer != thread &&
                   !(cell.writer / 32 == warp && cell.write_meeting < meeting) &&
                   !(kind == Kind::atomic && cell.atomic);
    if (written) {
      race(i, "wrote", cell.writer);
      i = end;
    }
    if (i < end && kind != Kind::read) {
      bool was_read = cell.read_epoch == thread_epoch && cell.reader != thread &&
                      !(cell.reader != several_warps && cell.reader_warp == warp && cell.read_meeting < meeting);
      if (was_read) {
        race(i, "read", cell.reader >= several_threads ? -1 : cell.reader);
        i = end;
      }
    }
    if (kind == Kind::read) {
      bool fresh = cell.read_epoch != thread_epoch;
      if (fresh || cell.reader == thread) {
        cell.reader = static_cast<uint16_t>(thread);
        cell.reader_warp = warp;
      } else {
        cell.reader = cell.reader != several_warps && cell.reader_warp == warp ? several_threads : several_warps;
      }
      cell.read_epoch = thread_epoch;
      cell.read_meeting = meeting;
    } else {
      cell.write_epoch = thread_epoch;
      cell.write_meeting = meeting;
      cell.writer = static_cast<uint16_t>(thread);
      cell.atomic = kind == Kind::atomic;
    }
  }
}

Region *find(const void *address, size_t *offset) {
  auto p = static_cast<const uint8_t *>(address);
  if (p >= arena && p < arena + max_cores * core_bytes) {
    size_t at = static_cast<size_t>(p - arena);
    size_t owner = at / core_bytes, memory = at % core_bytes / slot_bytes;
    if (owner >= core_count || memory >= memory_count) return nullptr;
    *offset = at % slot_bytes;
    return &cores[owner].memory[memory];
  }
  for (Region &region : global) {
    if (p >= region.base - guard_bytes && p < region.base + region.size + guard_bytes) {
      *offset = static_cast<size_t>(p - region.base);
      return &region;
    }
  }
  return nullptr;
}

// Finds and checks an access; null when it must not happen.
Region *access(const void *address, size_t bytes, Kind kind, const char *instruction, size_t alignment,
               size_t *offset) {
  Region *region = find(address, offset);
  if (!region) {
    report(instruction, format("%s %zu bytes at an address outside UB and every tensor", verb(kind), bytes));
    return nullptr;
  }
  if (*offset + bytes > region->size || *offset > region->size) {
    auto begin = static_cast<long>(*offset);
    report(instruction, format("out of range: %s %s bytes [%ld, %ld), of %zu", verb(kind), region->name.c_str(), begin,
                               begin + static_cast<long>(bytes), region->size));
    return nullptr;
  }
  if (alignment > 1 && region->core >= 0 && *offset % alignment) {
    report(instruction, format("misaligned: %s %s, which must start at a multiple of %zu", verb(kind),
                               range(*region, *offset, *offset + bytes).c_str(), alignment));
    return nullptr;
  }
  traffic[current_pipe][region->core < 0][kind != Kind::read] += bytes;
  if (settings.mode == fast) return region;
  record(*region, *offset, *offset + bytes, kind, instruction);
  if (thread >= 0) record_threads(*region, *offset, *offset + bytes, kind, instruction);
  return region;
}

Core *sibling(bool cube, int sub) {
  for (size_t i = 0; i < core_count; ++i) {
    if (cores[i].block == core->block && cores[i].cube == cube && cores[i].sub_block == sub) return &cores[i];
  }
  return nullptr;
}

bool undefined_at(const Region &region, size_t i) {
  return settings.mode != fast && region.core >= 0 && (region.cells[i].write_epoch == 0 || region.cells[i].undefined);
}

// Within one vector function a load must not overtake a store to the same bytes: asc_mem_bar orders them.
void check_vector_order(Region &region, size_t begin, size_t end, Kind kind, const char *instruction) {
  if (!settings.check_vector_order || settings.mode == fast || !in_vector_function || region.core < 0) return;
  if (!region.stamps) region.stamps = static_cast<uint32_t *>(map(region.size * sizeof(uint32_t)));
  for (size_t i = begin; i < end; ++i) {
    if (kind == Kind::write) {
      region.stamps[i] = vector_interval;
    } else if (region.stamps[i] == vector_interval) {
      report(instruction, format("reads %s, stored in the same vector function with no asc_mem_bar between",
                                 range(region, i, end).c_str()));
      return;
    }
  }
}

} // namespace

void fail(const char *instruction, const char *text, ...) {
  va_list arguments;
  va_start(arguments, text);
  report(instruction, vformat(text, arguments));
  va_end(arguments);
}

void read(void *to, const void *from, size_t bytes, const char *instruction, size_t alignment, uint64_t *undefined) {
  size_t offset = 0;
  Region *region = access(from, bytes, Kind::read, instruction, alignment, &offset);
  if (!region) {
    std::memset(to, poison, bytes);
    return;
  }
  check_vector_order(*region, offset, offset + bytes, Kind::read, instruction);
  std::memcpy(to, from, bytes);
  if (!undefined) return;
  for (size_t i = 0; i < bytes; ++i) {
    uint64_t bit = uint64_t{1} << i % 64;
    undefined[i / 64] = undefined_at(*region, offset + i) ? undefined[i / 64] | bit : undefined[i / 64] & ~bit;
  }
}

void write(void *to, const void *from, size_t bytes, const char *instruction, size_t alignment,
           const uint64_t *undefined) {
  size_t offset = 0;
  Region *region = access(to, bytes, Kind::write, instruction, alignment, &offset);
  if (!region) return;
  check_vector_order(*region, offset, offset + bytes, Kind::write, instruction);
  std::memcpy(to, from, bytes);
  if (!undefined || settings.mode == fast) return;
  for (size_t i = 0; i < bytes; ++i) region->cells[offset + i].undefined = undefined[i / 64] >> i % 64 & 1;
}

bool atomic(const void *address, size_t bytes, const char *instruction) {
  size_t offset = 0;
  return access(address, bytes, Kind::atomic, instruction, bytes, &offset) != nullptr;
}

void copy_unchecked(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }

uint8_t *touch(Memory memory, uint64_t offset, size_t bytes, bool writes, const char *instruction) {
  // L1 belongs to the cube core, and its vector cores write to it.
  Core *owner = memory == Memory::l1 && !core->cube ? sibling(true, 0) : core;
  if (!owner) {
    report(instruction, "this kernel has no cube core, whose L1 it could use");
    return nullptr;
  }
  Region &region = owner->memory[static_cast<int>(memory)];
  size_t found = 0;
  uint8_t *address = region.base + offset;
  if (offset >= slot_bytes) {
    report(instruction, format("out of range: %s %s byte %zu", writes ? "writes" : "reads", region.name.c_str(),
                               static_cast<size_t>(offset)));
    return nullptr;
  }
  return access(address, bytes, writes ? Kind::write : Kind::read, instruction, 1, &found) ? address : nullptr;
}

uint8_t *ub() { return core->memory[0].base; }
uint8_t *vector_ub(int sub_block) {
  Core *vector = sibling(false, sub_block);
  return vector ? vector->memory[0].base : nullptr;
}
bool is_cube_core() { return core->cube; }
int sub_block() { return core->sub_block; }
void order_vector_memory() { ++vector_interval; }

// ---- pipes ---------------------------------------------------------------------------------------------------------

// Switches stacks, saving the registers that a call preserves.
extern "C" void emu_switch(void **save, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "the emulator's context switch is written for x86-64 only"
#endif

namespace {

void *prepare(uint8_t *stack, size_t bytes, void (*entry)()) {
  auto *top = reinterpret_cast<uint64_t *>(stack + bytes - 64);
  *--top = 0; // keeps the stack aligned as after a call
  *--top = reinterpret_cast<uint64_t>(entry);
  return top - 6;
}

Context scheduler;

void tick(int p) {
  Actor self = core->actor(p);
  history[self].resize(core->clock[p].at(self) + 2, nullptr);
  ++core->clock[p][self];
}

bool step(int p) {
  auto &queue = core->queue[p];
  if (queue.empty()) return false;
  if (!queue.front().work) {
    if (!queue.front().attempt()) return false;
    queue.pop_front();
    return true;
  }
  Operation next = std::move(queue.front());
  queue.pop_front();
  Actor self = core->actor(p);
  history[self].resize(core->clock[p].at(self) + 1, nullptr);
  history[self][core->clock[p].at(self)] = next.name;
  extended_sets.clear();
  current_pipe = p;
  operation = next.name;
  in_vector_function = p == PIPE_V;
  ++vector_interval;
  next.attempt();
  tick(p);
  extended_sets.clear();
  current_pipe = PIPE_S;
  operation = "scalar code";
  in_vector_function = false;
  return true;
}

bool run_one() {
  size_t start = settings.mode == adversarial ? random_source() % pipe_count : PIPE_MTE2;
  for (size_t i = 0; i < pipe_count; ++i) {
    if (step(static_cast<int>((start + i) % pipe_count))) return true;
  }
  return false;
}

void enter_core(Core &next) {
  core = &next;
  block_idx = next.block;
  blockIdx.x = static_cast<uint32_t>(next.block);
}

void yield_core() {
  Core *self = core;
  emu_switch(&self->context.stack_pointer, scheduler.stack_pointer);
  enter_core(*self);
}

// In program order the pipes catch up at once; otherwise they lag behind by chance.
void advance() {
  if (settings.mode == adversarial) {
    while (random_source() % 4 == 0 && run_one()) {
    }
  } else {
    while (run_one()) {
    }
  }
}

void enqueue(pipe_t p, Operation next) {
  core->queue[p].push_back(std::move(next));
  advance();
}

// Blocks the scalar program until the condition holds.
template <class Condition> void block_until(Condition holds) {
  while (!holds()) {
    if (run_one()) continue;
    core->state = State::waiting;
    yield_core();
    core->state = State::running;
  }
}
void drain_scalar() {
  block_until([] { return core->queue[PIPE_S].empty(); });
}

bool valid_event(const char *instruction, int event) {
  if (event >= 0 && event < event_count) return true;
  fail(instruction, "event %d; a pair of pipes has events 0 to %d", event, event_count - 1);
  return false;
}
bool valid_flag(const char *instruction, int flag) {
  if (flag >= 0 && flag < flag_count) return true;
  fail(instruction, "flag %d; there are flags 0 to %d", flag, flag_count - 1);
  return false;
}

// Rounds of barriers between cores of one kind: all blocks, or the vector cores of one.
struct Round {
  size_t count = 0;
  Clock clock;
};
std::unordered_map<uint64_t, Round> rounds;

size_t members(Scope scope) {
  size_t count = 0;
  for (size_t i = 0; i < core_count; ++i) {
    count += cores[i].cube == core->cube && (scope == Scope::inter || cores[i].block == core->block);
  }
  return count;
}
Round &round_of(Scope scope, int flag, uint64_t number) {
  uint64_t group = scope == Scope::inter ? core->cube : 2 + static_cast<uint64_t>(core->block);
  return rounds[(group << 40 | static_cast<uint64_t>(flag) << 32 | number) * 2 + (scope == Scope::inter)];
}

constexpr const char *arrive_names[] = {"asc_sync_inter_arrive", "asc_sync_subblock_arrive", "asc_sync_block_arrive",
                                        "asc_sync_intra_arrive"};
constexpr const char *wait_names[] = {"asc_sync_inter_wait", "asc_sync_subblock_wait", "asc_sync_block_wait",
                                      "asc_sync_intra_wait"};

void send(Core *to, Scope scope, int flag, const Clock &clock) {
  if (!to || flag >= flag_count) {
    fail(arrive_names[static_cast<int>(scope)], "flag %d has no receiver in this kernel", flag);
    return;
  }
  to->arrivals[scope == Scope::intra][flag].push_back(clock);
}

bool do_arrive(Scope scope, int flag, int p) {
  const Clock &clock = core->clock[p];
  switch (scope) {
  case Scope::inter:
  case Scope::sub_block: {
    uint64_t number = core->arrived[flag + (scope == Scope::inter ? 0 : flag_count)]++;
    Round &round = round_of(scope, flag, number);
    if (round.count++ == 0) {
      round.clock = clock;
    } else {
      round.clock.join(clock);
    }
    break;
  }
  case Scope::block:
    if (core->cube) {
      send(sibling(false, 0), scope, flag, clock);
      send(sibling(false, 1), scope, flag, clock);
    } else {
      send(sibling(true, 0), scope, flag, clock);
    }
    break;
  case Scope::intra:
    // The cube core has flags 0 to 15 for the first vector core and 16 to 31 for the second.
    if (core->cube) {
      send(sibling(false, flag / 16), scope, flag % 16, clock);
    } else {
      send(sibling(true, 0), scope, flag + 16 * core->sub_block, clock);
    }
    break;
  }
  tick(p);
  return true;
}

bool do_wait(Scope scope, int flag, int p) {
  if (scope == Scope::inter || scope == Scope::sub_block) {
    uint64_t &number = core->waits[flag + (scope == Scope::inter ? 0 : flag_count)];
    Round &round = round_of(scope, flag, number);
    if (round.count < members(scope)) return false;
    core->clock[p].join(round.clock);
    ++number;
    return true;
  }
  auto &arrivals = core->arrivals[scope == Scope::intra][flag];
  // With scope block the cube core waits for both vector cores.
  size_t needed = scope == Scope::block && core->cube ? 2 : 1;
  if (arrivals.size() < needed) return false;
  for (size_t i = 0; i < needed; ++i) {
    core->clock[p].join(arrivals.front());
    arrivals.pop_front();
  }
  return true;
}

} // namespace

void issue(pipe_t p, const char *instruction, std::function<void()> work) {
  auto attempt = [work = std::move(work)] {
    work();
    return true;
  };
  enqueue(p, {std::move(attempt), instruction, true, p, p, 0});
}

void notify(pipe_t from, pipe_t to, int event) {
  if (!valid_event("asc_sync_notify", event)) return;
  auto attempt = [=] {
    core->flags[from][to][event].push_back(core->clock[from]);
    tick(from);
    return true;
  };
  enqueue(from, {attempt, "asc_sync_notify", false, from, to, event});
  if (from == PIPE_S) drain_scalar();
}

void wait(pipe_t from, pipe_t to, int event) {
  if (!valid_event("asc_sync_wait", event)) return;
  auto attempt = [=] {
    auto &flags = core->flags[from][to][event];
    if (flags.empty()) return false;
    core->clock[to].join(flags.front());
    flags.pop_front();
    return true;
  };
  enqueue(to, {attempt, "asc_sync_wait", false, from, to, event});
  if (to == PIPE_S) drain_scalar();
}

// A pipe runs in order by itself; only a barrier of all pipes waits.
void barrier(pipe_t p) {
  if (p != PIPE_ALL) return;
  block_until([] {
    return std::all_of(std::begin(core->queue), std::end(core->queue), [](auto &queue) { return queue.empty(); });
  });
  Clock all = core->clock[0];
  for (const Clock &clock : core->clock) all.join(clock);
  for (Clock &clock : core->clock) clock = all;
  for (int i = 0; i < pipe_count; ++i) tick(i);
}

void arrive(Scope scope, pipe_t p, int flag) {
  const char *name = arrive_names[static_cast<int>(scope)];
  if (!valid_flag(name, flag)) return;
  enqueue(p, {[=] { return do_arrive(scope, flag, p); }, name, false, p, p, flag});
  if (p == PIPE_S) drain_scalar();
}

void await(Scope scope, pipe_t p, int flag) {
  const char *name = wait_names[static_cast<int>(scope)];
  if (!valid_flag(name, flag)) return;
  enqueue(p, {[=] { return do_wait(scope, flag, p); }, name, false, p, p, flag});
  if (p == PIPE_S) drain_scalar();
}

namespace {

// A lock waits for the unlocks of its buffer that were issued before it.
void enqueue_lock(pipe_t p, int buffer) {
  uint64_t needed = core->locks[buffer].issued;
  auto attempt = [=] {
    Lock &state = core->locks[buffer];
    if (state.done < needed) return false;
    if (state.done) core->clock[p].join(state.clock);
    return true;
  };
  enqueue(p, {attempt, "asc_lock", false, p, p, buffer});
}
void enqueue_unlock(pipe_t p, int buffer) {
  ++core->locks[buffer].issued;
  auto attempt = [=] {
    Lock &state = core->locks[buffer];
    if (state.done++) {
      state.clock.join(core->clock[p]);
    } else {
      state.clock = core->clock[p];
    }
    tick(p);
    return true;
  };
  enqueue(p, {attempt, "asc_unlock", false, p, p, buffer});
}

} // namespace

void lock(pipe_t p, int buffer, asc_lock_mode mode) {
  if (!valid_flag("asc_lock", buffer)) return;
  if (mode != ASC_LOCK_BLOCK) {
    fail("asc_lock", "mode ASC_LOCK_NON_BLOCK is not emulated");
    return;
  }
  enqueue_lock(p, buffer);
}
void unlock(pipe_t p, int buffer, asc_lock_mode) {
  if (valid_flag("asc_unlock", buffer)) enqueue_unlock(p, buffer);
}
void lock_unit(pipe_t p) { enqueue_lock(p, flag_count + (p == PIPE_M)); }
void unlock_unit(pipe_t p) { enqueue_unlock(p, flag_count + (p == PIPE_FIX)); }

// ---- SIMT threads --------------------------------------------------------------------------------------------------

namespace {

enum class ThreadState { ready, at_barrier, meeting, done };
struct Thread {
  Context context;
  ThreadState state = ThreadState::ready;
  uint64_t value = 0;
  void *site = nullptr;
};
std::vector<Thread> threads;
std::vector<uint8_t *> thread_stacks;
std::vector<Warp> warps;
Context thread_scheduler;
const std::function<void()> *thread_body;

void thread_entry() {
  (*thread_body)();
  threads[thread].state = ThreadState::done;
  emu_switch(&threads[thread].context.stack_pointer, thread_scheduler.stack_pointer);
}

void suspend(ThreadState state) {
  Thread &self = threads[thread];
  self.state = state;
  emu_switch(&self.context.stack_pointer, thread_scheduler.stack_pointer);
}

void run_thread(int number) {
  thread = number;
  auto n = static_cast<uint32_t>(number);
  threadIdx = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
  emu_switch(&thread_scheduler.stack_pointer, threads[number].context.stack_pointer);
  thread = -1;
}

bool run_ready(const std::vector<int> &order) {
  bool ran = false;
  for (int number : order) {
    if (threads[number].state != ThreadState::ready) continue;
    ran = true;
    run_thread(number);
  }
  return ran;
}

// Releases, in each warp, the lanes that wait at the same site as the first one that waits.
bool release_meetings() {
  bool released = false;
  for (size_t w = 0; w < warps.size(); ++w) {
    void *site = nullptr;
    Warp warp{};
    for (size_t lane = 0; lane < 32 && w * 32 + lane < threads.size(); ++lane) {
      Thread &t = threads[w * 32 + lane];
      if (t.state != ThreadState::meeting) continue;
      if (!site) site = t.site;
      if (t.site != site) continue;
      warp.active |= 1u << lane;
      warp.value[lane] = t.value;
      t.state = ThreadState::ready;
    }
    if (!site) continue;
    warps[w] = warp;
    ++meetings[w];
    released = true;
  }
  return released;
}

bool release_barrier() {
  bool released = false;
  for (Thread &t : threads) {
    if (t.state != ThreadState::at_barrier) continue;
    t.state = ThreadState::ready;
    released = true;
  }
  if (released) ++thread_epoch;
  return released;
}

} // namespace

void run_threads(dim3 shape, const std::function<void()> &body) {
  size_t count = static_cast<size_t>(shape.x) * shape.y * shape.z;
  blockDim = shape;
  thread_body = &body;
  in_vector_function = false;
  threads.assign(count, {});
  warps.assign((count + 31) / 32, {});
  meetings.assign(warps.size(), 1);
  ++thread_epoch;
  while (thread_stacks.size() < count) thread_stacks.push_back(map_stack(thread_stack_bytes));
  std::vector<int> order(count);
  for (size_t i = 0; i < count; ++i) {
    order[i] = static_cast<int>(i);
    threads[i].context.stack_pointer = prepare(thread_stacks[i], thread_stack_bytes, thread_entry);
  }
  if (settings.mode == adversarial) std::shuffle(order.begin(), order.end(), random_source);
  while (run_ready(order) || release_meetings() || release_barrier()) {
  }
}

void sync_threads() { suspend(ThreadState::at_barrier); }

[[gnu::noinline]] Warp meet(uint64_t value) {
  int self = thread;
  threads[self].value = value;
  threads[self].site = __builtin_return_address(0);
  suspend(ThreadState::meeting);
  Warp warp = warps[self / 32];
  warp.lane = self % 32;
  return warp;
}

// ---- registers of a core that copies read --------------------------------------------------------------------------

void set_padding(uint64_t bits) { core->padding = bits; }
uint64_t padding() { return core->padding; }
void set_update(Update update, Element element) { core->store_mode = {update, element}; }
StoreMode store_mode() { return core->store_mode; }

} // namespace emu

// ---- launches ------------------------------------------------------------------------------------------------------

using namespace emu;

namespace {

struct Launch {
  const char *kernel;
  void (*entry)(void **);
  void **arguments;
  int64_t blocks;
  int32_t kind; // 0 vector, 1 cube, 2 mixed
  int32_t concurrent;
  int64_t ub_bytes;
  Mode mode;
  int32_t check_vector_order;
  uint64_t seed;
};
const Launch *launch;

sigjmp_buf fault;

void on_fault(int) {
  report("memory access", "segmentation fault: an address outside every memory, or local arrays beyond the stack");
  siglongjmp(fault, 1);
}

void core_entry() {
  launch->entry(launch->arguments);
  core->state = State::finished;
  emu_switch(&core->context.stack_pointer, scheduler.stack_pointer);
}

void start_core(size_t slot, int block) {
  if (cores.size() <= slot) {
    cores.emplace_back();
    cores.back().stack = map_stack(stack_bytes);
    for (int m = 0; m < memory_count; ++m) {
      Region &region = cores.back().memory[m];
      region.name = memory_names[m];
      region.base = arena + slot * core_bytes + static_cast<size_t>(m) * slot_bytes;
      region.cells = static_cast<Cell *>(map(memory_sizes[m] * sizeof(Cell)));
      region.size = memory_sizes[m];
      region.core = static_cast<int>(slot);
    }
  }
  Core &c = cores[slot];
  c.block = block;
  int position = static_cast<int>(slot) % cores_per_block; // in a mixed kernel, 0 is the cube core
  c.index = block * cores_per_block + position;
  c.cube = launch->kind == 1 || (launch->kind == 2 && position == 0);
  c.sub_block = launch->kind == 2 && position ? position - 1 : 0;
  c.memory[0].size = static_cast<size_t>(launch->ub_bytes);
  for (int m = 0; m < memory_count; ++m) {
    Region &region = c.memory[m];
    if (region.used || region.size != memory_sizes[m] || m == 0) {
      std::memset(static_cast<void *>(region.cells), 0, region.used * sizeof(Cell));
      region.used = 0;
    }
    std::memset(region.base, poison, m == 0 || c.cube ? memory_sizes[m] : 0);
  }
  for (auto &queue : c.queue) queue.clear();
  for (auto &from : c.flags) {
    for (auto &to : from) {
      for (auto &flags : to) flags.clear();
    }
  }
  for (auto &scope : c.arrivals) {
    for (auto &flags : scope) flags.clear();
  }
  std::fill(c.waits.begin(), c.waits.end(), 0);
  std::fill(c.arrived.begin(), c.arrived.end(), 0);
  for (Lock &lock : c.locks) lock = {};
  c.padding = 0;
  c.store_mode = {};
  c.state = State::ready;
  c.context.stack_pointer = prepare(c.stack, stack_bytes, core_entry);
}

bool run_core(Core &c) {
  bool progress = false;
  enter_core(c);
  if (c.state == State::ready || c.state == State::waiting) {
    size_t before = 0, after = 0;
    for (auto &queue : c.queue) before += queue.size();
    bool first = c.state == State::ready;
    c.state = State::running;
    emu_switch(&scheduler.stack_pointer, c.context.stack_pointer);
    enter_core(c);
    for (auto &queue : c.queue) after += queue.size();
    progress = first || c.state == State::finished || before != after;
  }
  while (run_one()) progress = true;
  return progress;
}

bool is_live(const Core &c) {
  return c.state != State::finished ||
         std::any_of(std::begin(c.queue), std::end(c.queue), [](auto &queue) { return !queue.empty(); });
}

void report_deadlock() {
  for (size_t i = 0; i < core_count; ++i) {
    Core &c = cores[i];
    enter_core(c);
    for (int p = 0; p < pipe_count; ++p) {
      if (c.queue[p].empty()) continue;
      const Operation &stuck = c.queue[p].front();
      current_pipe = p;
      operation = stuck.name;
      std::string what = stuck.from == stuck.to ? format("flag %d", stuck.id)
                                                : format("%s to %s, event %d", pipe_names[stuck.from],
                                                         pipe_names[stuck.to], stuck.id);
      report(stuck.name, "deadlock: waits for ever for " + what);
    }
    current_pipe = PIPE_S;
    operation = "scalar code";
  }
}

void report_left_flags() {
  for (size_t i = 0; i < core_count; ++i) {
    Core &c = cores[i];
    enter_core(c);
    for (int from = 0; from < pipe_count; ++from) {
      for (int to = 0; to < pipe_count; ++to) {
        for (int event = 0; event < event_count; ++event) {
          size_t left = c.flags[from][to][event].size();
          if (!left) continue;
          fail("asc_sync_notify", "unbalanced flag: %s to %s, event %d, has %zu notifications that nothing waits for",
               pipe_names[from], pipe_names[to], event, left);
        }
      }
    }
    for (int intra = 0; intra < 2; ++intra) {
      for (int flag = 0; flag < flag_count; ++flag) {
        size_t left = c.arrivals[intra][flag].size();
        if (!left) continue;
        fail(intra ? "asc_sync_intra_arrive" : "asc_sync_block_arrive",
             "unbalanced flag %d: %zu arrivals that nothing waits for", flag, left);
      }
    }
  }
}

// Runs cores until all are finished. Blocks that may wait for each other run together.
void run_group(int block, int blocks) {
  first_block = block;
  core_count = static_cast<size_t>(blocks) * cores_per_block;
  rounds.clear();
  for (size_t i = 0; i < core_count; ++i) start_core(i, block + static_cast<int>(i) / cores_per_block);
  Clock zero;
  zero.first = static_cast<Actor>(block * cores_per_block * pipe_count);
  zero.epochs.assign(core_count * pipe_count, 0);
  for (size_t i = 0; i < core_count; ++i) {
    for (int p = 0; p < pipe_count; ++p) {
      cores[i].clock[p] = zero;
      cores[i].clock[p][cores[i].actor(p)] = 1;
    }
  }
  std::vector<size_t> order(core_count);
  for (size_t i = 0; i < core_count; ++i) order[i] = i;
  for (;;) {
    if (settings.mode == adversarial) std::shuffle(order.begin(), order.end(), random_source);
    bool progress = false, live = false;
    for (size_t i : order) progress |= run_core(cores[i]);
    for (size_t i = 0; i < core_count; ++i) live |= is_live(cores[i]);
    if (!live) break;
    if (!progress) {
      report_deadlock();
      return;
    }
  }
  report_left_flags();
}

void check_guards() {
  for (Region &region : global) {
    auto damaged = [&](const uint8_t *from) {
      return std::any_of(from, from + guard_bytes, [](uint8_t byte) { return byte != guard; });
    };
    if (damaged(region.base - guard_bytes) || damaged(region.base + region.size)) {
      add_once(reports, format("%s: out of range: a store hit memory around %s, of %zu bytes", launch->kernel,
                               region.name.c_str(), region.size));
    }
  }
}

// Hooks of -fsanitize=thread: every access of the generated scalar and SIMT code.
void observe(const void *address, size_t bytes, bool writes) {
  size_t offset = 0;
  Region *region = find(address, &offset);
  if (!region) return;
  const char *name = thread >= 0 ? operation : "scalar code";
  Kind kind = writes ? Kind::write : Kind::read;
  if (!writes && offset + bytes <= region->size && undefined_at(*region, offset)) {
    add_once(notes, where(name) + ": reads " + range(*region, offset, offset + bytes) +
                        ", to which nothing defined was written");
  }
  access(address, bytes, kind, name, 1, &offset);
}

} // namespace

extern "C" {

// Copies a tensor into guarded global memory and returns its address there.
void *emu_bind(const char *name, const void *data, size_t bytes, size_t misalignment) {
  Region region;
  size_t before = (guard_bytes + 511) / 512 * 512 + misalignment;
  region.name = name;
  region.mapping_bytes = before + bytes + guard_bytes;
  region.mapping = static_cast<uint8_t *>(map(region.mapping_bytes));
  region.base = region.mapping + before;
  region.size = bytes;
  region.cells = static_cast<Cell *>(map((bytes + 1) * sizeof(Cell)));
  std::memset(region.base - guard_bytes, guard, guard_bytes);
  std::memset(region.base + bytes, guard, guard_bytes);
  std::memcpy(region.base, data, bytes);
  global.push_back(region);
  return region.base;
}

void emu_unbind(void *address, void *data) {
  for (auto region = global.begin(); region != global.end(); ++region) {
    if (region->base != address) continue;
    std::memcpy(data, region->base, region->size);
    munmap(region->mapping, region->mapping_bytes);
    munmap(region->cells, (region->size + 1) * sizeof(Cell));
    if (region->threads) munmap(region->threads, region->size * sizeof(ThreadCell));
    global.erase(region);
    return;
  }
}

void emu_launch(const Launch *request) {
  launch = request;
  settings = {launch->kernel, launch->mode, launch->check_vector_order != 0};
  random_source.seed(launch->seed);
  std::memset(traffic, 0, sizeof traffic);
  vector_instructions = multiplications = 0;
  reports.clear();
  seen.clear();
  notes.clear();
  access_sets.assign(1, {});
  extended_sets.clear();
  cores_per_block = launch->kind == 2 ? 3 : 1;
  history.assign(static_cast<size_t>(launch->blocks) * cores_per_block * pipe_count, {});
  if (!arena) arena = static_cast<uint8_t *>(map(max_cores * core_bytes));
  block_num = launch->blocks;
  gridDim = {static_cast<uint32_t>(launch->blocks), 1, 1};
  auto blocks = static_cast<int>(launch->blocks);
  int group = launch->concurrent ? blocks : 1;
  core = nullptr;
  current_pipe = PIPE_S;
  thread = -1;
  operation = "scalar code";
  if (static_cast<size_t>(group) * cores_per_block > max_cores) {
    add_once(reports, format("%s: %d blocks that wait for each other; the emulator holds %zu cores", launch->kernel,
                             group, max_cores));
    return;
  }
  struct sigaction action {}, segv, bus;
  action.sa_handler = on_fault;
  action.sa_flags = SA_NODEFER | SA_ONSTACK; // the running stack may be the one that overflowed
  static auto *signal_stack = static_cast<uint8_t *>(map(stack_bytes));
  stack_t alternative{}, previous{};
  alternative.ss_sp = signal_stack;
  alternative.ss_size = stack_bytes;
  sigaltstack(&alternative, &previous);
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  if (sigsetjmp(fault, 1) == 0) {
    for (int block = 0; block < blocks && reports.empty(); block += group) run_group(block, group);
  }
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  sigaltstack(&previous, nullptr);
  thread = -1;
  check_guards();
}

// Bytes that a pipe read from or wrote to global memory or the memories of cores, in the last launch.
uint64_t emu_traffic(int pipe, int global, int written) { return traffic[pipe][global][written]; }
uint64_t emu_vector_instructions() { return vector_instructions; }
uint64_t emu_multiplications() { return multiplications; }

size_t emu_report_count() { return reports.size(); }
const char *emu_report(size_t i) { return reports[i].c_str(); }
size_t emu_note_count() { return notes.size(); }
const char *emu_note(size_t i) { return notes[i].c_str(); }

#define EMU_HOOKS(n)                                                                                                   \
  void __tsan_read##n(void *p) { observe(p, n, false); }                                                               \
  void __tsan_write##n(void *p) { observe(p, n, true); }                                                               \
  void __tsan_unaligned_read##n(void *p) { observe(p, n, false); }                                                     \
  void __tsan_unaligned_write##n(void *p) { observe(p, n, true); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
void __tsan_read_range(void *p, unsigned long bytes) { observe(p, bytes, false); }
void __tsan_write_range(void *p, unsigned long bytes) { observe(p, bytes, true); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
}
