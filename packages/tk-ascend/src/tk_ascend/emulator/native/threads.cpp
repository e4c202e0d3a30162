// SIMT regions.

#include "state.h"

namespace emu {
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
  simt_threads += count;
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
    threads[i].context.stack_pointer = prepare_stack(thread_stacks[i], thread_stack_bytes, thread_entry);
  }
  if (settings.mode == adversarial) std::shuffle(order.begin(), order.end(), random_source);
  while (run_ready(order) || release_meetings() || release_barrier()) {
  }
}

void sync_threads() {
  ++simt_barriers;
  suspend(ThreadState::at_barrier);
}

[[gnu::noinline]] Warp meet(uint64_t value) {
  int self = thread;
  threads[self].value = value;
  threads[self].site = __builtin_return_address(0);
  suspend(ThreadState::meeting);
  Warp warp = warps[self / 32];
  warp.lane = self % 32;
  return warp;
}

} // namespace emu
