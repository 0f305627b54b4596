"""The CUDA kernel table: in goes nothing, out come the rows of every kind of op."""

from planc.codegen.cuda.attention import ATTENTION
from planc.codegen.cuda.call import Row
from planc.codegen.cuda.dense import DENSE
from planc.codegen.cuda.pointwise import POINTWISE
from planc.codegen.cuda.rows import ROWS

TABLE: tuple[Row, ...] = (*DENSE, *ROWS, *POINTWISE, *ATTENTION)
