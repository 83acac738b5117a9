/* A stand-in for libnvidia-ml.so.1 that plays a machine from a file, so that the real bindings can be driven
 * without a GPU. The file named by FAKE_NVML_FILE holds lines `key<TAB>value`:
 *   driver, cuda, count                 of the system
 *   gpu.N.FIELD, gpu.N.mig.M.FIELD      of a device
 *   link.A.B.FIELD                      of a pair, A < B
 *   error.FUNCTION, gpu.N.error.FUNCTION   NVML error number that the function returns
 * Values may hold \xHH escapes: a driver's garbage. A missing field is NVML_ERROR_NOT_SUPPORTED. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_NOT_FOUND = 28, MAX = 4096 };

typedef struct { int gpu, mig; } Device;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned long long total, free, used; } MemoryV1;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char busId[32]; } Pci;

static char keys[MAX][96], values[MAX][512];
static int lines;
static Device devices[64], slices[64][16];

static void load(void) {
    char line[700];
    const char *path = getenv("FAKE_NVML_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    lines = 0;
    if (!file) return;
    while (lines < MAX && fgets(line, sizeof line, file)) {
        char *tab = strchr(line, '\t');
        if (!tab) continue;
        *tab = 0;
        line[strcspn(line, "\n")] = 0;
        tab[1 + strcspn(tab + 1, "\n")] = 0;
        snprintf(keys[lines], sizeof keys[0], "%.95s", line);
        char *out = values[lines], *in = tab + 1;
        while (*in && out < values[lines] + sizeof values[0] - 1) {
            if (in[0] == '\\' && in[1] == 'x' && in[2] && in[3]) {
                char hex[3] = {in[2], in[3], 0};
                *out++ = (char)strtol(hex, NULL, 16);
                in += 4;
            } else *out++ = *in++;
        }
        *out = 0;
        lines++;
    }
    fclose(file);
}

static const char *get(const char *key) {
    for (int i = 0; i < lines; i++) if (!strcmp(keys[i], key)) return values[i];
    return NULL;
}

static const char *field(const Device *d, const char *name) {
    char key[128];
    if (d->mig < 0) snprintf(key, sizeof key, "gpu.%d.%s", d->gpu, name);
    else snprintf(key, sizeof key, "gpu.%d.mig.%d.%s", d->gpu, d->mig, name);
    return get(key);
}

static int failure(const Device *d, const char *function) {
    char key[128];
    const char *value;
    snprintf(key, sizeof key, "error.%s", function);
    value = get(key);
    if (!value && d) {
        snprintf(key, sizeof key, "error.%s", function);
        value = field(d, key);
        if (!value) value = field(d, "error.*");
    }
    return value ? atoi(value) : 0;
}

#define CHECK(d) do { int e_ = failure((d), __func__); if (e_) return e_; } while (0)

static int text(const char *value, char *out, unsigned length) {
    if (!value) return NOT_SUPPORTED;
    snprintf(out, length, "%s", value);
    return OK;
}

static int number(const char *value, unsigned *out) {
    if (!value) return NOT_SUPPORTED;
    *out = (unsigned)strtoul(value, NULL, 10);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    load();
    const char *hang = get("hang_seconds");
    if (hang) usleep((useconds_t)(atof(hang) * 1e6));
    CHECK(NULL);
    for (int i = 0; i < 64; i++) {
        devices[i] = (Device){i, -1};
        for (int m = 0; m < 16; m++) slices[i][m] = (Device){i, m};
    }
    return OK;
}

int nvmlShutdown(void) { CHECK(NULL); return OK; }

const char *nvmlErrorString(int code) {
    static char out[64];
    snprintf(out, sizeof out, get("error_strings") ? get("error_strings") : "fake NVML error %d", code);
    return out;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) { CHECK(NULL); return text(get("driver"), out, length); }

int nvmlSystemGetCudaDriverVersion_v2(int *out) { CHECK(NULL); return number(get("cuda"), (unsigned *)out); }

int nvmlDeviceGetCount_v2(unsigned *out) { CHECK(NULL); return number(get("count"), out); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (index >= 64) return INVALID;
    CHECK(&devices[index]);
    *out = &devices[index];
    return OK;
}

int nvmlDeviceGetName(Device *d, char *out, unsigned length) { CHECK(d); return text(field(d, "name"), out, length); }

int nvmlDeviceGetUUID(Device *d, char *out, unsigned length) { CHECK(d); return text(field(d, "uuid"), out, length); }

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    CHECK(d);
    const char *value = field(d, "compute_capability");
    return value && sscanf(value, "%d.%d", major, minor) == 2 ? OK : NOT_SUPPORTED;
}

static int memory(Device *d, MemoryV2 *out) {
    const char *value = field(d, "memory");
    if (!value) return NOT_SUPPORTED;
    return sscanf(value, "%llu %llu %llu %llu", &out->total, &out->reserved, &out->used, &out->free) == 4 ? OK : INVALID;
}

int nvmlDeviceGetMemoryInfo_v2(Device *d, MemoryV2 *out) { CHECK(d); return memory(d, out); }

int nvmlDeviceGetMemoryInfo(Device *d, MemoryV1 *out) {
    MemoryV2 full;
    CHECK(d);
    int code = memory(d, &full);
    if (code == OK) *out = (MemoryV1){full.total, full.free, full.used + full.reserved};
    return code;
}

int nvmlDeviceGetDisplayActive(Device *d, unsigned *out) { CHECK(d); return number(field(d, "display_active"), out); }

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    CHECK(d);
    *pending = 0;
    return number(field(d, "mig_mode"), current);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *out) { CHECK(d); return number(field(d, "mig_count"), out); }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    CHECK(d);
    if (index >= 16 || !field(&slices[d->gpu][index], "uuid")) return NOT_FOUND;
    *out = &slices[d->gpu][index];
    return OK;
}

static int processes(Device *d, const char *name, unsigned *count, Process *out) {
    const char *value = field(d, name);
    unsigned found = 0, room = *count;
    Process list[128];
    while (value && *value && found < 128) {
        unsigned long pid;
        char used[32];
        int taken = 0;
        if (sscanf(value, "%lu:%31[^ ] %n", &pid, used, &taken) != 2 || !taken) break;
        list[found++] = (Process){(unsigned)pid, used[0] == '-' ? ~0ULL : strtoull(used, NULL, 10), 0, 0};
        value += taken;
    }
    *count = found;
    if (!found) return OK;
    if (room < found || !out) return INSUFFICIENT_SIZE;
    memcpy(out, list, found * sizeof *list);
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    CHECK(d);
    return processes(d, "compute", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    CHECK(d);
    return processes(d, "graphics", count, out);
}

int nvmlDeviceGetPersistenceMode(Device *d, unsigned *out) { CHECK(d); return number(field(d, "persistence"), out); }

int nvmlDeviceGetEccMode(Device *d, unsigned *current, unsigned *pending) {
    CHECK(d);
    *pending = 0;
    return number(field(d, "ecc"), current);
}

int nvmlDeviceGetTotalEccErrors(Device *d, unsigned kind, unsigned counter, unsigned long long *out) {
    unsigned value = 0;
    (void)kind, (void)counter;
    CHECK(d);
    int code = number(field(d, "ecc_uncorrected"), &value);
    *out = value;
    return code;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *out) {
    unsigned value = 0;
    CHECK(d);
    int code = number(field(d, "throttle"), &value);
    *out = value;
    return code;
}

int nvmlDeviceGetUtilizationRates(Device *d, Rates *out) { CHECK(d); out->memory = 0; return number(field(d, "utilization"), &out->gpu); }

int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) { CHECK(d); return number(field(d, "power_mw"), out); }

int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *out) { CHECK(d); return number(field(d, "power_limit_mw"), out); }

int nvmlDeviceGetTemperature(Device *d, unsigned sensor, unsigned *out) { (void)sensor; CHECK(d); return number(field(d, "temperature"), out); }

int nvmlDeviceGetVirtualizationMode(Device *d, unsigned *out) { CHECK(d); return number(field(d, "virtualization"), out); }

static int pci(const char *value, Pci *out) {
    memset(out, 0, sizeof *out);
    if (!value) return NOT_SUPPORTED;
    snprintf(out->busId, sizeof out->busId, "%s", value);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(Device *d, Pci *out) { CHECK(d); return pci(field(d, "pci"), out); }

static int pair(Device *a, Device *b, const char *name, unsigned *out) {
    char key[96];
    int low = a->gpu < b->gpu ? a->gpu : b->gpu, high = a->gpu < b->gpu ? b->gpu : a->gpu;
    snprintf(key, sizeof key, "link.%d.%d.%s", low, high, name);
    if (!get(key)) snprintf(key, sizeof key, "link.*.*.%s", name);
    return number(get(key), out);
}

int nvmlDeviceGetP2PStatus(Device *a, Device *b, int index, unsigned *out) {
    CHECK(a);
    return pair(a, b, index == 2 ? "nvlink" : "p2p", out);
}

int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, unsigned *out) { CHECK(a); return pair(a, b, "topology", out); }

static const char *peer(Device *d, unsigned link) {
    char key[32];
    snprintf(key, sizeof key, "nvlink.%u", link);
    return field(d, key);
}

int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *out) {
    CHECK(d);
    if (!peer(d, link)) return NOT_SUPPORTED;
    *out = 1;
    return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, unsigned link, Pci *out) { CHECK(d); return pci(peer(d, link), out); }
