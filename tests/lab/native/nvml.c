/* Fake NVML of the lab: the calls that monitoring makes, answered from /run/fake-gpu ("name value" a line).
 * Names, units and codes are those of NVIDIA's NVML reference; values not in the file take the defaults below.
 */
#include <stdio.h>
#include <string.h>

#define STATE_FILE "/run/fake-gpu"
#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define MIB (1024ULL * 1024)

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilisation_t;

static long value(const char *wanted, long otherwise) {
    char name[64];
    long read;
    FILE *file = fopen(STATE_FILE, "r");
    if (!file) return otherwise;
    while (fscanf(file, "%63s %ld", name, &read) == 2)
        if (strcmp(name, wanted) == 0) {
            otherwise = read;
            break;
        }
    fclose(file);
    return otherwise;
}

static unsigned long long total_bytes(void) { return value("total_mib", 8192) * MIB; }
static unsigned long long used_bytes(void) { return value("used_mib", 512) * MIB; }

static int text(char *out, unsigned size, const char *words) {
    snprintf(out, size, "%s", words);
    return SUCCESS;
}

int nvmlInit_v2(void) { return value("init_error", SUCCESS); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = value("count", 1); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((long)index >= value("count", 1)) return INVALID_ARGUMENT;
    *device = (void *)(unsigned long)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    (void)device; (void)sensor;
    *celsius = value("temperature_celsius", 48);
    return value("temperature_error", SUCCESS);
}

/* nvidia-ml-py 12.575 and later asks through this one. */
typedef struct { unsigned version; int sensor; int celsius; } temperature_v1_t;
int nvmlDeviceGetTemperatureV(void *device, temperature_v1_t *answer) {
    unsigned celsius;
    int result = nvmlDeviceGetTemperature(device, answer->sensor, &celsius);
    answer->celsius = (int)celsius;
    return result;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    (void)device;
    memory->total = total_bytes();
    memory->used = used_bytes();
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
    (void)device;
    memory->total = total_bytes();
    memory->reserved = 0;
    memory->used = used_bytes();
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, utilisation_t *rates) {
    (void)device;
    rates->gpu = value("utilisation_percent", 7);
    rates->memory = 3;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = value("power_milliwatts", 9000);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    (void)device;
    *reasons = value("throttle_reasons", 0);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons);
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) { (void)device; return text(name, size, "Fake GPU"); }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    char words[64];
    snprintf(words, sizeof words, "GPU-00000000-0000-0000-0000-%012lu", (unsigned long)device);
    return text(uuid, size, words);
}
int nvmlSystemGetDriverVersion(char *version, unsigned size) { return text(version, size, "540.4.0"); }

const char *nvmlErrorString(int result) {
    if (result == SUCCESS) return "Success";
    return result == INVALID_ARGUMENT ? "Invalid Argument" : "Error set by the lab";
}
