/* A library with the functions of libnvidia-ml.so.1 that the sampler calls: two GPUs, one of which reports an
 * error (XID 94) while the other falls off the bus at its fourth reading. Built and loaded by test_telemetry.py. */

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef struct { int index; int readings; } gpu_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { gpu_t *device; unsigned long long type, data; unsigned instance, compute; } event_t;
typedef struct {
    unsigned field, scope;
    int64_t timestamp, latency_us;
    unsigned type, result;
    union { double as_double; unsigned long long as_ull; unsigned as_uint; } value;
} field_t;

static gpu_t gpus[2] = {{0, 0}, {1, 0}};
static int reported;

static int answer(gpu_t *gpu) { return gpu->index == 1 && gpu->readings >= 4 ? GPU_IS_LOST : SUCCESS; }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) { *gpu = &gpus[index]; return SUCCESS; }

int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned size) {
    snprintf(text, size, "GPU-00000000-0000-0000-0000-00000000000%d", gpu->index);
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *values) {
    for (int i = 0; i < count; i++) {
        values[i].result = SUCCESS;
        switch (values[i].field) {
        case 186: values[i].type = 1; values[i].value.as_uint = 400000 + 1000 * gpu->readings; break;
        case 83: values[i].type = 3; values[i].value.as_ull = 1000000ull * gpu->readings; break;
        case 4: values[i].type = 3; values[i].value.as_ull = gpu->index == 0 && gpu->readings > 2; break;
        default: values[i].result = NOT_SUPPORTED;
        }
    }
    gpu->readings++;
    return answer(gpu);
}

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned kind, unsigned *mhz) { *mhz = 1980; return answer(gpu); }
int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *c) { *c = 66; return answer(gpu); }
int nvmlDeviceGetUtilizationRates(gpu_t *gpu, utilization_t *rates) {
    rates->gpu = 98;
    rates->memory = 41;
    return answer(gpu);
}
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory) {
    memory->total = 80ull << 30;
    memory->used = 11ull << 30;
    return answer(gpu);
}
int nvmlDeviceGetCurrentClocksEventReasons(gpu_t *gpu, unsigned long long *reasons) {
    *reasons = gpu->index == 0 ? 0x40 : 0;
    return answer(gpu);
}

int nvmlEventSetCreate(void **set) { *set = &reported; return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(gpu_t *gpu, unsigned long long *kinds) { *kinds = 8; return SUCCESS; }
int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long kinds, void *set) { return SUCCESS; }
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
    if (reported) {
        usleep(1000 * timeout_ms);
        return TIMEOUT;
    }
    reported = 1;
    memset(event, 0, sizeof *event);
    event->device = &gpus[0];
    event->type = 8;
    event->data = 94;
    return SUCCESS;
}
