/* A forked child that has the number of its parent, in a pid namespace of its own: it uses none of its parent's handles.
   Exits with 77 where there are no namespaces. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "kvferry.h"

#include <sched.h>
#include <sys/wait.h>

#include "check.h"

enum { NO_NAMESPACES = 77 };

static kvferry_error error;

static kvferry_agent *start(void) {
    kvferry_agent *agent = NULL;
    error.size = sizeof error;
    CHECK(kvferry_agent_start(NULL, &agent, &error) == 0);
    return agent;
}

/* Runs `body` in a child that is the first process of a new pid namespace, and ends as it does. */
static void end_as_first_process(void (*body)(kvferry_agent *), kvferry_agent *agent) {
    if (unshare(CLONE_NEWPID) != 0) {
        const unsigned user = (unsigned)geteuid();
        if (unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) exit(NO_NAMESPACES);
        FILE *map = fopen("/proc/self/uid_map", "w");
        CHECK(map && fprintf(map, "%u %u 1", user, user) > 0 && fclose(map) == 0);
    }
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(getpid() == 1);
        body(agent);
        exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    exit(WEXITSTATUS(status));
}

static void the_child(kvferry_agent *of_parent) {
    CHECK(kvferry_handles_in_use() == 0);
    CHECK(kvferry_agent_free(of_parent, &error) == KVFERRY_FORKED);
    CHECK(kvferry_agent_free(start(), &error) == 0);
}

static void the_parent(kvferry_agent *nothing) {
    CHECK(nothing == NULL);
    kvferry_agent *agent = start();
    CHECK(kvferry_handles_in_use() == 1);
    end_as_first_process(the_child, agent);
}

int main(void) {
    end_as_first_process(the_parent, NULL);
    return 1;
}
