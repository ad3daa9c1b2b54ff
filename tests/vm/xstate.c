/* Preloaded into linux.uml on processors with AMX: it sets the FPU's state by 2,696 bytes, as it was up to
 * AVX-512, and such a processor's kernel takes the whole state (11,008 bytes) or none ("ptrace set fp regs
 * failed"). What it does not name is taken from the state that the process has. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

long ptrace(enum __ptrace_request request, ...)
{
    static long (*next)(enum __ptrace_request, ...);
    static char state[1 << 16] __attribute__((aligned(64)));
    va_list rest;
    va_start(rest, request);
    pid_t pid = va_arg(rest, pid_t);
    void *addr = va_arg(rest, void *), *data = va_arg(rest, void *);
    va_end(rest);

    if (next == NULL)
        next = dlsym(RTLD_NEXT, "ptrace");
    if (request != PTRACE_SETREGSET || addr != (void *)NT_X86_XSTATE)
        return next(request, pid, addr, data);
    struct iovec whole = {state, sizeof state}, *given = data;
    if (next(PTRACE_GETREGSET, pid, addr, &whole) != 0)
        return -1;
    memcpy(state, given->iov_base, given->iov_len < whole.iov_len ? given->iov_len : whole.iov_len);
    return next(PTRACE_SETREGSET, pid, addr, &whole);
}
