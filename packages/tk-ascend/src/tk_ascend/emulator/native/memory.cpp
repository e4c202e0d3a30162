// Reports, shadows of the memories, and checked accesses.

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unordered_map>
#include <unordered_set>

#include "state.h"

namespace emu {

uint64_t vector_instructions, multiplications;
Settings settings;
std::deque<Core> cores;
size_t core_count = 0;
int first_block = 0, cores_per_block = 1;
uint8_t *arena = nullptr;
std::deque<Region> global;
std::vector<std::vector<const char *>> history;
uint64_t traffic[pipe_count][2][2];
uint64_t simt_accesses[2][2], simt_threads, simt_barriers;
std::mt19937_64 random_source;
Core *core = nullptr;
int current_pipe = PIPE_S;
const char *operation = "scalar code";
int thread = -1;
bool in_vector_function = false;
uint32_t thread_epoch = 0, vector_interval = 0;
std::vector<uint32_t> meetings;
std::vector<std::string> reports, notes;

void *map(size_t bytes) {
  void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  return address;
}

uint8_t *map_stack(size_t bytes) {
  auto *stack = static_cast<uint8_t *>(map(bytes));
  mprotect(stack, 4096, PROT_NONE);
  return stack;
}

// ---- reports -------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t max_reports = 32;
std::unordered_set<std::string> seen;

std::string vformat(const char *text, va_list arguments) {
  char buffer[1024];
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  return buffer;
}
// Repetitions of a fault, at other bytes or by other threads, are not reported.
bool is_repeated(const char *instruction, const std::string &fault) {
  std::string key = std::string(instruction) + operation + pipe_names[current_pipe] + fault;
  return !seen.insert(key).second;
}

} // namespace

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
std::string range(const Region &region, size_t begin, size_t end) {
  return format("%s bytes [%zu, %zu)", region.name.c_str(), begin, end);
}

// ---- shadows -------------------------------------------------------------------------------------------------------

namespace {

// The size of UB differs between launches.
size_t capacity(const Region &region) { return region.core < 0 ? region.size : slot_bytes; }

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
std::vector<std::vector<Access>> access_sets;
// The sets that an access has been added to, and which they became.
std::unordered_map<uint32_t, uint32_t> extended_sets;
Access extending{};

// The set with an access added, and without those that are ordered before it.
uint32_t extend(uint32_t set, Actor actor, Epoch epoch, const Clock &clock) {
  if (actor != extending.actor || epoch != extending.epoch) {
    extended_sets.clear();
    extending = {actor, epoch};
  }
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
  if (!region.threads) region.threads = static_cast<ThreadCell *>(map(capacity(region) * sizeof(ThreadCell)));
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

} // namespace

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
  if (thread >= 0) ++simt_accesses[region->core < 0][kind != Kind::read];
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

namespace {

// Within one vector function a load must not overtake a store to the same bytes: asc_mem_bar orders them.
void check_vector_order(Region &region, size_t begin, size_t end, Kind kind, const char *instruction) {
  if (!settings.check_vector_order || settings.mode == fast || !in_vector_function || region.core < 0) return;
  if (!region.stamps) region.stamps = static_cast<uint32_t *>(map(capacity(region) * sizeof(uint32_t)));
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

void clear_accesses() {
  reports.clear();
  notes.clear();
  seen.clear();
  access_sets.assign(1, {});
  extended_sets.clear();
}

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

} // namespace emu
