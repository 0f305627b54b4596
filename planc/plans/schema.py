"""The plan as data: in go the compiler's results, out comes plan.json, and back; every field is typed and checked."""

from dataclasses import dataclass, field

from planc.plans.tuning import Blocking, CpuProduct, Product, Tile

SCHEMA_VERSION = 1
_RANK_FILES = "weights/rank"


def rank_file(rank: int) -> str:
    """The file of a rank's weights, below the plan."""
    return f"{_RANK_FILES}{rank}.safetensors"


@dataclass(frozen=True)
class ModelInfo:
    """What was compiled. `fingerprint` is a sha256 over the config and the table of checkpoint tensors.

    `fixed_regimes` are modules that answer as in a sequence of `max_model_len` tokens, however short it is.
    """

    name: str
    architecture: str
    model_type: str
    fingerprint: str
    num_parameters: int
    num_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unused_tensors: tuple[str, ...] = ()
    fixed_regimes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What the build was asked for, after defaults."""

    dtype: str
    kv_cache_dtype: str
    block_size: int
    weights: str
    seed: int


@dataclass(frozen=True)
class Limits:
    """What the plan can do: tokens of one sequence, sequences and tokens of one step, logits per row; and the processes
    or devices that run it together.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    ranks: int = 1


@dataclass(frozen=True)
class KVLayer:
    """One attention layer's part of a page: byte offsets of K [heads, k_dim, block] and V [heads, block, v_dim].

    `mask` is causal, sliding or chunked, `window` its size (0 for causal). Elements of 8 bits are codes, each times the
    scale of its position and head: f32 [heads, block] at `k_scale_offset` and `v_scale_offset`.
    """

    heads: int
    k_dim: int
    v_dim: int
    window: int
    k_offset: int
    v_offset: int
    mask: str = "causal"
    k_scale_offset: int | None = None
    v_scale_offset: int | None = None


@dataclass(frozen=True)
class KVLayout:
    """The paged cache: a page holds `block_size` positions of every layer in `page_bytes`, scales included.

    Each rank has its own, with the heads that it computes.
    """

    dtype: str
    block_size: int
    page_bytes: int
    layers: tuple[KVLayer, ...]


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its name holds all that specialises it; `count` launches a step."""

    name: str
    op: str
    source: str
    count: int


@dataclass(frozen=True)
class Program:
    """The library of one step: `weights` in the order of its table, `logits_offset` in bytes into the arena."""

    library: str
    arena_bytes: int
    logits_offset: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes by part, of a rank. `kv_token` is the cache of one token, `kv_full` that of max_num_seqs full sequences."""

    weights: int
    constants: int
    arena: int
    kv_token: int
    kv_full: int


@dataclass(frozen=True)
class Golden:
    """A prompt, the plan's greedy tokens after it, and the reference's top-1 minus top-2 logit at each of them."""

    prompt: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    reference_agrees: tuple[bool, ...]


@dataclass(frozen=True)
class WeightError:
    """How far the stored form of a weight is from the checkpoint's: ||stored - original|| / ||original||, Frobenius.

    `modules` are the modules whose parameters the weight joins, `kind` what reads it: linear, expert, head, embedding
    or router.
    """

    modules: tuple[str, ...]
    kind: str
    scheme: str
    error: float


@dataclass(frozen=True)
class Accuracy:
    """Distance to the original model in float32 over `tokens` next-token distributions; KL in nats.

    `reference` is "none" when the build skipped it; the figures are then None. `most_kl` and `most_ppl_increase` (a
    share) are what the build allowed, `widened` the modules that `--auto-mixed` gave a wider scheme to stay within
    that, `weights` the error of each quantized weight.
    """

    reference: str
    text_sha256: str | None = None
    tokens: int = 0
    mean_kl: float | None = None
    top1_agreement: float | None = None
    perplexity: float | None = None
    reference_perplexity: float | None = None
    most_kl: float | None = None
    most_ppl_increase: float | None = None
    widened: tuple[str, ...] = ()
    weights: tuple[WeightError, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """The text that chose how weights are rounded: its name as given, sha256 and the tokens that were run.

    Of `products` calibrated, `scaled` groups had their inputs scaled; `unscaled` are modules whose inputs could not be.
    """

    text: str
    text_sha256: str
    tokens: int
    products: int
    scaled: int
    unscaled: tuple[str, ...]


@dataclass(frozen=True)
class ProductTile:
    """How a GPU's plan cuts a product in its step of `tokens` tokens, `launches` times: the tile, the microseconds that
    one should take by the cost model and what bounds it; `measured` where a tuning file chose it.
    """

    tokens: int
    launches: int
    product: Product
    tile: Tile
    microseconds: float
    bound: str
    measured: bool = False


@dataclass(frozen=True)
class ProductBlocking:
    """How a tuning file cut a product of a CPU's plan, in `launches` launches a step."""

    launches: int
    product: CpuProduct
    blocking: Blocking


@dataclass(frozen=True)
class KernelEstimate:
    """Launches of one op in a step that have one bound: memory, L2, latency, tensor cores, shared memory, CUDA cores,
    NVLink, PCIe or launches.
    """

    op: str
    launches: int
    milliseconds: float
    bound: str


@dataclass(frozen=True)
class Estimate:
    """A step of a GPU as its published rates imply it: `context` tokens of each sequence are looked at."""

    step: str
    tokens: int
    seqs: int
    context: int
    milliseconds: float
    tokens_per_s: float
    kernels: tuple[KernelEstimate, ...]


@dataclass(frozen=True)
class PassLog:
    """One pass: how often it matched, how often it had to (None: no expectation), and the node count after it."""

    name: str
    matches: int
    expected: int | None
    nodes: int


@dataclass(frozen=True)
class Plan:
    """All of plan.json. `files` maps each other file of the directory to its sha256; `digest` is that of the manifest
    itself, taken with `digest` empty. `replicated` are modules whose weights every rank holds whole, `tuning` is the
    sha256 of the tuning file that the build was given.
    """

    model: ModelInfo
    target: str
    options: Options
    limits: Limits
    kv: KVLayout
    memory: Memory
    program: Program
    kernels: tuple[Kernel, ...]
    weight_files: tuple[str, ...]
    goldens: tuple[Golden, ...]
    goldens_target: str | None
    accuracy: Accuracy
    passes: tuple[PassLog, ...]
    made_with: dict[str, str]
    calibration: Calibration | None = None
    estimates: tuple[Estimate, ...] = ()
    tiles: tuple[ProductTile, ...] = ()
    blockings: tuple[ProductBlocking, ...] = ()
    tuning: str | None = None
    replicated: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    schema_version: int = SCHEMA_VERSION

    def weight_files_of(self, rank: int) -> tuple[str, ...]:
        """The files of weights that a rank reads: those of all, and its own."""
        own = rank_file(rank)
        return tuple(n for n in self.weight_files if n == own or not n.startswith(_RANK_FILES))

    @property
    def is_cuda(self) -> bool:
        """Whether the plan is for a GPU."""
        return self.target.startswith("cuda:")

    @property
    def sequence_pages(self) -> int:
        """Pages of a sequence of max_model_len tokens."""
        return -(-self.limits.max_model_len // self.kv.block_size)

    @property
    def has_weights(self) -> bool:
        """False when built with `--weights none`."""
        return self.options.weights == "pack"
