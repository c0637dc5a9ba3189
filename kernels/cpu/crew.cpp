// See crew.h.

#include "crew.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int SPINS = 64;                // between two looks at the clock
constexpr int64_t LINGER_NS = 2000000;   // a helper waits so long for the next pass before it sleeps
constexpr int64_t PATIENCE_NS = 100000;  // so long the owner waits for a helper before it fetches it
constexpr int64_t CALL_NS = 1000000;     // a pass looks for helpers to call so often
constexpr int64_t WANTED_NS = 5000000;   // a core is wanted for so long after a pass has used it
constexpr int64_t GAP_NS = 200000;       // a helper that stood still for so long has lost its core
constexpr int64_t PROBE_NS = 1000000;    // and takes no work before it had it for so long
constexpr int64_t MIN_REST_NS = 20000000, MAX_REST_NS = 1000000000;  // doubles with every loss in a row
constexpr int MAX_CORES = 1024;

int64_t read_ns(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int64_t now_ns() { return read_ns(CLOCK_MONOTONIC); }

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
    std::atomic<int32_t> is_asleep{0};   // until it is called, which it should not be before rest_until_ns
    std::atomic<int32_t> is_called{0};
    std::atomic<int64_t> rest_until_ns{0};
    std::atomic<pid_t> thread{0};
    clockid_t clock{};  // of its running; set before it first comes inside
    int core = -1;      // borrowed; -1: one of the process's own

    int64_t run_ns() const { return read_ns(clock); }
};

struct Crew {
    std::vector<std::unique_ptr<Helper>> helpers;
    alignas(128) std::atomic<bool> is_taken{false};  // some thread has a job open
    alignas(128) std::atomic<int32_t> num_shifts{0};  // passes that run now
    std::atomic<int32_t> num_asleep{0};
    std::atomic<int64_t> last_call_ns{0};
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

// When a pass last used each core, by the monotonic clock: one page for all processes of this user on this host, so that
// workers leave each other's cores alone while those are at work. Without it helpers see that only by losing the core.
class Board {
  public:
    Board() {
        char path[64];
        snprintf(path, sizeof path, "/dev/shm/tandem-cores-%u", geteuid());
        const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (file < 0) return;
        if (ftruncate(file, SIZE) == 0) {
            void *mapped = mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (mapped != MAP_FAILED) stamps = static_cast<Stamp *>(mapped);
        }
        close(file);
    }

    void use_this_core() {
        const int core = sched_getcpu();
        if (stamps && core >= 0 && core < MAX_CORES) stamps[core].at_ns.store(now_ns(), std::memory_order_relaxed);
    }

    // The core is nobody's until somebody uses it again.
    void lend_this_core() {
        const int core = sched_getcpu();
        if (stamps && core >= 0 && core < MAX_CORES) stamps[core].at_ns.store(0, std::memory_order_relaxed);
    }

    bool is_any_wanted_outside(const cpu_set_t &cores) const {
        const int num_cores = std::min<int>(MAX_CORES, sysconf(_SC_NPROCESSORS_CONF));
        for (int core = 0; stamps && core < num_cores; core++)
            if (!CPU_ISSET(core, &cores) && is_wanted(core)) return true;
        return false;
    }

    bool is_wanted(int core) const {
        return stamps && core < MAX_CORES && now_ns() - stamps[core].at_ns.load(std::memory_order_relaxed) < WANTED_NS;
    }

  private:
    struct alignas(64) Stamp {
        std::atomic<int64_t> at_ns;
    };
    static constexpr size_t SIZE = MAX_CORES * sizeof(Stamp);
    Stamp *stamps = nullptr;
};

Board &board() {
    static Board shared;
    return shared;
}

// How many pieces the caller did.
int64_t work(bool is_borrowing) {
    int64_t num_done = 0;
    is_at_work = true;
    for (int64_t index; (index = crew.next.fetch_add(1)) < crew.count; num_done++) {
        if (!is_borrowing) board().use_this_core();
        crew.piece(crew.body, index);
    }
    is_at_work = false;
    return num_done;
}

bool move_to(pid_t thread, int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(thread, sizeof cores, &cores) == 0;
}

// False when the helper lost its core meanwhile.
bool join_job(Helper &self, int64_t job) {
    self.is_inside.store(1);  // in one order with the two below and the owner's: it sees this, or we see its close
    if (crew.job.load() == job) crew.num_helped.fetch_add(work(self.core >= 0));
    self.is_inside.store(0);
    const bool is_fetched = self.is_fetched.load();
    if (is_fetched) wake(self.is_inside);
    return !is_fetched;
}

// Until a pass calls, which none does within `rest_ns`.
void sleep_until_called(Helper &self, int64_t rest_ns) {
    self.rest_until_ns.store(now_ns() + rest_ns);
    self.is_called.store(0);
    self.is_asleep.store(1);
    crew.num_asleep.fetch_add(1);
    while (!self.is_called.load()) sleep_while(self.is_called, 0);
    crew.num_asleep.fetch_sub(1);
    self.is_asleep.store(0);
}

// Wakes those who sleep and whose cores nobody wants: one that is awake on a busy core is in others' way even if it does
// nothing.
void call_helpers() {
    if (crew.num_asleep.load() == 0) return;
    const int64_t ns = now_ns();
    if (ns - crew.last_call_ns.load() < CALL_NS) return;
    crew.last_call_ns.store(ns);
    for (auto &helper : crew.helpers) {
        if (!helper->is_asleep.load() || helper->is_called.load() || ns < helper->rest_until_ns.load()) continue;
        if (helper->core >= 0 && board().is_wanted(helper->core)) continue;
        helper->is_called.store(1);
        wake(helper->is_called);
    }
}

// Whether a helper's core is free. A borrowed one is, when no other worker wants it and the helper has been there for
// PROBE_NS without standing still; until it stands still.
class Loan {
  public:
    explicit Loan(Helper &self) : self(self) {}

    bool is_free() const { return self.core < 0 || (is_trusted && !board().is_wanted(self.core)); }

    // To be called again and again while the helper does nothing else; sleeps where the core is wanted.
    void watch() {
        if (self.core < 0) return;
        const int64_t ns = now_ns();
        if (ns - last_ns > GAP_NS) return give_back();
        if (board().is_wanted(self.core)) return rest(0);
        last_ns = ns;
        if (is_trusted || ns - since_ns < PROBE_NS) return;
        is_trusted = true;
        rest_ns = MIN_REST_NS;
    }

    // The core was lost.
    void give_back() {
        rest(rest_ns);
        rest_ns = std::min(2 * rest_ns, MAX_REST_NS);
    }

    void rest(int64_t ns) {
        sleep_until_called(self, ns);
        is_trusted = false, since_ns = last_ns = now_ns();
    }

    // After a time that says nothing about the core.
    void go_on() { last_ns = now_ns(); }

  private:
    Helper &self;
    bool is_trusted = false;
    int64_t since_ns = 0, last_ns = 0, rest_ns = MIN_REST_NS;
};

// Waits for passes, and for their jobs.
void help(Helper &self) {
    self.thread.store(static_cast<pid_t>(syscall(SYS_gettid)));
    pthread_getcpuclockid(pthread_self(), &self.clock);
    if (self.core >= 0) {
        const sched_param none{};
        if (sched_setscheduler(0, SCHED_IDLE, &none) != 0 || !move_to(0, self.core)) return;
    }
    Loan loan(self);
    loan.rest(0);
    int64_t seen = 0, idle_since_ns = 0;
    for (int spins = 0;; spins++) {
        const int64_t job = crew.job.load(std::memory_order_acquire);
        if (job % 2 == 1 && job != seen && loan.is_free()) {
            seen = job;
            if (join_job(self, job))
                loan.go_on();
            else
                loan.give_back();
            continue;
        }
        pause_briefly();
        if (spins % SPINS != 0) continue;
        loan.watch();
        if (crew.num_shifts.load() > 0) {
            idle_since_ns = 0;
        } else if (idle_since_ns == 0) {
            idle_since_ns = now_ns();
        } else if (now_ns() - idle_since_ns > LINGER_NS) {
            loan.rest(0);
            idle_since_ns = 0;
        }
    }
}

// The helper lost its core: it may have this one, with a priority like the owner's (where the system allows that), as
// long as the owner waits.
void fetch(Helper &helper) {
    helper.is_fetched.store(1);
    const pid_t thread = helper.thread.load();
    const sched_param none{};
    cpu_set_t own;
    sched_getaffinity(0, sizeof own, &own);
    sched_setaffinity(thread, sizeof own, &own);  // first: with that priority it would be in others' way over there
    sched_setscheduler(thread, SCHED_OTHER, &none);
    while (helper.is_inside.load()) sleep_while(helper.is_inside, 1);
    sched_setscheduler(thread, SCHED_IDLE, &none);
    move_to(thread, helper.core);
    helper.is_fetched.store(0);
    crew.num_fetched.fetch_add(1);
}

// A helper that runs is only late; one on a borrowed core that does not is fetched.
void await(Helper &helper) {
    int64_t from_ns = now_ns(), run_ns = helper.run_ns();
    for (int spins = 0; helper.is_inside.load(); spins++) {
        pause_briefly();
        if (spins % SPINS != 0 || now_ns() - from_ns < PATIENCE_NS) continue;
        if (helper.core < 0) {
            sched_yield();
            continue;
        }
        const int64_t ran_ns = helper.run_ns() - run_ns;
        if (2 * ran_ns < now_ns() - from_ns) return fetch(helper);
        from_ns = now_ns(), run_ns += ran_ns;
    }
}

}  // namespace

void run_pieces(int64_t count, Piece piece, void *body) {
    if (count <= 1 || crew.helpers.empty() || is_at_work || crew.is_taken.exchange(true)) {
        for (int64_t index = 0; index < count; index++) piece(body, index);
        return;
    }
    call_helpers();
    crew.piece = piece, crew.body = body, crew.count = count;
    crew.next.store(0);
    crew.job.fetch_add(1);
    work(false);
    crew.job.fetch_add(1);
    for (auto &helper : crew.helpers)
        if (helper->is_inside.load()) await(*helper);
    crew.is_taken.store(false);
}

Shift::Shift() { crew.num_shifts.fetch_add(1); }

Shift::~Shift() { crew.num_shifts.fetch_sub(1); }

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

// Whether a pass of somebody else has used a core that is not the process's within WANTED_NS.
extern "C" int32_t crew_others_at_work() {
    cpu_set_t own;
    sched_getaffinity(0, sizeof own, &own);
    return board().is_any_wanted_outside(own);
}

// The caller's core may be borrowed at once: it does nothing for a while.
extern "C" void crew_lend_core() { board().lend_this_core(); }
