"""The CUDA kernel table: in goes nothing, out come the rows of every kind of op."""

from planc.codegen.cuda.call import Row
from planc.codegen.cuda.dense import DENSE

TABLE: tuple[Row, ...] = DENSE
