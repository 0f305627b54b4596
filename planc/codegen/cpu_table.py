"""The CPU kernel table: in goes nothing, out come the rows of every kind of op."""

from planc.codegen.cpu_collective import COLLECTIVE
from planc.codegen.cpu_elementwise import ELEMENTWISE
from planc.codegen.cpu_linear import LINEAR
from planc.codegen.cpu_model import MODEL
from planc.codegen.cpu_moves import MOVES
from planc.codegen.cpu_products import PRODUCTS
from planc.codegen.cpu_quantize import QUANTIZE
from planc.codegen.cpu_rows import ROWS
from planc.codegen.kernel import Row

TABLE: tuple[Row, ...] = (*LINEAR, *QUANTIZE, *MODEL, *ELEMENTWISE, *MOVES, *ROWS, *PRODUCTS, *COLLECTIVE)
