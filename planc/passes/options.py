"""What the passes may ask about a build: in goes the command line, out comes a frozen row for each pass."""

from dataclasses import dataclass, field
from functools import cached_property

from planc.codegen.target import Target
from planc.passes.choices import Choices
from planc.passes.schemes import QuantConfig
from planc.plans.tuning import Tuning


@dataclass(frozen=True)
class Options:
    """`dtype` is the storage of weights: a dtype or a scheme; `quant` what is said of single modules besides; `choices`
    what calibration found; `kv_dtype` the cache's: f32, bf16, i8, f8e3m4 or, on GPUs, f8e4m3; `tuning` the tiles that
    were measured; sizes count tokens or sequences.
    """

    target: Target
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    tp: int = 1
    quant: QuantConfig | None = None
    choices: Choices = field(default_factory=Choices)
    tuning: Tuning | None = None

    @cached_property
    def storage(self) -> QuantConfig:
        """What says how each weight is stored."""
        return self.quant or QuantConfig(self.dtype)

    @property
    def sequence_pages(self) -> int:
        """Pages of a sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def dims(self) -> dict[str, int]:
        """The largest value of each symbol that sizes the arena."""
        return {"T": self.max_num_batched_tokens, "R": self.max_num_seqs, "S": self.max_num_seqs}
