"""What a plan states of its model: in goes a source, out come the manifest's facts and the tokenizer's files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from planc.compiler.progress import Progress
from planc.compiler.source import DescribedSource, ModelSource
from planc.compiler.tokenizer import save_tokenizer
from planc.plans import schema
from planc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from planc.compiler.source.bind import Binding
    from planc.passes.schemes import QuantConfig


def model_info(
    source: ModelSource, config: PretrainedConfig, parameters: int, unused: list[str], fixed: tuple[str, ...]
) -> schema.ModelInfo:
    """The manifest's row; `fixed` are the modules whose regime is that of the longest sequence."""
    text = config.get_text_config()
    generation = source.generation_config()
    eos = generation.get("eos_token_id") or []
    bos = generation.get("bos_token_id", getattr(text, "bos_token_id", None))
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    return schema.ModelInfo(
        name=source.name,
        architecture=architectures[0],
        model_type=config.model_type,
        fingerprint=source.fingerprint(),
        num_parameters=parameters,
        num_layers=int(getattr(text, "num_hidden_layers", 0)),
        bos_token_id=bos[0] if isinstance(bos, list) else bos,
        eos_token_ids=tuple(eos if isinstance(eos, list) else [eos]),
        unused_tensors=tuple(sorted(unused)),
        fixed_regimes=fixed,
    )


def tokenizer_of(source: ModelSource, folder: Path, progress: Progress) -> Tokenizer | None:
    """The model's tokenizer, saved to `folder`; None for a model that is only described, and has none."""
    if isinstance(source, DescribedSource) and not source.has_tokenizer:
        progress.say(f"{source.name} has no tokenizer here: it comes with the weights")
        return None
    with progress.stage("tokenizer"):
        save_tokenizer(source, folder)
        tokenizer = Tokenizer.load(folder)
        _ = tokenizer.chat_template  # one that does not parse stops the build, not a request
    return tokenizer


def say_source(source: ModelSource, config: PretrainedConfig, progress: Progress) -> None:
    """What a user has to know of a checkpoint before it is used."""
    if source.parent_type is not None:
        progress.say(f"compiling the language model ({config.model_type}) of a {source.parent_type} model")
    for note in source.notes:
        progress.say(note)


def say_storage(source: ModelSource, quant: QuantConfig, progress: Progress) -> None:
    """What becomes of codes that a checkpoint holds, where its own may be rounded again."""
    left = Counter(name for tensor, name in source.native.items() if tensor not in quant.native)
    if source.requantizes and left:
        kinds = ", ".join(f"{count} in {name}" for name, count in left.most_common())
        why = "other storage was asked for, or not every target has kernels for them"
        progress.say(f"weights that the file holds quantized ({kinds}) are dequantized: {why}")


def say_binding(binding: Binding, progress: Progress) -> None:
    """What of a checkpoint is not as the config says, or not used."""
    if binding.untied:
        progress.say(f"the checkpoint has its own tensor for {binding.untied[0]}, which the config ties: kept apart")
    if binding.unused:
        progress.say(f"{len(binding.unused)} tensors of the checkpoint are not used, first {binding.unused[0]}")
