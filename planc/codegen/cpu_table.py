"""The CPU kernel table: in goes nothing, out come its rows, those of model ops and those of elementwise ops."""

from planc.codegen.cpu_elementwise import ELEMENTWISE
from planc.codegen.cpu_model import MODEL
from planc.codegen.kernel import Row

TABLE: tuple[Row, ...] = (*MODEL, *ELEMENTWISE)
