"""Products whose operands move by tensor descriptors (TMA), made by the host or by the kernel itself."""

import triton
import triton.language as tl


@triton.jit
def by_host(a_desc, w_desc, y_desc, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y = a · w^T, one program a tile."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(a_desc.load([m, k * BK]), w_desc.load([n, k * BK]).T, acc)
    y_desc.store([m, n], acc.to(y_desc.dtype))


@triton.jit
def by_kernel(a_ptr, w_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The same with descriptors in the kernel's scratch memory."""
    a_desc = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    w_desc = tl.make_tensor_descriptor(w_ptr, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(a_desc.load([m, k * BK]), w_desc.load([n, k * BK]).T, acc)
    y_desc.store([m, n], acc.to(y_ptr.dtype.element_ty))
