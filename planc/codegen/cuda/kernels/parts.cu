// The sum of parts that lie one behind the other, in their order: what ranks add where NCCL has moved their parts.
//
// KERNEL names the kernel, RANKS is a plan's, THREADS the size of a block.

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const float* parts, float* y, long long count) {
  const long long stride = gridDim.x * THREADS;
  for (long long i = blockIdx.x * THREADS + threadIdx.x; i < count; i += stride) {
    float x[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) x[r] = parts[r * count + i];
#pragma unroll
    for (int r = 1; r < RANKS; ++r) x[0] += x[r];
    y[i] = x[0];
  }
}
