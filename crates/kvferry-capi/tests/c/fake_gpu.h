/* The fake driver of GPUs in a test program: its functions by their names. */
#ifndef KVFERRY_TESTS_FAKE_GPU_H
#define KVFERRY_TESTS_FAKE_GPU_H

#include <dlfcn.h>

#include "check.h"

static void *driver;

static void open_driver(const char *path) {
    driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(driver != NULL);
}

/* A function of the driver. */
static void *named(const char *name) {
    void *found = dlsym(driver, name);
    CHECK(found != NULL);
    return found;
}

/* Object and function pointers are of one size wherever the driver is. */
#define CALL(name, types, ...)                            \
    do {                                                  \
        int(*function) types;                             \
        void *found = named(name);                        \
        memcpy(&function, &found, sizeof function);       \
        CHECK(function(__VA_ARGS__) == 0);                \
    } while (0)

#endif
