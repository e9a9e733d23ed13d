// Global addresses of a kernel are addresses of this process. With watched memory they are checked
// before the access. Without, the processor finds those that are not mapped: while a launch runs,
// its SIGSEGV or SIGBUS becomes an error of the launch. Checking each access against the page table
// would cost every kernel time.
#include "faults.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <atomic>

#include "machine.h"

namespace {
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS};
constexpr int USER_ADDRESS_BITS = 47;  // an x86-64 reports faults above without their address

sigjmp_buf landing;
std::atomic<bool> launching{false};
pthread_t launcher;
struct sigaction previous[2];

// True if the fault belongs to the newest access of the kernel, and not to a mistake of the engine.
bool is_of_kernel(const siginfo_t* info) {
    const GlobalAccess& access = machine.access;
    return (u64)info->si_addr - access.address < access.bytes ||
           (access.address + access.bytes - 1) >> USER_ADDRESS_BITS;
}

void pass_on(int signal, siginfo_t* info, void* context) {
    const struct sigaction& before = previous[signal == SIGBUS];
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, info, context);
    else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN)
        sigaction(signal, &before, nullptr);  // the instruction faults again, and the system acts
    else
        before.sa_handler(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
    if (launching && pthread_equal(launcher, pthread_self()) && is_of_kernel(info))
        siglongjmp(landing, 1);
    pass_on(signal, info, context);
}

struct Handlers {
    Handlers() {
        launcher = pthread_self();
        launching = true;
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;  // stack overflows elsewhere need their stack
        sigemptyset(&action.sa_mask);
        for (int i = 0; i < 2; i++) sigaction(SIGNALS[i], &action, &previous[i]);
    }
    ~Handlers() {
        for (int i = 0; i < 2; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
        launching = false;
    }
};

// Returns false if the launch faulted. The jump skips destructors, so it leaks the few objects that
// the engine had on its stack; it happens between two instructions' changes of the machine.
bool launch_landed() {
    if (sigsetjmp(landing, 1)) return false;
    machine.launch();
    return true;
}
}  // namespace

void launch_guarded() {
    const Handlers handlers;
    machine.access = {};
    if (launch_landed()) return;
    const GlobalAccess access = machine.access;
    fail("%s at an invalid address: %#llx + %llu is not mapped, or may not be written", access.what,
         access.address, access.bytes);
}
