// What ranks do together, in CUDA C++: each runs the same launch on its own GPU and writes to its peers' memory.
//
// Sums are added in the order of the ranks, element by element, whatever the message: the bits of an element depend
// neither on its place nor on how many others are sent with it. Small messages go in one shot: every rank sends its part
// to all, and each adds all parts. Large ones take two: each rank adds one slice, reading it from all, and sends the sums
// to all.
//
// Blocks meet: block b of a rank waits for block b of every other. A block sends before it waits and needs no other block
// of its own GPU, so those that are resident can always go on. Meetings are counted in epochs, which only grow, so that
// flags are never reset. A message in one shot lies in the half of the staging that its epoch names; by the time that half
// is written again, every peer has met this block one epoch later, so it has read what lay there.
//
// KERNEL names the one that is compiled. RANKS is a plan's; the other macros are the numbers of plans/ranks.py.

typedef unsigned long long address;

// The beginning of the memory that ranks share, which the executor fills before the first step.
struct Table {
  address rank;
  address acts[MOST];    // where the activations of each rank begin: one layout on all of them
  address shared[MOST];  // where the memory begins that each rank shares, this table first
};

struct Group {
  char* own;
  const Table* table;
  unsigned rank;

  __device__ explicit Group(char* shared) : own(shared), table((const Table*)shared), rank((unsigned)table->rank) {}

  // The place on a peer of what lies at `here` among the activations of this rank.
  __device__ float* there(unsigned peer, const float* here) const {
    return (float*)((address)here - table->acts[rank] + table->acts[peer]);
  }

  // How often this block has met others. All threads read it before the first of them can write it.
  __device__ unsigned* epoch() const { return (unsigned*)(own + EPOCHS) + blockIdx.x; }

  // Where a rank is told how often its block has met that of `from`.
  __device__ unsigned* flag(char* shared, unsigned from) const {
    return (unsigned*)(shared + FLAGS) + blockIdx.x * RANKS + from;
  }

  // Where a rank gets what `from` sends in one shot.
  __device__ float* staging(char* shared, unsigned from, unsigned epoch) const {
    return (float*)(shared + STAGING) + (address)((blockIdx.x * 2 + (epoch & 1)) * RANKS + from) * PART;
  }

  // Tells all ranks that this block has come to an epoch, with all that it has written, and waits for theirs.
  __device__ void meet(unsigned epoch) const {
    __syncthreads();
    if (threadIdx.x < RANKS) {
      unsigned* there = flag((char*)table->shared[threadIdx.x], rank);
      unsigned* here = flag(own, threadIdx.x);
      unsigned seen, sleeps = 0;
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(there), "r"(epoch) : "memory");
      while (true) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(here) : "memory");
        if ((int)(seen - epoch) >= 0) break;  // a peer may be one epoch further
        if (++sleeps == PATIENCE) __trap();   // a rank is gone: an error is better than a GPU that never comes back
        __nanosleep(SLEEP);
      }
    }
    __syncthreads();
  }

  // Keeps the epoch of a launch's last meeting.
  __device__ void met(unsigned epoch) const {
    if (threadIdx.x == 0) *this->epoch() = epoch;
  }
};

__device__ float plus(float a, float b) { return a + b; }
__device__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Whether arrays of so many elements that begin here can be moved in vectors.
__device__ bool wide(const float* a, const float* b, long long count) {
  return (((address)a | (address)b | (address)count * sizeof(float)) & 15) == 0;
}

// The sum of an element over all ranks: the loads are under way together, the additions are in order.
template <typename V>
__device__ V sum(const V* const (&parts)[RANKS], long long i) {
  V x[RANKS];
#pragma unroll
  for (unsigned r = 0; r < RANKS; ++r) x[r] = parts[r][i];
#pragma unroll
  for (unsigned r = 1; r < RANKS; ++r) x[0] = plus(x[0], x[r]);
  return x[0];
}

template <typename V>
__device__ void send(V* const (&to)[RANKS], long long i, V value) {
#pragma unroll
  for (unsigned r = 0; r < RANKS; ++r) to[r][i] = value;
}

namespace kernels {

// y = the sum of all ranks' x, of at most PART elements a block.
template <typename V>
__device__ void all_reduce_one_shot(const Group& group, const float* x, float* y, long long count) {
  const unsigned elements = count * sizeof(float) / sizeof(V), each = (elements + gridDim.x - 1) / gridDim.x;
  const unsigned start = blockIdx.x * each, size = start < elements ? min(each, elements - start) : 0;
  const unsigned epoch = *group.epoch() + 1;
  V* to[RANKS];
  const V* from[RANKS];
#pragma unroll
  for (unsigned r = 0; r < RANKS; ++r) {
    to[r] = (V*)group.staging((char*)group.table->shared[r], group.rank, epoch);
    from[r] = (const V*)group.staging(group.own, r, epoch);
  }
  for (unsigned i = threadIdx.x; i < size; i += THREADS) send(to, i, ((const V*)x)[start + i]);
  group.meet(epoch);
  for (unsigned i = threadIdx.x; i < size; i += THREADS) ((V*)y)[start + i] = sum(from, i);
  group.met(epoch);
}

// y = the sum of all ranks' x, of any size.
template <typename V>
__device__ void all_reduce_two_shot(const Group& group, const float* x, float* y, long long count) {
  const long long elements = count * sizeof(float) / sizeof(V), each = (elements + RANKS - 1) / RANKS;
  const long long start = group.rank * each, stop = min(start + each, elements);
  const unsigned epoch = *group.epoch() + 2;
  const V* from[RANKS];
  V* to[RANKS];
#pragma unroll
  for (unsigned r = 0; r < RANKS; ++r) {
    from[r] = (const V*)group.there(r, x);
    to[r] = (V*)group.there(r, y);
  }
  group.meet(epoch - 1);  // every part is whole, and nobody needs what lies in y
  const long long stride = gridDim.x * THREADS;
  for (long long i = start + blockIdx.x * THREADS + threadIdx.x; i < stop; i += stride) send(to, i, sum(from, i));
  group.meet(epoch);  // all slices have come, and nobody needs x
  group.met(epoch);
}

// y = the x of all ranks, one behind the other.
template <typename V>
__device__ void all_gather(const Group& group, const float* x, float* y, long long count) {
  const long long elements = count * sizeof(float) / sizeof(V), stride = gridDim.x * THREADS;
  const unsigned epoch = *group.epoch() + 2;
  V* to[RANKS];
#pragma unroll
  for (unsigned r = 0; r < RANKS; ++r) to[r] = (V*)(group.there(r, y) + group.rank * count);
  group.meet(epoch - 1);  // nobody needs what lies in y
  for (long long i = blockIdx.x * THREADS + threadIdx.x; i < elements; i += stride) send(to, i, ((const V*)x)[i]);
  group.meet(epoch);  // all parts have come
  group.met(epoch);
}

}  // namespace kernels

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const float* x, float* y, long long count, char* shared) {
  const Group group(shared);
  if (wide(x, y, count))
    kernels::KERNEL<float4>(group, x, y, count);
  else
    kernels::KERNEL<float>(group, x, y, count);
}
