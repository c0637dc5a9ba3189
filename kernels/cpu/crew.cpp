// See crew.h.

#include "crew.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int64_t LINGER_NS = 2000000;   // a helper waits so long for the next pass before it sleeps
constexpr int64_t PATIENCE_NS = 100000;  // so long the owner waits for a helper before it fetches it
constexpr int SPINS = 64;                // between two looks at the clock

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<int32_t> &word, int32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<int32_t> &word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

struct alignas(128) Helper {
    std::atomic<int32_t> is_inside{0};   // it may be at work on the open job
    std::atomic<int32_t> is_fetched{0};  // the owner sleeps until it is outside
    std::atomic<pid_t> thread{0};
    int core = -1;  // borrowed; -1: one of the process's own
};

struct Crew {
    std::vector<std::unique_ptr<Helper>> helpers;
    alignas(128) std::atomic<bool> is_taken{false};  // some thread has a job open
    alignas(128) std::atomic<int32_t> num_shifts{0};  // passes that run now
    std::atomic<int32_t> num_asleep{0};
    alignas(128) std::atomic<int64_t> job{0};  // odd while one is open
    Piece piece = nullptr;
    void *body = nullptr;
    int64_t count = 0;
    alignas(128) std::atomic<int64_t> next{0};
    alignas(128) std::atomic<int64_t> num_helped{0};
    std::atomic<int64_t> num_fetched{0};
};

Crew crew;
thread_local bool is_at_work = false;  // in a piece, or owner of an open job

// How many pieces the caller did.
int64_t work() {
    int64_t num_done = 0;
    is_at_work = true;
    for (int64_t index; (index = crew.next.fetch_add(1)) < crew.count; num_done++) crew.piece(crew.body, index);
    is_at_work = false;
    return num_done;
}

bool move_to(pid_t thread, int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(thread, sizeof cores, &cores) == 0;
}

void join_job(Helper &self, int64_t job) {
    self.is_inside.store(1);  // in one order with the two below and the owner's: it sees this, or we see its close
    if (crew.job.load() == job) crew.num_helped.fetch_add(work());
    self.is_inside.store(0);
    if (self.is_fetched.load()) wake(self.is_inside);
}

// Waits for a shift, and for its jobs.
void help(Helper &self) {
    self.thread.store(static_cast<pid_t>(syscall(SYS_gettid)));
    if (self.core >= 0) {
        const sched_param none{};
        if (sched_setscheduler(0, SCHED_IDLE, &none) != 0 || !move_to(0, self.core)) return;
    }
    int64_t seen = 0, idle_since_ns = now_ns();
    for (int spins = 0;; spins++) {
        const int64_t job = crew.job.load(std::memory_order_acquire);
        if (job % 2 == 1 && job != seen) {
            seen = job;
            join_job(self, job);
            continue;
        }
        pause_briefly();
        if (crew.num_shifts.load() > 0) {
            idle_since_ns = 0;
        } else if (spins % SPINS == 0) {
            if (idle_since_ns == 0) idle_since_ns = now_ns();
            if (now_ns() - idle_since_ns < LINGER_NS) continue;
            crew.num_asleep.fetch_add(1);
            sleep_while(crew.num_shifts, 0);
            crew.num_asleep.fetch_sub(1);
        }
    }
}

// The helper lost its core, most likely: it may have this one as long as the owner waits.
void fetch(Helper &helper) {
    cpu_set_t own;
    sched_getaffinity(0, sizeof own, &own);
    helper.is_fetched.store(1);
    const pid_t thread = helper.thread.load();
    if (helper.core >= 0) sched_setaffinity(thread, sizeof own, &own);
    while (helper.is_inside.load()) sleep_while(helper.is_inside, 1);
    if (helper.core >= 0) move_to(thread, helper.core);
    helper.is_fetched.store(0);
    crew.num_fetched.fetch_add(1);
}

void await(Helper &helper) {
    const int64_t until_ns = now_ns() + PATIENCE_NS;
    for (int spins = 0; helper.is_inside.load(); spins++) {
        if (spins % SPINS == 0 && now_ns() > until_ns) return fetch(helper);
        pause_briefly();
    }
}

}  // namespace

void run_pieces(int64_t count, Piece piece, void *body) {
    if (count <= 1 || crew.helpers.empty() || is_at_work || crew.is_taken.exchange(true)) {
        for (int64_t index = 0; index < count; index++) piece(body, index);
        return;
    }
    crew.piece = piece, crew.body = body, crew.count = count;
    crew.next.store(0);
    crew.job.fetch_add(1);
    work();
    crew.job.fetch_add(1);
    for (auto &helper : crew.helpers)
        if (helper->is_inside.load()) await(*helper);
    crew.is_taken.store(false);
}

Shift::Shift() {
    if (crew.helpers.empty()) return;
    crew.num_shifts.fetch_add(1);
    if (crew.num_asleep.load() > 0) wake(crew.num_shifts);
}

Shift::~Shift() {
    if (!crew.helpers.empty()) crew.num_shifts.fetch_sub(1);
}

// Once in a process, before its first pass: helpers on cores[0..num]; -1 is any core of the process's own.
extern "C" void start_crew(const int32_t *cores, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        crew.helpers.push_back(std::make_unique<Helper>());
        crew.helpers.back()->core = cores[i];
    }
    for (auto &helper : crew.helpers) std::thread(help, std::ref(*helper)).detach();
}

// counts[0]: pieces that helpers did; counts[1]: how often one had to be fetched from a core that it had lost.
extern "C" void crew_counts(int64_t *counts) {
    counts[0] = crew.num_helped.load();
    counts[1] = crew.num_fetched.load();
}
