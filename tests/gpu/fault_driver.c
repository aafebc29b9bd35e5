// A CUDA driver that breaks: in front of the real one, for `ATOM_CUDA_DRIVER`. All functions are the real driver's but
// cuGraphLaunch, which puts a kernel in front of launch number FAULT_AFTER: FAULT=trap one that traps, FAULT=hang one that
// never ends, on every thread of the GPU.
//   cc -shared -fPIC -o fault_driver.so fault_driver.c -ldl    (linked with libcuda.so.1, so that its functions are found)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *PTX = ".version 8.0\n.target sm_80\n.address_size 64\n"
                         ".visible .entry trap_now() {\n trap;\n}\n"
                         ".visible .entry hang() {\n .reg .u32 %t;\nagain:\n mov.u32 %t, %clock;\n bra.uni again;\n}\n";

static void *real(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *function = driver ? dlsym(driver, name) : NULL;
    if (!function) {
        fprintf(stderr, "fault_driver: no %s\n", name);
        abort();
    }
    return function;
}

static void launch(const char *kernel, unsigned blocks, void *stream) {
    void *module = NULL, *function = NULL;
    int loaded = ((int (*)(void **, const void *))real("cuModuleLoadData"))(&module, PTX);
    int found = ((int (*)(void **, void *, const char *))real("cuModuleGetFunction"))(&function, module, kernel);
    typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **);
    int launched = ((Launch)real("cuLaunchKernel"))(function, blocks, 1, 1, 1024, 1, 1, 0, stream, NULL, NULL);
    fprintf(stderr, "fault_driver: %s (%d %d %d)\n", kernel, loaded, found, launched);
}

int cuGraphLaunch(void *graph, void *stream) {
    static int launches;
    const char *fault = getenv("FAULT"), *after = getenv("FAULT_AFTER");
    if (fault && after && ++launches == atoi(after)) {
        if (strcmp(fault, "trap") == 0) launch("trap_now", 1, stream);
        if (strcmp(fault, "hang") == 0) launch("hang", 264, stream);
    }
    return ((int (*)(void *, void *))real("cuGraphLaunch"))(graph, stream);
}
