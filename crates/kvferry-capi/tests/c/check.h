/* What the test programs share. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

static inline unsigned char pattern(size_t at, unsigned seed) { return (unsigned char)(at * 31u + seed * 7u + 1u); }

static inline void fill(void *memory, size_t len, unsigned seed) {
    unsigned char *bytes = (unsigned char *)memory;
    for (size_t i = 0; i < len; i++) bytes[i] = pattern(i, seed);
}

static inline int is_filled(const void *memory, size_t len, unsigned seed) {
    const unsigned char *bytes = (const unsigned char *)memory;
    for (size_t i = 0; i < len; i++)
        if (bytes[i] != pattern(i, seed)) return 0;
    return 1;
}

static inline void pause_ms(long ms) {
    struct timespec time = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&time, NULL);
}

#endif
