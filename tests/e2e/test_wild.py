"""Checkpoints as they are in the wild, from folder to tokens: own code, a tensor an expert, a multimodal parent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planc.compiler.coverage.tokenizer import small_tokenizer
from planc.plans import store
from tests.compiler.source.test_wild import parent
from tests.e2e import rig
from tests.models import tiny
from tests.moe import MOE

PROMPT = [1, 5, 9, 100, 4, 7, 8, 3, 99, 101, 12, 23, 33]
COUNT = 12
OWN_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

print("own code runs")


class OwnConfig(PretrainedConfig):
    model_type = "own_decoder"

    def __init__(self, vocab_size=330, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = 256
        super().__init__(**others)


def eager(module, query, key, value, attention_mask, scaling, **others):
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class OwnLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal, self.layer_idx = config, True, 0
        self.size = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = 1
        self.norm = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.up, self.down = nn.Linear(config.hidden_size, 96), nn.Linear(96, config.hidden_size)

    def forward(self, x, mask):
        shape = (*x.shape[:2], -1, self.size)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(self, q, k, v, mask, scaling=self.size**-0.5, dropout=0.0)
        x = x + self.out(out.reshape(x.shape))
        return x + self.down(torch.tanh(self.up(x)))


class OwnModel(PreTrainedModel):
    config_class, base_model_prefix, _supports_sdpa, _supports_attention_backend = OwnConfig, "model", True, True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(OwnLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False, **others):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embed(input_ids) + self.places(position_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None,
            position_ids=position_ids,
        )
        for layer in self.layers:
            x = layer(x, mask)
        return BaseModelOutputWithPast(last_hidden_state=x)


class OwnForCausalLM(PreTrainedModel):
    config_class, base_model_prefix, _supports_sdpa, _supports_attention_backend = OwnConfig, "model", True, True

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed

    def forward(self, input_ids, attention_mask=None, position_ids=None, logits_to_keep=0, use_cache=False, **others):
        x = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        rows = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else rows
        return CausalLMOutputWithPast(logits=self.lm_head(x[:, rows]))
"""


def planc(*args: object) -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own, where no test has imported the model's code before."""
    command = [sys.executable, "-m", "planc", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)


def build(model: Path, out: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    sizes = ("--dtype", "f32", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")
    return planc("build", "--model", model, "-o", out, *sizes, *flags)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """transformers' tokens, each from a forward over everything before it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(COUNT):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def same_tokens(plan: Path, model: Any) -> None:
    (tokens,) = rig.run(plan, [PROMPT], max_tokens=COUNT).tokens
    assert tokens == greedy(model.eval(), PROMPT)
    assert store.load(plan).accuracy.top1_agreement > 0.99


def test_own_code_needs_the_flag_and_runs_in_the_build_only(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, out = tmp_path / "own", tmp_path / "plan"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own_decoder", "auto_map": classes}))
    small_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.5 if parameter.dim() < 2 else 2 * parameter.shape[-1] ** -0.5)
            )
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})

    refused = build(folder, out)
    assert (refused.returncode, "own code runs" in refused.stdout) == (1, False)
    assert "--trust-remote-code" in refused.stderr.strip().splitlines()[-1]
    assert "Traceback" not in refused.stderr
    built = build(folder, out, "--trust-remote-code")
    assert built.returncode == 0, built.stderr
    assert not list(out.rglob("*.py"))
    for path in folder.iterdir():
        path.unlink()
    served = planc("run", out, "--prompt", "the", "--max-tokens", "3")
    assert served.returncode == 0, served.stderr
    assert "own code runs" not in served.stdout + served.stderr
    same_tokens(out, model)


@pytest.mark.slow
def test_a_tensor_an_expert_below_a_parents_prefix_in_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny("mixtral", tmp_path, dtype="bfloat16", **MOE["mixtral"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for at in range(3):
        file = f"model-{at + 1:05}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[at::3]}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names[at::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert sum(".experts." in name for name in names) == 2 * 4 * 3
    built = build(folder, tmp_path / "plan")
    assert built.returncode == 0, built.stderr
    same_tokens(tmp_path / "plan", model)


@pytest.mark.slow
def test_the_language_model_of_a_parent(tmp_path: Path) -> None:
    from transformers import AutoModelForMultimodalLM

    folder = parent("gemma3", tmp_path)
    small_tokenizer().save_pretrained(folder)
    built = build(folder, tmp_path / "plan")
    assert built.returncode == 0, built.stderr
    assert "compiling the language model (gemma3_text) of a gemma3 model" in built.stderr + built.stdout
    assert store.load(tmp_path / "plan").model.architecture == "Gemma3ForCausalLM"
    assert any("vision_tower" in name for name in store.load(tmp_path / "plan").model.unused_tensors)
    same_tokens(tmp_path / "plan", AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager"))
