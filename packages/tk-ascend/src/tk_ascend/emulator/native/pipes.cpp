// Pipes, flags, barriers and locks.

#include <unordered_map>

#include "state.h"

namespace emu {

Context scheduler;

// Switches stacks, saving the registers that a call preserves.
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

void *prepare_stack(uint8_t *stack, size_t bytes, void (*entry)()) {
  auto *top = reinterpret_cast<uint64_t *>(stack + bytes - 64);
  *--top = 0; // keeps the stack aligned as after a call
  *--top = reinterpret_cast<uint64_t>(entry);
  return top - 6;
}

namespace {

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
  current_pipe = p;
  operation = next.name;
  in_vector_function = p == PIPE_V;
  ++vector_interval;
  next.attempt();
  tick(p);
  current_pipe = PIPE_S;
  operation = "scalar code";
  in_vector_function = false;
  return true;
}

} // namespace

bool run_one() {
  size_t start = PIPE_MTE2;
  if (settings.mode == adversarial) start = random_source() % pipe_count;
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

namespace {

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

void clear_rounds() { rounds.clear(); }

} // namespace emu
