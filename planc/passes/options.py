"""What the passes may ask about a build: in goes the command line, out comes a frozen row for each pass."""

from dataclasses import dataclass

from planc.codegen.target import Target


@dataclass(frozen=True)
class Options:
    """`dtype` is the weight scheme (f32, bf16, int8); `kv_dtype` f32 or bf16; sizes count tokens or sequences."""

    target: Target
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    tp: int = 1

    @property
    def dims(self) -> dict[str, int]:
        """The largest value of each symbol that sizes the arena."""
        return {"T": self.max_num_batched_tokens, "R": self.max_num_seqs, "S": self.max_num_seqs}
