/* An agent whose port is open to every host: who is warned, and what KVFERRY_REQUIRE_SECRET does. */
#include "kvferry.h"

#include "check.h"

static kvferry_error error;
static int warnings;

static void on_warning(void *user, const char *text) {
    CHECK(user == &warnings && strstr(text, "without a secret"));
    warnings++;
}

static int start_open(void) {
    kvferry_agent_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.listen = "0.0.0.0:0";
    kvferry_agent *agent = NULL;
    const int code = kvferry_agent_start(&options, &agent, &error);
    if (code == KVFERRY_OK) CHECK(kvferry_agent_free(agent, &error) == KVFERRY_OK);
    return code;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    error.size = sizeof error;
    if (strcmp(argv[1], "callback") == 0) {
        kvferry_on_warning(on_warning, &warnings);
        CHECK(start_open() == KVFERRY_OK && start_open() == KVFERRY_OK && warnings == 1);
        return 0;
    }
    if (strcmp(argv[1], "refused") == 0) {
        CHECK(start_open() == KVFERRY_INVALID_ARGUMENT && strstr(error.text, "KVFERRY_REQUIRE_SECRET"));
        return 0;
    }
    CHECK(start_open() == KVFERRY_OK);
    /* The test looks at stderr where a program fails. */
    return 1;
}
