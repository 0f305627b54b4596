/* The library that stands in for the NVIDIA driver. cuda.bindings finds every function of the driver through
   cuGetProcAddress, so that this is all of it that must be compiled; the functions themselves are Python's. */

typedef int (*planc_resolver)(const char *name, void **function);

static planc_resolver resolver;

void planc_set_resolver(planc_resolver r) { resolver = r; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
  (void)version;
  (void)flags;
  *function = 0;
  int found = resolver && resolver(name, function) == 0;
  if (status) *status = found ? 0 : 1; /* CU_GET_PROC_ADDRESS_SUCCESS, _SYMBOL_NOT_FOUND */
  return found ? 0 : 500;              /* CUDA_SUCCESS, CUDA_ERROR_NOT_FOUND */
}
