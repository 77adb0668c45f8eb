/* Stands before the C library in a test's process (LD_PRELOAD): the n-th write to an unfinished file is the last one.

   armed with error 0: the process is killed there; a write of several pages is cut at a page, as a kill may cut it.
   armed with another error: this write and all later ones fail with it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long armed_at, calls;
static int armed_error;

void arm(long at, int error) { armed_at = at, armed_error = error, calls = 0; }

static int is_partial(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, ".partial") != NULL;
}

static int is_hit(int fd) { return armed_at && is_partial(fd) && ++calls >= armed_at; }

static int die_or_fail(void) {
    if (!armed_error) kill(getpid(), SIGKILL);
    errno = armed_error;
    return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define PWRITE(name, offset_type)                                                        \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) {            \
        if (!is_hit(fd)) return REAL(name)(fd, data, size, offset);                      \
        if (!armed_error && size > 4096) REAL(name)(fd, data, size / 2 & ~4095ul, offset); \
        return die_or_fail();                                                            \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define FTRUNCATE(name, offset_type) \
    int name(int fd, offset_type size) { return is_hit(fd) ? die_or_fail() : REAL(name)(fd, size); }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define FALLOCATE(name, offset_type)                                \
    int name(int fd, offset_type offset, offset_type size) {        \
        if (!is_hit(fd)) return REAL(name)(fd, offset, size);       \
        return die_or_fail() ? armed_error : 0;                     \
    }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)
