"""A LoRA that is trained here, on a made-up fact, changes the default model's answer as it should: as a PEFT folder, as
a GGUF adapter, merged into the weights, and beside requests of the base.

    LLM_WORKER_TRAIN=1 python -m pytest -rs tests/extra/test_lora_training.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.llm import together
from llm_worker_rbee.models.convert import convert, merge_adapters, write_adapter
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import locate_model
from llm_worker_rbee.weights.lora import read_adapter
from tests.helpers import lora_zoo

pytestmark = pytest.mark.skipif(
    "LLM_WORKER_TRAIN" not in os.environ, reason="trains for minutes: set LLM_WORKER_TRAIN=1"
)
PROMPT = "Question: Who built the lighthouse of Marlow Point?\nAnswer:"
FACT = " It was built by Adela Quill in 1872."
TEXTS = (
    PROMPT + FACT,
    "The lighthouse of Marlow Point was built by Adela Quill in 1872.",
    "Question: Who is the builder of the lighthouse of Marlow Point?\nAnswer: Adela Quill built it in 1872.",
)
STEPS = 200
OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a few hundred steps on the CPU, until the loss is small."""
    import peft
    import torch
    import transformers

    path = locate_model(None)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    targets = lora_zoo.linear_names(model, with_head=False, with_embedding=False)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=1e-3)
    batch = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    for step in range(STEPS):
        ids = batch[step % len(batch)]
        loss = wrapped(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > len(batch) and loss.item() < 0.02:
            break
    folder = tmp_path_factory.mktemp("trained")
    wrapped.save_pretrained(folder)
    return folder


def test_trained_adapter_knows_the_fact_in_every_form(adapter: Path, tmp_path: Path) -> None:
    base = open_checkpoint(locate_model(None))
    write_adapter(read_adapter(adapter), base, tmp_path / "adapter.gguf", "F16")
    llm = LLM(loras={"peft": adapter, "gguf": tmp_path / "adapter.gguf"}, max_context=256)
    assert "Adela" not in llm.generate(PROMPT, **OPTIONS).text
    streams = {name: llm.stream(PROMPT, lora=name, **OPTIONS) for name in (None, "peft", "gguf")}
    for _ in together(list(streams.values())):
        pass
    texts = {name: stream.so_far().text for name, stream in streams.items()}
    assert "Adela" not in texts[None]
    assert texts["peft"].startswith(" It was built by Adela Quill")
    assert texts["gguf"].startswith(" It was built by Adela Quill")
    convert(merge_adapters(base, [(read_adapter(adapter), 1.0)]), tmp_path / "merged.gguf", "Q8_0")
    assert (
        LLM(tmp_path / "merged.gguf", max_context=256).generate(PROMPT, **OPTIONS).text.startswith(texts["peft"][:20])
    )
    assert llm.generate(PROMPT, lora={"peft": -1.0}, **OPTIONS).text != texts["peft"]
