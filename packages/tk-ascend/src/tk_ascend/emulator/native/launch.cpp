// Launches: global memory, blocks and their cores, and the interface to Python.

#include <csetjmp>
#include <csignal>
#include <sys/mman.h>

#include "state.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;
int64_t block_idx, block_num;

namespace emu {

// Registers of a core that copies read.
void set_padding(uint64_t bits) { core->padding = bits; }
uint64_t padding() { return core->padding; }
void set_update(Update update, Element element) { core->store_mode = {update, element}; }
StoreMode store_mode() { return core->store_mode; }

} // namespace emu

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
  c.context.stack_pointer = prepare_stack(c.stack, stack_bytes, core_entry);
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
  clear_rounds();
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
  std::memset(simt_accesses, 0, sizeof simt_accesses);
  vector_instructions = multiplications = simt_threads = simt_barriers = 0;
  clear_accesses();
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
uint64_t emu_simt_accesses(int global, int written) { return simt_accesses[global][written]; }
uint64_t emu_simt_threads() { return simt_threads; }
uint64_t emu_simt_barriers() { return simt_barriers; }
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
